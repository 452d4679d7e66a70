"""The GPUs that a model is to fit: those of this machine, or usual cards by name. Does not import torch."""

import re
from dataclasses import dataclass

from svdq.pipeline.models.compute.memory import CONTEXT_BYTES, RESERVE_BYTES
from svdq.pipeline.models.family import PublishedModel, PublishedStep
from svdq.producer.text import count
from svdq.worker.launcher.gpus import is_visible, memory_of_gpus

#: Usual cards by what people call them: the driver's name, and gigabytes of memory (NVIDIA's data sheets).
KNOWN_CARDS = {
    name.lower().replace("rtx ", "").replace(" ", ""): (name, gigabytes)
    for gigabytes, names in {
        8: ("RTX 2080", "RTX 3070", "RTX 4060", "RTX 5060"),
        10: ("RTX 3080",),
        11: ("RTX 2080 Ti",),
        12: ("RTX 3060", "RTX 4070", "RTX 4070 Ti", "RTX 5070"),
        16: (
            "RTX 4060 Ti", "RTX 4070 Ti SUPER", "RTX 4080", "RTX 5060 Ti", "RTX 5070 Ti", "RTX 5080", "RTX A4000",
            "T4", "V100",
        ),
        20: ("RTX A4500",),
        24: ("RTX 3090", "RTX 4090", "RTX A5000", "A10", "A10G", "L4"),
        32: ("RTX 5090",),
        48: ("RTX A6000", "A40", "L40", "L40S"),
        80: ("A100", "H100"),
        141: ("H200",),
    }.items()
    for name in names
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How many times as fast as in bf16 a card computes products in a format, as somebody has published it."""

    gpu: str
    format: str
    times: str  # a number, or a range
    source: str

    def __str__(self) -> str:
        return f"{self.format} is {self.times} times as fast as bf16 on {self.gpu}: {self.source}"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Cards for which the same files of a transformer are the best."""

    title: str  # the usual ones among them
    names: str  # pattern of a part of the driver's names
    files: str  # formats of the files
    gains: tuple[Gain, ...] = ()


GENERATIONS = (
    Generation(
        title="RTX 20 to 40",
        names=r"RTX [234]0\d\d|RTX A\d{4}|\b(T4|A10G?|A40|A100|L4|L40S?)\b",
        files="int8",
        gains=(
            Gain(gpu="RTX 3060", format="int8", times="2.0", source="forge-classic#651"),
            Gain(gpu="RTX 3090", format="int8", times="1.26 to 1.99", source="ComfyUI-INT8-Fast"),
            Gain(gpu="RTX 4070 Ti SUPER", format="int8", times="1.76", source="forge-classic#651"),
            Gain(gpu="RTX 4070 Ti SUPER", format="fp8", times="1.45", source="forge-classic#651"),
            Gain(gpu="RTX A6000", format="int8", times="1.0", source="ComfyUI#14824"),
        ),
    ),
    Generation(title="RTX 50", names=r"RTX 50\d\d", files="fp8 or nvfp4"),
    Generation(
        title="H100",
        names=r"\b(H100|H200|GH200|B200|GB200)\b",
        files="bf16",
        gains=(Gain(gpu="GB200", format="int8", times="1.07 to 1.15", source="sglang#38040"),),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Cards:
    """Some equal GPUs."""

    number: int
    total_bytes: int  # of each
    name: str = ""  # as the driver names it; "" if it is not known
    limit_bytes: int | None = None  # that the user grants a rank in place of what a GPU has

    @classmethod
    def parse(cls, text: str) -> "Cards | None":
        """Parse a number of GPUs and their memory or name, such as 7x24, 4090 or 2xA5000; None for anything else."""
        text = re.sub(r"[\s_-]|nvidia|geforce|rtx", "", text.lower())
        found = re.fullmatch(r"(?:([1-9]\d{0,2})x)?(.+)", text)
        number, card = (int(found[1] or 1), found[2]) if found else (1, "")
        if card in KNOWN_CARDS:
            name, gigabytes = KNOWN_CARDS[card]
            return cls(number=number, total_bytes=gigabytes * 2**30, name=name)
        if found and found[1] and re.fullmatch(r"[1-9]\d{0,3}", card):
            return cls(number=number, total_bytes=int(card) * 2**30)
        return None

    @classmethod
    def here(cls) -> "Cards | None":
        """Return the GPUs that ranks will see, of which the smallest counts; None if there are none."""
        rows = [row for row in memory_of_gpus()[0] if row[2].isdigit() and is_visible(row[0])]
        if not rows:
            return None
        smallest = min(rows, key=lambda row: int(row[2]))
        return cls(number=len(rows), total_bytes=int(smallest[2]) * 2**20, name=smallest[1])

    def __str__(self) -> str:
        return f"{count(self.number, 'GPU')} of {self.total_bytes / 2**30:.0f} GiB"

    @property
    def room_bytes(self) -> int:
        """The bytes of each that a rank may use."""
        return self.limit_bytes or self.total_bytes - CONTEXT_BYTES - RESERVE_BYTES

    def files(self) -> str:
        """Return which files of a transformer to take on these cards, as text; of unknown ones, on all generations."""
        for each in GENERATIONS:
            if found := re.search(each.names, self.name, re.IGNORECASE):
                series = found[0][:5]  # such as RTX 4
                gains = ", ".join(str(gain) for gain in each.gains if gain.gpu.startswith(series))
                return f"{each.files}{gains and f' ({gains})'}"
        return ", ".join(f"{each.files} for {each.title}" for each in GENERATIONS)

    def step_of(self, published: PublishedModel | None) -> PublishedStep | None:
        """Return the published time of a step: of this card by its name, or of one with as much memory."""
        if published is None:
            return None
        if self.name:
            return published.step_on(self.name)
        return next((each for each in published.steps if each.gpu_gb == round(self.total_bytes / 2**30)), None)
