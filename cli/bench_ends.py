"""`svdq bench ends`: words around the measurements of encode and decode."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from svdq.cli.option_types import OutputFile
from svdq.pipeline.models.compute import DTYPES

if TYPE_CHECKING:
    import torch

    from svdq.pipeline.bench.ends_parts import PartFigures
    from svdq.pipeline.parameters import VideoParameters

EXAMPLES = """\b
Examples:
  svdq bench ends                                     the published SVD-XT at 1024x576, 25 frames, on this device
  svdq bench ends --dtype fp16 --decode-chunk-size 1 --decode-chunk-size 8 --decode-chunk-size 25
  svdq bench ends --model tiny/ --size 128x64 --frames 4 --json ends.json
"""


def read_sides(_context: click.Context, option: click.Parameter, value: str) -> tuple[int, int]:
    """Read a size that a video may have, such as 1024x576.

    Raises:
        InputError: it is none.
    """
    from svdq.pipeline.errors import InputError
    from svdq.pipeline.parameters import SIZE_MULTIPLE
    from svdq.producer.submitting.fields import read_field
    from svdq.producer.submitting.options import MAX_SIDE, nearest_side

    size = read_field("size", value, option.opts[0])
    width, height = nearest_side(size["width"]), nearest_side(size["height"])
    if size != {"width": width, "height": height}:
        raise InputError(
            f"{option.opts[0]} {value} is not allowed: both sides must be multiples of {SIZE_MULTIPLE} from "
            f"{SIZE_MULTIPLE} to {MAX_SIDE}; the nearest such size is {width}x{height}."
        )
    return width, height


@click.command(name="ends", epilog=EXAMPLES)
@click.option("--model", help="Folder or hub id [default: SVD-XT's published sizes, random weights, on disk a while].")
@click.option("--size", metavar="WxH", callback=read_sides, default="1024x576", show_default=True, help="Pixels.")
@click.option("--frames", type=click.IntRange(1, 1024), default=25, show_default=True, help="Frames.")
@click.option(
    "--decode-chunk-size",
    "chunk_sizes",
    type=click.IntRange(1, 1024),
    multiple=True,
    help="Frames decoded at a time; repeatable [default: 8, and all].",
)
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    help="Repeatable [default: fp16 on a GPU, fp32 on a processor].",
)
@click.option("--no-step", is_flag=True, help="Measure no step of the UNet, which the others are compared with.")
@click.option("--repeats", type=click.IntRange(1, 999), default=3, show_default=True, help="Measured times of each.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
@click.option("--json", "json_path", type=OutputFile(), help="Write the figures.")
def bench_ends(
    model: str | None,
    size: tuple[int, int],
    frames: int,
    chunk_sizes: tuple[int, ...],
    dtypes: tuple[str, ...],
    no_step: bool,
    repeats: int,
    device: str,
    json_path: Path | None,
) -> None:
    """Measure encode and decode of the real model: their time, their memory, and how many steps they are worth.

    An encode is CLIP, the VAE encoder (in float32 where the model wants that) and drawing the noise; a decode ends with
    frames on the host. Each runs with only its part of the model loaded, as on the first and the last rank.
    """
    from svdq.pipeline.installed import require_torch

    require_torch("`svdq bench ends`")
    from svdq.cli.words import table
    from svdq.pipeline.bench.ends import measure_ends
    from svdq.pipeline.bench.files import write_json

    check_name(model)
    torch_device, where, types = computing_on(device, dtypes)
    video = video_of(size, frames, repeats)
    weights = "random weights" if model is None else model
    click.echo(f"{where}, {size[0]}x{size[1]}, {frames} frames, {weights}", err=True)
    rows: list[list[object]] = [["part", "dtype", "at a time", "time (s)", "spread", "first (s)", "steps", "GiB"]]
    found = []
    for figures in measure_ends(
        model,
        video,
        device=torch_device,
        dtypes=types,
        chunk_sizes=chunk_sizes or (8, frames),
        repeats=repeats,
        with_step=not no_step,
    ):
        found.append(asdict(figures))
        if figures.failure:
            click.echo(failure_of(figures), err=True)
        else:
            rows.append(_row(figures))
    for line in table(rows):
        click.echo(line)
    if json_path is not None:
        write_json(json_path, {"device": where, "weights": weights, "parts": found})


def computing_on(
    device: str, names: tuple[str, ...], *, default: tuple[str, ...] = ()
) -> "tuple[torch.device, str, tuple[torch.dtype, ...]]":
    """Give a device, what to call it, and the types to compute in.

    Args:
        device: auto, cpu or cuda.
        names: of the types that are asked for.
        default: names of the types where none is asked for; none: what a worker computes in.

    Raises:
        InputError: there is no such device.
    """
    import platform

    import torch

    from svdq.pipeline.device import choose_device

    found = choose_device(device, 0)
    processor = f"{platform.machine()}, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name(found) if found.type == "cuda" else processor
    wanted = names or default or ("fp16" if found.type == "cuda" else "fp32",)
    # Each once, float32 first: the others are compared with it.
    dtypes = tuple(getattr(torch, DTYPES[name]) for name in DTYPES if name in wanted)
    return found, f"{where}, torch {torch.__version__}", dtypes


def check_name(model: str | None) -> None:
    """Check that a model that is to be measured has parts at all.

    Raises:
        InputError: it is made in code.
    """
    from svdq.pipeline.errors import InputError
    from svdq.pipeline.models.model_index import is_svd

    if model is not None and not is_svd(model):
        raise InputError(
            f"The model {model} has no UNet and no VAE to measure; give a StableVideoDiffusionPipeline folder or hub "
            "id, or leave --model out for the published sizes."
        )


def video_of(size: tuple[int, int], frames: int, repeats: int) -> "VideoParameters":
    """Make the video whose parts are measured, with enough steps for all repetitions."""
    from svdq.pipeline.parameters import VideoParameters

    return VideoParameters(width=size[0], height=size[1], frames=frames, steps=min(1000, max(25, repeats + 1)), seed=0)


def failure_of(figures: "PartFigures") -> str:
    """Say that a part could not be measured, and why."""
    chunk = f" of {figures.decode_chunk_size} frames at a time" if figures.decode_chunk_size else ""
    where = f"{figures.width}x{figures.height} in {figures.dtype}"
    return f"The {figures.part}{chunk} cannot be measured at {where}: {figures.failure}"


def gib(weight_bytes: int, besides_bytes: int | None) -> str:
    """Write memory in GiB: weights, and what is allocated besides where that is known."""
    weights = f"{weight_bytes / 2**30:.2f}"
    return weights if besides_bytes is None else f"{weights} + {besides_bytes / 2**30:.2f}"


def _row(figures: "PartFigures") -> list[object]:
    return [
        figures.part,
        figures.dtype,
        figures.decode_chunk_size or "",
        f"{figures.seconds:.4g}",
        f"{min(figures.all_s):.4g} to {max(figures.all_s):.4g}",
        f"{figures.first_s:.3g}",
        "" if figures.worth_steps is None else f"{figures.worth_steps:.3g}",
        gib(figures.weight_bytes, figures.peak_bytes),
    ]
