"""The options of `svdq worker` and of each rank that say how to compute. Does not import torch."""

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import click

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.options import APPROXIMATE, COMPILED, DTYPES, ComputeOptions

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--dtype",
        type=click.Choice(["auto", *DTYPES]),
        default="auto",
        show_default=True,
        help="Type to compute in; auto: fp16 on GPUs, fp32 on processors.",
    ),
    click.option(
        "--compile",
        "compiled",
        type=click.Choice(COMPILED),
        default="off",
        show_default=True,
        help="What of the UNet is compiled, for each shape of video when it is first made.",
    ),
    click.option(
        "--approximate",
        type=click.Choice(APPROXIMATE),
        multiple=True,
        help="Change results by more than rounding, and mark them. int8: weights of linear layers in int8.",
    ),
)


def compute_options(command: Command) -> Command:
    """Add the options to a click command; `read` takes them out of its arguments again."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read(arguments: dict[str, Any]) -> ComputeOptions:
    """Take the options out of a command's arguments."""
    return ComputeOptions(**{field.name: arguments.pop(field.name) for field in fields(ComputeOptions)})


def as_arguments(options: ComputeOptions) -> list[str]:
    """Write the options as the words of a command line, those that are the defaults left out."""
    words: list[str] = []
    for name, value in options.changed().items():
        flag = "--compile" if name == "compiled" else f"--{name}"
        for single in value if isinstance(value, list) else [value]:
            words += [flag, single]
    return words


def check_alike(rank_info: Sequence[str]) -> None:
    """Check that all ranks of a group compute in the same way: on several hosts each is told by itself.

    Args:
        rank_info: what the ranks told of themselves, rank 0 first, with `ModelInfo.compute` as `compute`, in JSON.

    Raises:
        InputError: they do not, and frames would depend on how steps are shared.
    """
    ways = [json.loads(info).get("compute") for info in rank_info]
    for rank, way in enumerate(ways):
        if way != ways[0]:
            first, other = (json.dumps(each) for each in (ways[0], way))
            raise InputError(
                f"The ranks compute differently (rank 0: {first}, rank {rank}: {other}); "
                "start the group with the same options and the same --device on every host."
            )
