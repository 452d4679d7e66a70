"""A model file: TOML that names a base model, other weights, LoRAs, defaults and a schedule. Does not import torch."""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from svdq.pipeline.command_line import svdq_command
from svdq.pipeline.errors import InputError, first_error
from svdq.pipeline.models.comfyui_folders import find_folders
from svdq.pipeline.models.model_name import preset_or_path
from svdq.pipeline.toml_file import MAX_BYTES, parse_toml

WEIGHTS_SUFFIXES, LORA_SUFFIXES = (".safetensors", ".gguf"), (".safetensors",)

#: The configs of known models, by their hub ids: all that a base is needed for whose weights are all files of ComfyUI.
CONFIGS = Path(__file__).with_name("configs")

#: The form of a hub id: organisation/model, optionally with @ and a branch, tag or commit.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?")

#: Schedules of ComfyUI, which `sigmas.py` computes.
ScheduleName = Literal["simple", "normal", "sgm_uniform", "beta", "linear_quadratic"]

#: Names of weights that say nothing about the model: a file of such a name in ComfyUI's folders may be any.
_ANY_MODEL = re.compile(r"(diffusion_pytorch_|adapter_)?model\b.*|pytorch_lora_weights.*")

_Sigma = Annotated[float, Field(gt=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid")


class LoraEntry(_Section):
    """One LoRA."""

    #: A path relative to the model file, or `owner/name:file` of the hub.
    file: str
    component: str
    strength: float = Field(1.0, ge=-10, le=10, allow_inf_nan=False)


class SchedulerEntry(_Section):
    """The scheduler in place of the base's."""

    class_name: str | None = Field(None, alias="class")
    shift: float | None = Field(None, gt=0, le=100)
    #: Noise levels before the shift, falling, as many as steps; or a schedule by its name, for any number of steps.
    sigmas: tuple[_Sigma, ...] | ScheduleName | None = None
    # Left out of the fingerprint unless they are given, so that earlier model files keep theirs.
    #: Noise levels of a second stage, falling, as many as its steps.
    stage_2_sigmas: tuple[_Sigma, ...] | None = Field(None, exclude_if=lambda value: value is None)
    #: The noise level from which on the second of two experts does the steps; in place of the base's.
    boundary: float | None = Field(None, gt=0, lt=1, exclude_if=lambda value: value is None)
    #: The number of steps that the first of two experts does; in place of a boundary.
    switch_at: int | None = Field(None, ge=1, exclude_if=lambda value: value is None)

    @field_validator("sigmas", mode="before")
    @classmethod
    def _known(cls, sigmas: object) -> object:
        if isinstance(sigmas, str) and sigmas not in get_args(ScheduleName):
            raise ValueError(
                f"there is no schedule {sigmas!r}; it may be {', '.join(get_args(ScheduleName))}, or a list"
            )
        return sigmas

    @model_validator(mode="after")
    def _valid(self) -> "SchedulerEntry":
        for name, sigmas in (("sigmas", self.sigmas), ("stage_2_sigmas", self.stage_2_sigmas)):
            if isinstance(sigmas, tuple):
                if not sigmas:
                    raise ValueError(f"{name} must name one noise level at least")
                if list(sigmas) != sorted(set(sigmas), reverse=True):
                    raise ValueError(f"{name} must fall from step to step")
        if None not in (self.boundary, self.switch_at):
            raise ValueError("boundary and switch_at exclude each other")
        return self


_Ratio = Annotated[float, Field(gt=0, lt=10, allow_inf_nan=False)]
_Ratios = Annotated[tuple[_Ratio, ...], Field(min_length=1, max_length=1000)]


class StepCacheEntry(_Section):
    """The curve by which steps are skipped, in place of the base's."""

    ratios: _Ratios | None = None
    #: The same of each of two experts.
    high: _Ratios | None = None
    low: _Ratios | None = None
    max_skip: int | None = Field(None, ge=1, le=100)  # most successive steps that are skipped
    retention: float | None = Field(None, ge=0, le=1)  # share of the steps, the first ones, that are computed

    @model_validator(mode="after")
    def _whole(self) -> "StepCacheEntry":
        if (self.high is None) != (self.low is None) or (self.ratios and self.high):
            raise ValueError("give ratios, or both high and low for two experts")
        return self


class ModelFile(_Section):
    """The contents of a model file."""

    base: str = Field(min_length=1)  # hub id or folder: configs, tokenizer, all other weights
    weights: dict[str, str] = {}
    lora: tuple[LoraEntry, ...] = ()
    defaults: dict[str, Any] = {}  # parameters that a job leaves open
    scheduler: SchedulerEntry = Field(default_factory=SchedulerEntry)  # type: ignore[arg-type]
    step_cache: StepCacheEntry | None = None

    @field_validator("base")
    @classmethod
    def _is_there(cls, base: str) -> str:
        if not Path(base).is_absolute() and not HUB_ID.fullmatch(base):
            raise ValueError(f"{base!r} is neither a folder, relative to the file, nor a hub id")
        return base

    @model_validator(mode="after")
    def _as_many_sigmas_as_steps(self) -> "ModelFile":
        sigmas, steps = self.scheduler.sigmas, self.defaults.get("steps")
        if isinstance(sigmas, tuple) and steps not in (None, len(sigmas)):
            raise ValueError(f"there are {len(sigmas)} sigmas for {steps} steps; give as many as steps")
        return self


def read_model_file(path: Path) -> ModelFile:
    """Read a model file; raises InputError if it cannot be read, or is not valid."""
    try:
        with path.open("rb") as file:
            content = parse_toml(file.read(MAX_BYTES + 1))
    except OSError as error:
        raise InputError(f"The model file {str(path)!r} cannot be read ({error.strerror}); give another.") from error
    except ValueError as error:  # also UnicodeDecodeError
        raise InputError(f"The model file {str(path)!r} is not valid TOML ({error}); correct it.") from error
    base = content.get("base")
    if isinstance(base, str) and base and (folder := _relative(base, path)).is_dir():
        content["base"] = str(folder)
    try:
        return ModelFile.model_validate(content)
    except ValidationError as error:
        first = first_error(error)
        place = "".join(f"{part}." for part in first["loc"]).removesuffix(".")
        what = "is no key of a model file" if first["type"] == "extra_forbidden" else first["msg"]
        raise InputError(
            f"The model file {str(path)!r} cannot be used: {place}{': ' * bool(place)}{what}; see docs/models.md."
        ) from error


def _relative(name: str, model_file: Path) -> Path:
    return model_file.absolute().parent / os.path.expanduser(name)


def find_file(name: str, model_file: Path, suffixes: tuple[str, ...]) -> Path:
    """Return the file that a model file names, a path or `owner/name:file` of the hub; may raise InputError.

    A file of the hub is in its cache, or in the folders of ComfyUI under the same name.
    """
    if not name.endswith(suffixes):
        raise InputError(f"The file {name!r} of a model file is not allowed: it must end in {' or '.join(suffixes)}.")
    if hub := split_hub_file(name):
        if (found := in_cache(*hub) or in_comfyui(hub[1], model_file)) is None:
            command = svdq_command("model pull", preset_or_path(model_file))
            raise InputError(f"The file {name} is not on this machine; fetch it with `{command}`.")
        return found
    path = _relative(name, model_file)
    if not path.is_file():
        raise InputError(f"There is no file {str(path)!r}, which a model file names; correct its path.")
    return path


def in_cache(repository: str, file: str) -> Path | None:
    """Return a file of the hub as its cache has it; None if it has not."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, file)
    except (ImportError, ValueError):  # the hub allows fewer names than HUB_ID
        return None
    return Path(found) if isinstance(found, str) else None


def in_comfyui(file: str, model_file: Path) -> Path | None:
    """Return the file of the same name in the folders of the ComfyUI around a model file or in the home; None: none."""
    name = PurePosixPath(file).name
    if _ANY_MODEL.fullmatch(name):
        return None
    return find_folders(None, model_file, in_working_folder=False).find(name)


def split_hub_file(name: str) -> tuple[str, str] | None:
    """Return hub id and path of `owner/name:file`; None for a path."""
    repository, _, file = name.partition(":")
    return (repository, file) if file and HUB_ID.fullmatch(repository) and "@" not in repository else None
