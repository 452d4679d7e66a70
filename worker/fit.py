"""Answers what a model needs of some GPUs: bytes to fetch, which ways of holding it fit, and how long videos take.

For `svdq doctor` and `svdq plan`, without torch, and for published models without any file.
"""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.memory import CONTEXT_BYTES, RESERVE_BYTES, size_text
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.families import family_of
from svdq.pipeline.models.family import PublishedModel, PublishedStep
from svdq.pipeline.models.model_file import WEIGHTS_SUFFIXES, find_file, is_model_file, read_model_file
from svdq.pipeline.models.names.model_names import find_folder
from svdq.pipeline.models.needs import ModelSize, Residency, num_weights, published, stored_bytes
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.weights.model_folder import DTYPES, check_folder
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.planning.rounds import LOAD_SHARE
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.text import count
from svdq.worker.launcher.gpus import is_visible, memory_of_gpus

NUM_VIDEOS = 300  # for which times are given unless a number is


#: Usual cards by what people call them: the driver's name, and gigabytes of memory (NVIDIA's data sheets).
KNOWN_CARDS = {
    name.lower().replace("rtx ", "").replace(" ", ""): (name, gigabytes)
    for gigabytes, names in {
        12: ("RTX 3060", "RTX 4070", "RTX 5070"),
        16: ("RTX 4060 Ti", "RTX 4080", "RTX 5060 Ti", "RTX 5070 Ti", "RTX 5080", "RTX A4000", "T4", "V100"),
        20: ("RTX A4500",),
        24: ("RTX 3090", "RTX 4090", "RTX A5000", "A10", "A10G", "L4"),
        32: ("RTX 5090",),
        48: ("RTX A6000", "A40", "L40", "L40S"),
        80: ("A100", "H100"),
        141: ("H200",),
    }.items()
    for name in names
}
#: Bits of a weight by the format in the name of a file; files of the K types of GGUF have blocks of several types.
BITS = {
    "fp8": 8, "q8_0": 8.5, "q6_k": 6.57, "q5_k": 5.6, "q5_1": 6, "q5_0": 5.5,
    "q4_k": 4.8, "q4_1": 5, "q4_0": 4.5, "q3_k": 3.9, "q2_k": 3,
}  # fmt: skip
#: Host memory that pinned weights take, in sizes of their own: torch rounds each tensor up to a power of two. Of Wan
#: 2.2 A14B: 44 GB for 28.6 GB (docs/models.md).
PINNED = 1.54


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

    def step_of(self, published: PublishedModel | None) -> PublishedStep | None:
        """Return the published time of a step: of this card by its name, or of one with as much memory."""
        steps = published.steps if published is not None else ()
        if self.name:
            return next((each for each in steps if each.gpu in self.name), None)
        return next((each for each in steps if each.gpu_gb == round(self.total_bytes / 2**30)), None)


@dataclass(frozen=True, kw_only=True)
class SizedModel:
    """A model that is not loaded, with its size and what of it is to be fetched."""

    size: ModelSize
    published: PublishedModel | None
    download_bytes: int  # 0: its files are here
    missing_files: int = 0  # of those that a model file names, whose sizes are not known

    @property
    def has_experts(self) -> bool:
        """Whether it has two denoising components."""
        return len(self.size.layout.denoisers & self.size.num_weights.keys()) > 1

    def to_fetch(self) -> str:
        """Return text about the bytes to fetch and to convert; "" if all files are here."""
        named = f"{count(self.missing_files, 'file')} that the model file names" if self.missing_files else ""
        if not self.download_bytes:
            return f"{named} to fetch" if named else ""
        converted = sum(map(replace(self.size, kept=False).weights, self.size.num_weights))
        is_smaller = self.download_bytes > 1.1 * converted
        copy = f"; `svdq model convert` makes a copy of {size_text(converted)}" if is_smaller else ""
        return f"{' and '.join(filter(None, [size_text(self.download_bytes), named]))} to fetch{copy}"

    def video(self, shape: str | None = None) -> VideoParameters:
        """Return the default video, or one of a shape such as 1280x720x81, decoded a frame at a time or in tiles."""
        family, given = self.size.family, dict[str, int | None]()
        if shape:
            of_shape = family.parameters.of_shape(shape)
            given = {"width": of_shape.width, "height": of_shape.height, "frames": of_shape.frames}
        return family.usual(self.size.facts, **given).model_copy(update={"decode_chunk_size": 1})


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run a model on some GPUs; fields have the names of the JSON."""

    command: str
    need_bytes: int  # of the rank that needs most
    host_bytes: int  # of host memory, pinned, from which blocks are streamed
    fits: bool
    in_parts: bool  # whether it fits only if frames are decoded one at a time, of Wan in tiles
    time_s: float | None  # of all videos; None: no time of a step is known


def know(name: str) -> SizedModel:
    """Find what is known of a model by its name, as in SVDQ_MODEL; raises InputError if nothing is."""
    given = read_model_file(Path(name)) if is_model_file(name) else None
    base, replaced = (given.base, given.weights) if given else (name, {})
    named = [*replaced.values(), *(lora.file for lora in given.lora)] if given else []
    model, size = published(base) or (None, None)
    try:
        found = _in_folder(find_folder(base), base, replaced)
        size = replace(found, num_weights={**(size.num_weights if size else {}), **found.num_weights})
        download_bytes = 0
    except InputError:
        if size is None or model is None:
            raise
        download_bytes = sum(
            number * model.stored[component]
            for component, number in model.num_weights.items()
            if component not in replaced
        )
    here = {each: file for each, text in replaced.items() if (file := _file_here(text, Path(name))) is not None}
    numbers = {each: num_weights(size.layout.weights_files(here, each), size.layout, size.dtype, each) for each in here}
    size = replace(size, num_weights={**size.num_weights, **numbers})
    if not size.layout.denoisers & size.num_weights.keys():
        raise InputError(f"How many weights the files of the model {name} have is not known before they are loaded.")
    if given is not None:
        size = replace(size, facts=size.family.with_model_file(dict(size.facts), given, name))
        stored = {
            component: stored_bytes(size.layout.weights_files(here, component), size.layout, size.dtype, component)
            if component in here
            else _stored_by_name(text, size.num_weights.get(component, 0.0))
            for component, text in replaced.items()
        }
        stored = {each: number for each, number in stored.items() if number}
        size = replace(size, stored=stored, kept=bool(stored))
    return SizedModel(
        size=size,
        published=model,
        download_bytes=download_bytes,
        missing_files=sum(_file_here(file, Path(name)) is None for file in named),
    )


def _in_folder(folder: Path, base: str, replaced: Collection[str]) -> ModelSize:
    """Return the size of a model folder by the headers of its files; raises InputError if it is not complete."""
    family, layout = family_of(folder, base)
    check_folder(folder, base, layout, replaced=replaced)
    facts = dict(family.read_facts(folder, base))
    model = ResolvedModel(name=base, folder=folder, family=family.name, layout=layout.pipeline, facts=facts)
    return ModelSize.of(model, DTYPES[family.half])


def _file_here(file: str, model_file: Path) -> Path | None:
    try:
        return find_file(file, model_file, WEIGHTS_SUFFIXES)
    except InputError:
        return None


def _stored_by_name(file: str, num_weights: float) -> float:
    """Return the bytes of a file that is not here by the format in its name; 0 if that is not known."""
    bits = next((bits for name, bits in BITS.items() if name in file.lower()), 0.0)
    return num_weights * bits / 8


def costs_of(known: SizedModel, video: VideoParameters, step_s: float) -> VideoCosts:
    """Return the costs of a video by the time of a step of the published model's default video."""
    family, facts = known.size.family, known.size.facts
    usual = family.usual({**facts, "defaults": {}})
    pixels = [each.width * each.height * each.num_frames for each in (video, usual)]
    units = family.unit_costs(video, facts)
    factor = units.step_work / family.unit_costs(usual, facts).step_work
    prior = family.prior(facts)
    costs = Costs(step_s=(step_s,), encode_s=prior.encode_steps * step_s, decode_s=prior.decode_steps * step_s)
    linear = pixels[0] / pixels[1]
    return VideoCosts(
        steps=video.steps,
        step_costs=units.steps,
        costs=costs.scaled(step=factor, encode=linear, decode=linear),
    )


def ways(known: SizedModel, video: VideoParameters, cards: Cards, num_videos: int, step_s: float | None) -> list[Way]:
    """Return the ways to run a model on GPUs, those first that change least: the first that fits is the best."""
    size, number = known.size, cards.number
    found = []
    for options, candidate in _options(size):
        for residency in _residencies(known, number, streamed=candidate.streamed):
            is_chosen = known.has_experts or residency == "rounds"
            layout = f" --groups {number} --ranks 1" * (residency == "rounds" and number > 1)
            command = f"svdq worker{layout}{f' --experts {residency}' * is_chosen}{options}"
            made = replace(candidate, kept=False)  # which is what a worker does where there is room
            if residency != "rounds" and _need(made, video, residency, number) <= cards.room_bytes:
                candidate = made
            need = _need(candidate, video, residency, number)
            whole = _need(candidate, video.model_copy(update={"decode_chunk_size": None}), residency, number)
            found.append(
                Way(
                    command=command,
                    need_bytes=need,
                    host_bytes=round(size.denoisers(residency) * number * PINNED) if candidate.streamed else 0,
                    fits=need <= cards.room_bytes,
                    in_parts=need <= cards.room_bytes < whole,
                    time_s=None if step_s is None else _time_s(known, video, step_s, residency, number, num_videos),
                )
            )
    return found


def faster_in_rounds(name: str, options: ComputeOptions, cards: Cards) -> float:
    """Return the share by which a group in rounds for each GPU is faster than one whose ranks are bound to experts.

    It is 0 or less where all of the model fits a GPU, or a part of it does not; infinite where only rounds fit.
    """
    known = know(name)
    if not known.has_experts:
        return 0.0
    size, video = known.size, known.video()
    size = replace(
        size,
        dtype=size.dtype if options.dtype == "auto" else DTYPES[options.dtype],
        int8="int8" in options.approximate,
        streamed=options.offload == "blocks",
        kept=size.kept and options.may_keep,
    )
    if not _need(size, video, "rounds", 1) <= cards.room_bytes < _need(size, video, "resident", 1):
        return 0.0
    if _need(size, video, "bound", cards.number) > cards.room_bytes:
        return math.inf
    return _bound_costs(known, video).faster_in_rounds(cards.number)


def _residencies(known: SizedModel, number: int, *, streamed: bool) -> list[Residency]:
    """Return the ways to hold a model, those first that `svdq worker` chooses or advises."""
    found: list[Residency] = ["resident"]
    if known.has_experts or known.size.has_text:
        found.append("rounds")
    if known.has_experts and number > 1:
        faster = _bound_costs(known, known.video()).faster_in_rounds(number)
        found.insert(2 if faster > (LOAD_SHARE if number > 2 else 0) else 1, "bound")
    # Streamed experts take host memory, both twice as much.
    return [*found[1:], "resident"] if streamed and known.has_experts else found


def _options(size: ModelSize) -> Iterator[tuple[str, ModelSize]]:
    yield "", size
    yield " --approximate int8", replace(size, int8=True)
    if size.family.num_blocks(size.facts) is not None:
        yield " --offload blocks", replace(size, streamed=True)


def _need(size: ModelSize, video: VideoParameters, residency: Residency, number: int) -> int:
    """Return the bytes of the rank that needs most, of which all leaves that can."""
    if residency == "rounds":
        return max(size.phases(video, residency).values())
    alone = number == 1
    first = size.phases(video, residency, decodes=alone, leaves=size.leaves(0, video, residency, alone=alone))
    last = {} if alone else size.phases(video, residency, encodes=False)
    return max(*first.values(), *last.values())


def _time_s(
    known: SizedModel, video: VideoParameters, step_s: float, residency: Residency, number: int, num_videos: int
) -> float:
    if residency == "bound":
        return _bound_costs(known, video, step_s).time_s(number, num_videos)
    costs = costs_of(known, video, step_s)
    return (costs.rounds_time_s if residency == "rounds" else costs.time_s)(number, num_videos)


def _bound_costs(known: SizedModel, video: VideoParameters, step_s: float = 1.0) -> VideoCosts:
    """Return the costs of a video where each rank holds one expert."""
    costs = costs_of(known, video, step_s)
    first, *others = known.size.family.unit_costs(video, known.size.facts).segments
    return replace(costs, segments=(first.stop, video.steps - first.stop)) if others else costs
