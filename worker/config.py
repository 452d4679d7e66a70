"""The configuration of ranks, passed by `svdq worker` as JSON or given as options of `python -m svdq.worker`.

Each option that both commands have is declared here, once. Does not import torch.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from svdq.pipeline.models.compute_options import ComputeOptions
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.producer.settings import Settings

Command = TypeVar("Command", bound=Callable[..., Any])


class RankConfig(BaseModel):
    """What a rank is started with besides `Settings`; a field with a description is an option."""

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
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        default="auto", description="Type to compute in; auto: fp16 on GPUs (Wan: bf16), fp32 on processors."
    )
    compile: Literal["off", "blocks", "whole"] = Field(
        default="off",
        description="What of the denoising is compiled, for each shape of video when it is first made.",
    )
    approximate: tuple[Literal["int8"], ...] = Field(
        default=(),
        description="Change results by more than rounding, and mark them. int8: weights of linear layers in int8.",
    )
    bind: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether ranks load one expert each of a model with several; auto: where a rank's memory does not "
        "hold all of them.",
    )
    encoder_rank: bool = Field(
        default=False,
        description="Give the first rank the encoders alone, where a text encoder and an expert do not share a GPU.",
    )
    #: Number of the group in its launcher, for log lines.
    group: str | None = None
    #: Seconds since the epoch at which the launcher stops the group; None: never.
    until_s: float | None = None
    #: Largest number of ranks that share a GPU, those of all groups included; None: count those of this torchrun.
    ranks_per_gpu: int | None = Field(default=None, ge=1)
    #: GPUs that have failed and were left out since the worker was started, each with the reason, a clause.
    failed_gpus: Mapping[str, str] = {}
    #: Whether to leave trace events in the run folder at the end.
    record_trace: bool = False

    @property
    def compute(self) -> ComputeOptions:
        """How the denoising components compute."""
        return ComputeOptions(dtype=self.dtype, compiled=self.compile, approximate=self.approximate)


class RunConfig(BaseModel):
    """All that a launcher tells its ranks, resolved: the contents of a run folder's config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: RankConfig
    #: Without secrets, which ranks do not need.
    settings: Settings
    model: ResolvedModel


def rank_options(command: Command) -> Command:
    """Add the options of a rank to a click command; their values are fields of `RankConfig`."""
    for name, field in reversed(RankConfig.model_fields.items()):
        if field.description is not None:
            command = _option(name, field)(command)
    return command


def _option(name: str, field: FieldInfo) -> Callable[[Command], Command]:
    is_repeatable = get_origin(field.annotation) is tuple
    kind: Any = get_args(field.annotation)[0] if is_repeatable else field.annotation
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    return click.option(
        f"--{name.replace('_', '-')}",
        type=click.Choice(choices) if choices else kind,
        is_flag=kind is bool,
        multiple=is_repeatable,
        default=field.default,
        show_default=bool(choices) and not is_repeatable,
        metavar=field.title,
        help=field.description,
    )
