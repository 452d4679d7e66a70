"""Checks a model folder without torch: its index, its configs, and the header of every shard.

It reads some kilobytes of each file. It does not detect what only loading shows (a weight missing from the files) or
damage inside a weight.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.hub import is_from_cache
from svdq.pipeline.models.safetensors_header import StoredTensor, read_header
from svdq.pipeline.models.svd.layout import UNET_DEFAULTS, check_configs, check_index, read_json

#: The components with weights, and the prefix of their files.
WEIGHTS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "image_encoder": "model"}
#: A weight of each component whose shape follows from the config, to detect files of another model. Missing values of a
#: config are the libraries' defaults.
_TELLING: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], list[Any]]]] = {
    "unet": ("conv_in.weight", UNET_DEFAULTS, lambda of: [*of["block_out_channels"][:1], of["in_channels"], 3, 3]),
    "vae": (
        "encoder.conv_in.weight",
        {"block_out_channels": [64], "in_channels": 3},
        lambda of: [*of["block_out_channels"][:1], of["in_channels"], 3, 3],
    ),
    "image_encoder": (
        "visual_projection.weight",
        {"projection_dim": 512, "hidden_size": 768},
        lambda of: [of["projection_dim"], of["hidden_size"]],
    ),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One reason why a model cannot be used."""

    #: The problem, as a sentence without its full stop.
    text: str
    #: What to do, a clause.
    advice: str = ""

    def error(self) -> InputError:
        """Return the problem as an error."""
        return InputError(f"{self.text}; {self.advice}." if self.advice else f"{self.text}.")


def is_half(file: str) -> bool:
    """Return whether a weights file, or an index of several, is of the fp16 variant by its name."""
    return ".fp16" in file.rpartition("/")[2]


def weight_files(component: str, names: list[str]) -> list[str]:
    """Return the weights files of a component, with their indexes, from the names of its files."""
    stem = re.escape(WEIGHTS[component])
    shard = r"(-\d{5}-of-\d{5})?"
    form = re.compile(rf"{stem}(\.fp16)?{shard}(\.fp16)?\.safetensors(\.index(\.fp16)?\.json)?")
    return sorted(name for name in names if form.fullmatch(name))


def check_folder(folder: Path, name: str, *, half: tuple[bool, ...] | None = None) -> None:
    """Raise the first problem of a model folder.

    Args:
        folder: the model folder.
        name: name of the model in messages.
        half: acceptable weights, as in `find_problems`.

    Raises:
        InputError: the model cannot be used.
    """
    for problem in find_problems(folder, name, half=half):
        raise problem.error()


def find_problems(folder: Path, name: str, *, half: tuple[bool, ...] | None = None) -> Iterator[Problem]:
    """Yield all problems of a model folder.

    Args:
        folder: the model folder.
        name: name of the model in messages.
        half: acceptable weights: half precision (True), full (False), or both; None checks all weights in the folder.
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
    """Return whether a component has weights in half precision (True) and full ones (False)."""
    return {is_half(file) for file in weight_files(component, _names(folder / component))}


def stored(folder: Path, component: str, *, half: bool) -> dict[str, StoredTensor]:
    """Return the headers of a component's weights, in half precision or full; broken files are left out.

    If both exist, only the weights that are loaded count.
    """
    headers = [
        read_header(folder / component / file)
        for file in weight_files(component, _names(folder / component))
        if is_half(file) == half and not file.endswith(".json")
    ]
    return {name: tensor for header in headers if isinstance(header, dict) for name, tensor in header.items()}


def another_model(component: str, model: str, weight: str, found: list[int], expected: list[int]) -> str:
    """Describe, without a full stop, a weight whose shape does not match the config."""
    return (
        f"The {component} of the model {model} has weights of another model: {weight} is {found}, and its config says "
        f"{expected}"
    )


class _Weights:
    """The weights of one component."""

    def __init__(self, folder: Path, component: str, name: str) -> None:
        self._place = folder / component
        self._component = component
        self._name = name
        # A folder may have the form of a hub id.
        self._pull = f"svdq model pull {name}" if is_from_cache(folder, name) else ""
        self._again = f"fetch it again with `{self._pull}`" if self._pull else "get it again"

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
                advice=f"to render on a CPU, fetch the full ones, too{self._how_to_get('full')}",
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
            if (
                not isinstance(shards, dict)
                or not shards
                or not all(isinstance(shard, str) for shard in shards.values())
            ):
                yield self._problem(index, "lists no weights")
                return
            expected |= shards
        headers: dict[str, dict[str, StoredTensor]] = {}
        for file in sorted(files | set(expected.values())):
            header = read_header(self._place / file)
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
        yield from self._another({key: value for header in headers.values() for key, value in header.items()})

    def _another(self, tensors: dict[str, StoredTensor]) -> Iterator[Problem]:
        """Compare one weight with the config: weights of another model have another shape, or lack it."""
        name, defaults, shape = _TELLING[self._component]
        if name not in tensors:
            text = f"The {self._component} of the model {self._name} lacks some of its weights, such as {name}"
            yield Problem(text=text, advice=self._again)
            return
        try:
            expected = shape(defaults | read_json(self._place / "config.json", self._name))
        except (TypeError, KeyError):
            text = f"The {self._component} of the model {self._name} has a config.json that makes no sense"
            yield Problem(text=text, advice=self._again)
            return
        if tensors[name].shape != expected:
            text = another_model(self._component, self._name, name, tensors[name].shape, expected)
            yield Problem(text=text, advice=self._again)

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
        return f" with `{self._pull} --variant {variant}`" if self._pull else ""


def _names(place: Path) -> list[str]:
    try:
        # A dangling link is listed, so that it is reported as missing.
        return [path.name for path in place.iterdir()]
    except OSError:
        return []
