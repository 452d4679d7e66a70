"""What a launcher tells its ranks, in config.json and in their environment; its fields are options of `svdq worker`."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click
from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.options import Approximate, Compiled, ComputeOptions, Dtype, Offload, Weights
from svdq.pipeline.models.families import family_named, titles_of
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.producer.settings import ENV_PREFIX, Settings

HOST_RESERVE_BYTES = 4_000_000_000  # of host memory: for photos, frames and states, and other processes
#: Settings that may hold a password and that ranks need: they are told in their environment, and in no file.
TOLD_IN_ENVIRONMENT = ("redis_url", "storage")
#: How ranks hold the experts of a model: all, each by some ranks, or one at a time. auto: all where memory suffices.
ExpertsMode = Literal["auto", "resident", "bound", "rounds"]


class RankConfig(BaseModel):
    """Configuration of a rank besides `Settings`; a field with a description is an option of `svdq worker`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where to compute.")
    burst: bool = Field(default=False, description="Exit when the queue is empty; svdq worker then prints a summary.")
    checkpoints: Literal["local", "storage", "off"] = Field(
        default="local",
        description="Folder for checkpoints, from which unfinished videos resume after a crash or a stop.",
    )
    warmup: tuple[str, ...] = Field(
        default=(), title="WxHxF", description="Shape to prepare for at the start, such as 1024x576x25; repeatable."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Format of the log on stderr; json prints an object a line."
    )
    dtype: Dtype = Field(
        default="auto",
        description="Type to compute in; auto: fp16 on GPUs "
        f"({titles_of(lambda family: family.half == 'bf16')}: bf16), fp32 on processors.",
    )
    compile: Compiled = Field(
        default="off", description="What of the denoising is compiled, for each shape of video when it is first made."
    )
    approximate: tuple[Approximate, ...] = Field(
        default=(),
        description="Change results by more than rounding, and mark them. int8: linear layers "
        "of blocks multiply in int8, to which their weights are quantized as they are loaded.",
    )
    attention: str = Field(
        default="native",
        title="NAME",
        description="Backend of diffusers for the attention of transformers, such as _native_cudnn, flash or sage, or "
        "comfy-kitchen's int8; sage and int8 are approximate.",
    )
    experts: ExpertsMode = Field(
        default="auto",
        description="How a rank holds the experts of a model with several: all of them; one; or, if it is the only "
        "rank of its group, one at a time, in rounds over many videos. auto: all where its memory suffices.",
    )
    offload: Offload = Field(
        default="off",
        description="Keep transformers in host memory; blocks: copy each block to the GPU while the one "
        "before computes. The frames stay the same.",
    )
    host_memory: int | None = Field(
        default=None,
        ge=0,
        title="SIZE",
        description="Host memory of a group for parts of the model that are not in use, such as 48GB; what has no room "
        "is read from its files again. Default: what is free less 4 GB, shared by all groups.",
    )
    weights: Weights = "auto"  # `Settings.weights`
    group: str | None = None  # number of the group in its launcher, for log lines
    num_groups: int = Field(default=1, ge=1)  # of its launcher, which share the queue
    #: Largest number of ranks that share a GPU, in all groups; None: count the ranks of this torchrun.
    ranks_per_gpu: int | None = Field(default=None, ge=1)
    failed_gpus: Mapping[str, str] = {}  # left out since the start, each with a clause why
    record_trace: bool = False  # into the run folder, at the end

    @property
    def compute(self) -> ComputeOptions:
        """How the denoising components compute."""
        return ComputeOptions(
            dtype=self.dtype,
            compiled=self.compile,
            attention=self.attention,
            approximate=self.approximate,
            offload=self.offload,
            weights=self.weights,
        )


def can_stream(model: ResolvedModel) -> bool:
    """Return whether a model has equal blocks, which can be copied to a GPU one by one."""
    return model.family is not None and family_named(model.family).num_blocks(model.facts) is not None


def check_ranks(config: RankConfig, model: ResolvedModel, num_ranks: int, *, on_gpus: bool) -> None:
    """Raise an InputError for options that exclude each other, or do not suit the ranks; needs no torch."""
    if num_ranks > 1 and config.experts == "rounds":
        raise InputError(
            "A rank that works in rounds is a group of its own; start one for each GPU: "
            f"`svdq worker --experts rounds --groups {num_ranks} --ranks 1`."
        )
    if config.weights in ("native", "stored") and config.compile != "off":
        raise InputError(f"--weights {config.weights} does not work with --compile; leave one of them out.")
    if config.offload == "off":
        return
    if config.compile != "off":
        raise InputError("--offload blocks does not work with --compile; leave one of them out.")
    if not can_stream(model):
        titles = titles_of(lambda family: family.num_blocks(family.published))
        raise InputError(f"--offload blocks is for {titles}, whose transformers have equal blocks; leave it out.")
    if not on_gpus:
        raise InputError(
            "--offload blocks needs a GPU: on a processor, all weights are in host memory already; leave it out."
        )


class RunConfig(BaseModel):
    """The contents of config.json: all that a launcher tells its ranks, resolved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: RankConfig
    settings: Settings  # without secrets, which ranks do not need
    model: ResolvedModel


def _parse_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError as error:
        raise click.BadParameter(f"{value!r} is not a size such as 48GB.") from error


def free_host_bytes() -> int:
    """Return the free bytes of host memory, less a reserve for everything but models."""
    import psutil  # only workers have it

    return max(0, int(psutil.virtual_memory().available) - HOST_RESERVE_BYTES)


def rank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a rank to a click command; their values are fields of `RankConfig`."""
    for name, field in reversed(RankConfig.model_fields.items()):
        if field.description is None:
            continue
        is_repeatable = get_origin(field.annotation) is tuple
        kind: Any = get_args(field.annotation)[0] if is_repeatable else field.annotation
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        is_size = kind == int | None
        command = click.option(
            f"--{name.replace('_', '-')}",
            type=click.Choice(choices) if choices else str if is_size else kind,
            callback=_parse_size if is_size else None,
            is_flag=kind is bool,
            multiple=is_repeatable,
            default=field.default,
            show_default=bool(choices) and not is_repeatable,
            metavar=field.title,
            help=field.description,
        )(command)
    return command


def write_config(folder: Path, config: RunConfig) -> None:
    """Write the configuration of the group's ranks, without the private settings: see `private_environment`."""
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")


def private_environment(settings: Settings) -> dict[str, str]:
    """Return the variables that `read_config` needs besides the file."""
    told = {f"{ENV_PREFIX}{name.upper()}" for name in TOLD_IN_ENVIRONMENT}
    return {name: text for name, text in settings.environment().items() if name in told}


def read_config(folder: Path) -> RunConfig:
    """Read the configuration of the group's ranks, in a process with the variables of `private_environment`."""
    config = json.loads((folder / "config.json").read_bytes())
    for name in TOLD_IN_ENVIRONMENT:
        if text := os.environ.get(f"{ENV_PREFIX}{name.upper()}"):
            config["settings"][name] = text
    return RunConfig.model_validate_json(json.dumps(config))
