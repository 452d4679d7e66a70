"""What is wrong with a model folder, seen without torch: its index, its configs, every shard's header.

Reads some kilobytes of each file. What only loading shows (a weight that the UNet has and the files have not) is not
seen here.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_index import HUB_ID, UNET_DEFAULTS, check_configs, check_index, read_json

#: The components that have weights, and what their files' names begin with.
WEIGHTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "image_encoder": "model"}
#: What safetensors calls the types that weights are cast from.
DTYPES = {"F16", "BF16", "F32"}
#: Bytes of a header at most, as in the safetensors library.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One reason why a model cannot be used."""

    #: What is wrong, a sentence without its full stop.
    text: str
    #: What to do, a clause.
    advice: str = ""

    def error(self) -> InputError:
        """Make an error of it."""
        return InputError(f"{self.text}; {self.advice}." if self.advice else f"{self.text}.")


def is_half(file: str) -> bool:
    """Whether a weights file, or the index of several, is of the fp16 variant by its name."""
    return ".fp16" in file.rpartition("/")[2]


def weight_files(component: str, names: list[str]) -> list[str]:
    """Pick the weights of a component, and their indexes, out of the names of its files."""
    stem = re.escape(WEIGHTS[component])
    shard = r"(-\d{5}-of-\d{5})?"
    form = re.compile(rf"{stem}(\.fp16)?{shard}(\.fp16)?\.safetensors(\.index(\.fp16)?\.json)?")
    return sorted(name for name in names if form.fullmatch(name))


def check_folder(folder: Path, name: str, *, half: tuple[bool, ...] | None = None) -> None:
    """Raise the first problem of a model folder.

    Args:
        folder: where it is.
        name: what it is called in messages.
        half: which weights will do, as in `find_problems`.

    Raises:
        InputError: the model cannot be used.
    """
    for problem in find_problems(folder, name, half=half):
        raise problem.error()


def find_problems(folder: Path, name: str, *, half: tuple[bool, ...] | None = None) -> Iterator[Problem]:
    """Find all that is wrong with a model folder.

    Args:
        folder: where it is.
        name: what it is called in messages.
        half: which weights will do: those in half precision (True), the full ones (False), or both; None looks at
            all that are there.
    """
    try:
        check_index(folder, name)
        check_configs(folder, name)
    except InputError as error:
        yield Problem(text=str(error).rstrip("."))
        return
    for component in WEIGHTS:
        try:
            yield from _Weights(folder, component, name).problems(half)
        except InputError as error:
            yield Problem(text=str(error).rstrip("."))


def variants(folder: Path, component: str) -> set[bool]:
    """Tell whether a component has weights in half precision (True) and full ones (False)."""
    return {is_half(file) for file in weight_files(component, _names(folder / component))}


def file_problem(file: Path) -> str | None:
    """Say the first thing that is wrong with a safetensors file: what it is, is not or does; None when it is whole."""
    found = _read_header(file)
    return found if isinstance(found, str) else None


class _Weights:
    """The weights of one component."""

    def __init__(self, folder: Path, component: str, name: str) -> None:
        self._place = folder / component
        self._component = component
        self._name = name
        self._again = f"fetch it again with `svdq model pull {name}`" if HUB_ID.fullmatch(name) else "get it again"

    def problems(self, half: tuple[bool, ...] | None) -> Iterator[Problem]:
        found = weight_files(self._component, _names(self._place))
        there = {is_half(file) for file in found}
        if not there:
            yield self._nothing()
            return
        if half is not None and not there & set(half):
            yield Problem(
                text=f"The {self._component} of the model {self._name} has half precision weights only, which do for "
                "GPUs",
                advice=f"to render on processors, get the full ones too{self._how_to_get('full')}",
            )
            return
        wanted = there if half is None else {next(kind for kind in half if kind in there)}
        for kind in sorted(wanted):
            yield from self._problems_of_files([file for file in found if is_half(file) == kind])

    def _problems_of_files(self, names: list[str]) -> Iterator[Problem]:
        indexes = [name for name in names if name.endswith(".json")]
        files = {name for name in names if not name.endswith(".json")}
        if not indexes and all("-of-" in name for name in files):
            yield self._problem(min(files), "is one of several files, and the index of them is missing")
            return
        expected: dict[str, str] = {}
        for index in indexes:
            shards = read_json(self._place / index, self._name).get("weight_map")
            if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
                yield self._problem(index, "lists no weights")
                return
            expected |= shards
        headers: dict[str, dict[str, Any]] = {}
        for file in sorted(files | set(expected.values())):
            header = _read_header(self._place / file)
            if isinstance(header, str):
                advice = "run `git lfs pull` in the model's folder" if "Git LFS" in header else ""
                yield self._problem(file, header, advice)
            else:
                headers[file] = header
        if len(headers) < len(files | set(expected.values())):
            return
        for tensor, file in expected.items():
            if tensor not in headers[file]:
                yield self._problem(file, f"holds no {tensor}, which the index says is in it")
                return
        yield from self._first_layer({key: value for header in headers.values() for key, value in header.items()})

    def _first_layer(self, tensors: dict[str, Any]) -> Iterator[Problem]:
        """Compare the UNet's first layer with its config: weights of another model have another shape or none."""
        if self._component != "unet" or not tensors or "conv_in.weight" not in tensors:
            return
        config = UNET_DEFAULTS | read_json(self._place / "config.json", self._name)
        expected = [*config["block_out_channels"][:1], config["in_channels"], 3, 3]
        found = tensors["conv_in.weight"].get("shape")
        if found != expected:
            yield Problem(
                text=f"The unet of the model {self._name} has weights of another model: conv_in.weight is {found}, and "
                f"its config says {expected}",
                advice=self._again,
            )

    def _nothing(self) -> Problem:
        if any(name.endswith(".bin") for name in _names(self._place)):
            return Problem(
                text=f"The {self._component} of the model {self._name} has weights as pickles only (.bin)",
                advice="svdq reads safetensors only; get the model in that format",
            )
        return Problem(
            text=f"The {self._component} of the model {self._name} has no weights (.safetensors)", advice=self._again
        )

    def _problem(self, file: str, what: str, advice: str = "") -> Problem:
        if what.startswith("holds weights as"):
            advice = "get the model in F16, BF16 or F32"
        return Problem(text=f"{self._place / file} of the model {self._name} {what}", advice=advice or self._again)

    def _how_to_get(self, variant: str) -> str:
        return f" with `svdq model pull {self._name} --variant {variant}`" if HUB_ID.fullmatch(self._name) else ""


def _names(place: Path) -> list[str]:
    try:
        # A name that leads nowhere is there all the same: it is said to be missing.
        return [path.name for path in place.iterdir()]
    except OSError:
        return []


def _read_header(file: Path) -> dict[str, Any] | str:
    """Read the header of one safetensors file: what it says of each tensor, or what is wrong with the file."""
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            if start == b"version ":
                return "is a Git LFS pointer, not the weights"
            length = struct.unpack("<Q", start)[0]
            if length > _MAX_HEADER:
                return "is no safetensors file: its header is corrupt"
            header = json.loads(opened.read(length))
            size = opened.seek(0, 2)
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        dtypes = {tensor["dtype"] for name, tensor in tensors.items() if not name.endswith("position_ids")}
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (struct.error, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return "is no safetensors file: its header is corrupt"
    if size != end:
        return f"is {size:,} bytes long where its header says {end:,}"
    if not dtypes <= DTYPES:
        return f"holds weights as {', '.join(sorted(dtypes - DTYPES))}"
    return tensors
