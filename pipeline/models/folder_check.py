"""Checks a model folder without torch: its index, its configs, and the header of every weights file.

It reads some kilobytes of each file. Weights that do not belong to the config are found when they are loaded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.folder_files import (
    SAVED,
    WEIGHTS,
    Shapes,
    fetch_again,
    is_half,
    names_in,
    pull_command,
    read_json,
    read_shapes,
    weight_files,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The folder of a model family: a pipeline as diffusers' save_pretrained writes it."""

    #: The class of the pipeline.
    pipeline: str
    #: A hub id of the family, for messages.
    example: str
    #: The components and the classes that each may have; svdq loads the first.
    components: Mapping[str, tuple[str, ...]]
    #: Those of the components that a model may lack; the index then names no class for them.
    optional: frozenset[str] = frozenset()
    #: The components that denoise.
    denoisers: frozenset[str]
    #: Components that are loaded in float32 whatever the dtype.
    float32: frozenset[str] = frozenset()
    #: Entries of the index that are arguments of the pipeline.
    settings: tuple[str, ...] = ()
    #: The components that have weights.
    weighted: tuple[str, ...]
    #: Checks that the configs in a folder belong to the family and fit each other; the name is for messages.
    check_configs: Callable[[Path, str], None]

    def dtype_of(self, component: str, dtype: str) -> str:
        """Return torch's name of the dtype that a component is loaded in."""
        return "float32" if component in self.float32 else dtype


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One reason why a model cannot be used."""

    #: The problem, as a sentence without its full stop.
    text: str
    #: What to do, a clause.
    advice: str = ""


def pipeline_of(folder: Path, name: str) -> str:
    """Return the class of the pipeline in a model folder; the name is for messages.

    Raises:
        InputError: the folder has no readable model_index.json, or it names no pipeline.
    """
    pipeline = read_json(folder, "model_index.json", name).get("_class_name")
    if not isinstance(pipeline, str):
        raise InputError(f"The model {name} has a model_index.json that names no pipeline (_class_name); {SAVED}.")
    return pipeline


def check_folder(folder: Path, name: str, layout: Layout, dtype: str | None = None) -> None:
    """Raise the first problem that `find_problems` finds.

    Raises:
        InputError: the model cannot be used.
    """
    for problem in find_problems(folder, name, layout, dtype):
        raise InputError("; ".join(filter(None, (problem.text, problem.advice))) + ".")


def find_problems(folder: Path, name: str, layout: Layout, dtype: str | None = None) -> Iterator[Problem]:
    """Yield all problems of a model folder.

    Of the weights, those are checked that are loaded for `dtype`, torch's name of it; None: all weights in the folder.
    """
    try:
        _check_index(folder, name, layout)
        layout.check_configs(folder, name)
    except InputError as error:
        yield Problem(text=str(error).rstrip("."))
        return
    index = read_json(folder, "model_index.json", name)
    for component in layout.weighted:
        if class_in(index, component) is None:
            continue
        half = None if dtype is None else WEIGHTS[layout.dtype_of(component, dtype)]
        try:
            yield from _Weights(folder, component, name).problems(half)
        except InputError as error:
            yield Problem(text=str(error).rstrip("."))


def _check_index(folder: Path, name: str, layout: Layout) -> None:
    """Check that the index names the pipeline and all its components by the right classes, and that they exist.

    Raises:
        InputError: it does not, or a component is missing.
    """
    if (found := pipeline_of(folder, name)) != layout.pipeline:
        raise InputError(f"The model {name} is a {found}; svdq needs a {layout.pipeline} such as {layout.example}.")
    index = read_json(folder, "model_index.json", name)
    for component, accepted in layout.components.items():
        kind = class_in(index, component)
        if kind is None and component in layout.optional:
            continue
        whole = f"it must be a whole {layout.pipeline}"
        if kind is None or not (folder / component).is_dir():
            advice = whole if kind is None else fetch_again(folder, name, whole)
            raise InputError(f"The model {name} has no {component}; {advice}.")
        if kind not in accepted:
            raise InputError(f"The {component} of the model {name} is a {kind}; svdq works with {accepted[0]} only.")


def class_in(index: Mapping[str, Any], component: str) -> str | None:
    """Return the class that model_index.json names for a component; None if it has none."""
    entry = index.get(component)  # [library, class]; null or two nulls for an optional component
    kind = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    return kind if isinstance(kind, str) else None


#: Component, setting, its value, the required value, and the reason or "".
Setting = tuple[str, str, Any, Any, str]


def check_settings(name: str, family: str, settings: Iterable[Setting], pipeline: str) -> None:
    """Check that settings of a model have the values that its family requires.

    Raises:
        InputError: one does not; the sentence names the model, the family and the pipeline that svdq needs.
    """
    for component, what, found, expected, why in settings:
        if found != expected:
            raise InputError(
                f"The {component} of the model {name} is not that of {family}: its {what} is {found} where it must be "
                f"{expected}{why and f' ({why})'}; give a {pipeline}."
            )


def check_counts(name: str, component: str, config: Mapping[str, Any], settings: Iterable[str]) -> None:
    """Check that settings of a component are positive whole numbers.

    Raises:
        InputError: one is not.
    """
    for setting in settings:
        if type(found := config[setting]) is not int or found < 1:
            raise InputError(
                f"The {component} of the model {name} has {setting} {found!r}; it must be a whole number above 0."
            )


def check_processor(folder: Path, component: str, name: str) -> None:
    """Check that the configuration of an image processor can be read.

    Raises:
        InputError: it cannot.
    """
    # The name that transformers writes, and the one that composite processors share.
    files = [f"{component}/{kind}_config.json" for kind in ("preprocessor", "processor")]
    read_json(folder, next((file for file in files if (folder / file).exists()), files[0]), name)


class _Weights:
    """The weights of one component."""

    def __init__(self, folder: Path, component: str, name: str) -> None:
        self._folder = folder
        self._component = component
        self._name = name
        self._of = f"The {component} of the model {name}"
        self._again = fetch_again(folder, name, "get it again")

    def problems(self, half: tuple[bool, ...] | None) -> Iterator[Problem]:
        names = names_in(self._folder / self._component)
        files = weight_files(names)
        there = {is_half(file) for file in files}
        if not there:
            if any(name.endswith(".bin") for name in names):
                advice = "svdq reads safetensors only; get the model in that format"
                yield Problem(text=f"{self._of} has weights as pickles only (.bin)", advice=advice)
            else:
                yield Problem(text=f"{self._of} has no weights (.safetensors)", advice=self._again)
        elif half is not None and not there & set(half):
            pull = pull_command(self._folder, self._name)
            how = f" with `{pull} --variant full`" if pull else ""
            yield Problem(
                text=f"{self._of} has half precision weights only, which do for GPUs",
                advice=f"to render on a CPU, fetch the full ones, too{how}",
            )
        else:
            wanted = there if half is None else {next(kind for kind in half if kind in there)}
            for kind in sorted(wanted):
                yield from self._problems_of([file for file in files if is_half(file) == kind])

    def _problems_of(self, names: list[str]) -> Iterator[Problem]:
        """Yield the problems of the files and indexes of one variant."""
        files = {name for name in names if not name.endswith(".json")}
        expected: dict[str, str] = {}
        for index in sorted(set(names) - files):
            weight_map = read_json(self._folder, f"{self._component}/{index}", self._name).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map or {*map(type, weight_map.values())} != {str}:
                yield self._problem(index, "lists no weights")
                return
            expected |= weight_map
        if not expected and all("-of-" in name for name in files):
            yield self._problem(min(files), "is one of several files, and the index of them is missing")
            return
        shapes: dict[str, Shapes] = {}
        for file in sorted(files | set(expected.values())):
            found = read_shapes(self._folder / self._component / file)
            if isinstance(found, str):
                yield self._problem(file, found)
            else:
                shapes[file] = found
        if len(shapes) < len(files | set(expected.values())):
            return
        for weight, file in expected.items():
            if weight not in shapes[file]:
                yield self._problem(file, f"holds no {weight}, which the index says is in it")
                return

    def _problem(self, file: str, what: str) -> Problem:
        advice = self._again
        if "Git LFS" in what:
            advice = "run `git lfs pull` in the model's folder"
        elif what.startswith("holds weights as"):
            advice = "get the model in F16, BF16 or F32"
        return Problem(text=f"{self._folder / self._component / file} of the model {self._name} {what}", advice=advice)
