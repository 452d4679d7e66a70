"""The properties of a model family that are needed before torch is imported: folders, parameters and estimates.

A family is a package beside this module. Its `family.py` has the `Family`, and `families.py` lists all families. The
model class of a family, which imports torch, implements `video_model.VideoModel`.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from svdq.pipeline.errors import InputError, first_error
from svdq.pipeline.models.compute.memory import Phase
from svdq.pipeline.models.model_file import ModelFile, SchedulerEntry, StepCacheEntry
from svdq.pipeline.planning.binding import UnitCosts
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.video_parameters import VideoParameters

Facts = Mapping[str, Any]  # values that a family reads from the configs of a folder


def imported(target: str) -> Any:
    """Import what a family names as `module:attribute`."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class FileNames:
    """The names of a component's weights in files that programs other than diffusers have written."""

    among_others: str = ""  # pattern of the beginning of its names in a file that has other components, too
    #: Patterns in names and what replaces them, in order, before and after diffusers' own conversion.
    originals: Mapping[str, str] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    raised_norms: tuple[
        str, ...
    ] = ()  # architectures in whose GGUF files llama.cpp has added 1 to the weights of norms
    is_split: bool = False  # whether some of its weights may be in the files of other components
    unused: tuple[str, ...] = ()  # its modules that no video needs, and files may lack


@dataclass(frozen=True, kw_only=True)
class FolderLayout:
    """The folder of a model family: a pipeline as diffusers' save_pretrained writes it."""

    pipeline: str
    runs: str | None = None  # the pipeline class that svdq runs, if it is another one
    example: str  # a hub id of the family, for messages
    components: Mapping[str, tuple[str, ...]]  # the components and the classes that each may have; svdq loads the first
    optional: frozenset[str] = frozenset()  # components that a model may lack
    beside: frozenset[str] = frozenset()  # components that the pipeline and its index lack; their configs name classes
    as_named: frozenset[str] = frozenset()  # components that are loaded as the class that the index names
    modules: tuple[str, ...] = ("diffusers", "transformers")  # the modules that have the classes
    denoisers: frozenset[str]
    blocks: frozenset[str] = frozenset()  # classes of the repeated blocks of denoisers and text encoders
    phases: Mapping[Phase, frozenset[str]]  # the components that each phase needs, besides the denoisers for steps
    float32: frozenset[str] = frozenset()  # components that are loaded in float32 whatever the dtype
    #: Components that `svdq model convert` leaves as they are, besides `float32`: half precision would change much.
    unconverted: frozenset[str] = frozenset()
    kept_float32: tuple[str, ...] = ()  # parts of the names of weights that diffusers keeps in float32
    settings: tuple[str, ...] = ()  # entries of the index that are arguments of the pipeline
    #: Text encoders whose layers come from host memory one by one where components take turns, because they would never
    #: fit beside anything, with the share of their weights that is on the GPU then.
    streamed: Mapping[str, float] = field(default_factory=dict)
    weighted: tuple[str, ...]
    #: By the class of a component, what a file of the right version says in its metadata: others have its shapes, too.
    versions: Mapping[str, str] = field(default_factory=dict)
    file_names: Mapping[str, FileNames] = field(default_factory=dict)  # by component; none: as diffusers converts them

    def of_phases(self, *phases: Phase) -> frozenset[str]:
        """Return the components that some phases need, besides denoisers."""
        return frozenset().union(*(self.phases.get(phase, frozenset()) for phase in phases))

    def weights_files(self, given: Mapping[str, Path], component: str) -> list[Path]:
        """Return the files that a component's weights may be in, of those given by component; its own is the first."""
        is_split = component in self.file_names and self.file_names[component].is_split
        return list(dict.fromkeys([given[component], *(given.values() if is_split else ())]))

    def dtype_of(self, component: str, dtype: str) -> str:
        """Return torch's name of the dtype that a component is loaded in."""
        return "float32" if component in self.float32 else dtype

    def keeps_float32(self, weight: str) -> bool:
        """Return whether a weight of a denoising component stays in float32, by its name."""
        return any(part in weight for part in self.kept_float32)


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """The time of a step of a model's default video, with guidance: published by others, or measured."""

    gpu: str  # part of the card's name, as the driver has it
    gpu_gb: int  # its memory in GB of 2^30 bytes
    step_s: float
    source: str  # who says so, of what: a clause


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A model of the hub, as far as it is known without its files."""

    layout: str  # the pipeline class, by which its family has its layout
    facts: Facts
    num_weights: Mapping[str, int]  # number of weights of each component
    stored: Mapping[str, int]  # bytes of a weight in the files that svdq fetches for GPUs, by component
    steps: tuple[PublishedStep, ...] = ()

    def step_on(self, gpu: str) -> PublishedStep | None:
        """Return the time of a step on a GPU by its name, as the driver has it; None if nobody has published it."""
        return next((each for each in self.steps if each.gpu in gpu), None)


@dataclass(frozen=True, kw_only=True)
class MeasuredCurve:
    """By which steps of a model can be skipped, as a video that computes all of them shows."""

    table: Mapping[str, Sequence[float]]  # the ratios as in a model file's `StepCacheEntry`
    computed: Mapping[float, int]  # number of computed steps by threshold
    about: str  # how it was measured, for a comment


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family, without torch. The targets `module:attribute` are imported on demand."""

    name: str  # value of `VideoParameters.family`, and the name of the package
    parameters: type[VideoParameters]
    layouts: Mapping[str, FolderLayout]  # its kinds of folders, by the pipeline class in model_index.json
    model: str  # target: its `VideoModel`, a class that is called as in `loader.open_model`
    tiny: str  # target: the function that writes its untrained model into a folder
    tiny_title: str  # what that model is, for help
    workflow_reader: str = ""  # target: what it knows of ComfyUI's nodes, a `comfyui.recipe.WorkflowReader`
    encoded: tuple[str, ...]  # tensors that encoders compute, to compare dtypes by
    #: The component of each of two experts, where a model may have two.
    experts: Mapping[str, str] = field(default_factory=dict)
    half: str  # half precision that its weights suit, which is the default on GPUs: fp16 or bf16
    published_as: str  # how the names of its published models begin, in lower case
    published: Facts  # the facts of its published model, which count if no folder is known
    models: Mapping[str, PublishedModel]  # the published models whose sizes are known, by hub id
    #: Returns the number of equal blocks of a denoising component; None: its blocks cannot be streamed.
    num_blocks: Callable[[Facts], int | None]
    #: Returns which component does which steps of a video whose parameters are complete, and what they cost.
    unit_costs: Callable[[VideoParameters, Facts], UnitCosts]
    #: Reads the facts of a folder; the name is for messages. Raises InputError if svdq cannot run such a model.
    read_facts: Callable[[Path, str], Facts]
    #: Returns whether a model takes a photo of the last frame.
    takes_last_photo: Callable[[Facts], bool] = lambda _: False
    #: Returns whether a model makes videos between two photos only.
    needs_last_photo: Callable[[Facts], bool] = lambda _: False
    #: Returns the smallest `step_cache` with which a model makes a video so many times as fast, of parameters that may
    #: be open; raises InputError if none does. None: this family skips no steps.
    threshold_for: Callable[[VideoParameters, Facts, float], float] | None = None
    #: Target: measures a `MeasuredCurve` of a `VideoModel` in rounds, a photo of the size of complete parameters, these
    #: parameters, and what is called with each step that is done. "": this family skips no steps.
    calibrate: str = ""
    #: Fills in what parameters leave open; raises InputError with a sentence about what this model cannot do.
    complete: Callable[[VideoParameters, Facts], VideoParameters]
    #: Returns the facts that another scheduler changes; None: this family's cannot be changed.
    use_scheduler: Callable[[Facts, SchedulerEntry], Facts] | None = None
    #: Returns the facts that another curve of skipped steps changes; None: this family skips none.
    use_step_cache: Callable[[Facts, StepCacheEntry], Facts] | None = None
    prior: Callable[[Facts], CostPrior]  # returns what encode and decode cost before they are measured
    #: Estimates the peak bytes of an activity, besides the weights, from the activity, its shape (`memory.shape_for`),
    #: torch's name of the compute dtype and the facts; `has_decoder`: whether the encoding rank also has the decoder.
    memory: Callable[..., int]

    def with_model_file(self, facts: dict[str, Any], given: ModelFile, path: str) -> dict[str, Any]:
        """Return the facts of a model with the defaults, scheduler and curve of a model file; may raise InputError."""
        defaults = dict(given.defaults)
        if given.scheduler != SchedulerEntry():  # type: ignore[call-arg]
            if self.use_scheduler is None:
                raise InputError(
                    f"The model file {path!r} has a scheduler, which {self.parameters.title} cannot change."
                )
            facts |= self.use_scheduler(facts, given.scheduler)
            defaults |= {"flow_shift": given.scheduler.shift} if given.scheduler.shift else {}
        if given.step_cache is not None:
            if self.use_step_cache is None:
                raise InputError(f"The model file {path!r} has a step_cache, which {self.parameters.title} cannot use.")
            try:
                facts |= self.use_step_cache(facts, given.step_cache)
            except InputError as error:
                raise InputError(f"The model file {path!r} cannot be used: {error}") from error
        if "seed" in defaults:
            raise InputError(
                f"The model file {path!r} has a default for seed, and each job has another seed; leave it out."
            )
        try:
            self.parameters.model_validate({"seed": 0} | defaults)
        except ValidationError as error:
            first = first_error(error)
            name = str(first["loc"][0])
            if first["type"] == "extra_forbidden":
                near = difflib.get_close_matches(name, self.parameters.model_fields, 1)
                meant = f"; did you mean {near[0]}?" if near else "."
                raise InputError(
                    f"The model file {path!r} has a default {name}, which this model has no parameter for{meant}"
                ) from error
            what = f"Input should be {first['msg']}" if first["type"] == "value_error" else first["msg"]
            raise InputError(f"The default {name} of the model file {path!r} cannot be used: {what}.") from error
        return facts | {"defaults": defaults} if defaults else facts

    def usual(self, facts: Facts, **given: Any) -> VideoParameters:
        """Return the parameters of a video of which only some are `given`; the defaults of a model file count."""
        return self.complete(self.parameters.model_validate({"seed": 0} | facts.get("defaults", {}) | given), facts)

    def fill_in(self, parameters: VideoParameters, model: str, facts: Facts) -> VideoParameters:
        """Fill in what a job leaves open; raises InputError, with the name `model`, if it cannot make the video."""
        if not isinstance(parameters, self.parameters):
            raise InputError(
                f"The model {model} makes videos of {self.parameters.title}, and this one is for {parameters.title}: "
                f"start a worker with a model of {parameters.title}, or submit it again with --family {self.name}."
            )
        return self.complete(parameters, facts)
