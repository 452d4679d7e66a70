"""`svdq bench precision`: words around the sweep over types and sizes."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from svdq.cli.bench_ends import check_name, computing_on, failure_of, gib, read_sides, video_of
from svdq.cli.option_types import MILLISECONDS, OutputFile
from svdq.pipeline.models.compute import DTYPES

if TYPE_CHECKING:
    from svdq.pipeline.bench.ends_parts import PartFigures

SIZES = "576x320,768x448,1024x576"
ON_A_PROCESSOR = (
    "These are figures of a processor. They say nothing about GPUs, where types and sizes compare otherwise."
)
EXAMPLES = """\b
Examples:
  svdq bench precision                                the published SVD-XT in fp32, fp16 and bf16, on this device
  svdq bench precision --sizes 576x320,1024x576 --dtype fp16 --dtype bf16 --json precision.json
  svdq bench precision --model tiny/ --sizes 64x64,128x64 --frames 4
"""


def _read_sizes(context: click.Context, option: click.Parameter, value: str) -> tuple[tuple[int, int], ...]:
    return tuple(dict.fromkeys(read_sides(context, option, item.strip()) for item in value.split(",")))


@click.command(name="precision", epilog=EXAMPLES)
@click.option("--model", help="Folder or hub id [default: SVD-XT's published sizes, random weights, on disk a while].")
@click.option(
    "--sizes", metavar="WxH,...", callback=_read_sizes, default=SIZES, show_default=True, help="Pixels, a list."
)
@click.option("--frames", type=click.IntRange(1, 1024), default=25, show_default=True, help="Frames.")
@click.option("--steps", type=click.IntRange(1, 1000), default=25, show_default=True, help="Steps of a video.")
@click.option(
    "--dtype",
    "dtypes",
    type=click.Choice(list(DTYPES)),
    multiple=True,
    help="Repeatable [default: all; the others are compared with fp32 where it is one of them].",
)
@click.option("--transfer-ms", type=MILLISECONDS, default=4.0, show_default=True, help="Until a hand-over has arrived.")
@click.option(
    "--overhead-ms", type=MILLISECONDS, default=2.0, show_default=True, help="What it costs each of two GPUs."
)
@click.option("--repeats", type=click.IntRange(1, 999), default=3, show_default=True, help="Measured times of each.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to compute."
)
@click.option("--json", "json_path", type=OutputFile(), help="Write the figures.")
def bench_precision(
    model: str | None,
    sizes: tuple[tuple[int, int], ...],
    frames: int,
    steps: int,
    dtypes: tuple[str, ...],
    transfer_ms: float,
    overhead_ms: float,
    repeats: int,
    device: str,
    json_path: Path | None,
) -> None:
    """Measure a video's parts in each type and size, and say what a second GPU would bring against these.

    What two GPUs do comes from the capacity model of svdq plan, with the costs that were measured here on one.
    """
    from svdq.pipeline.installed import require_torch

    require_torch("`svdq bench precision`")
    from svdq.cli.words import table
    from svdq.pipeline.bench.doubts import not_finite, unsteady
    from svdq.pipeline.bench.files import write_json
    from svdq.pipeline.bench.precision import HandOver, cases_of, conclusions, measure_precision

    check_name(model)
    torch_device, where, types = computing_on(device, dtypes, default=tuple(DTYPES))
    videos = [video_of(size, frames, repeats) for size in sizes]
    weights = "random weights" if model is None else model
    click.echo(f"{where}, {frames} frames, {weights}", err=True)
    found = []
    for figures in measure_precision(model, videos, device=torch_device, dtypes=types, repeats=repeats):
        found.append(figures)
        if figures.failure:
            click.echo(failure_of(figures), err=True)
    head: list[object] = ["size", "dtype", "part", "at a time", "time (s)", "spread", "GiB", "difference"]
    order = {size: number for number, size in enumerate(sizes)}
    done = sorted((one for one in found if not one.failure), key=lambda one: order[one.width, one.height])
    for line in table([head, *map(_row, done)]):
        click.echo(line)
    hand_over = HandOver(transfer_s=transfer_ms / 1000, overhead_s=overhead_ms / 1000)
    sentences = [ON_A_PROCESSOR] if torch_device.type == "cpu" else []
    sentences += [*unsteady(found), *not_finite(found), *conclusions(cases_of(found), steps, hand_over)]
    click.echo()
    for sentence in sentences:
        click.echo(sentence)
    if json_path is not None:
        parts = [asdict(figures) for figures in found]
        document = {"device": where, "weights": weights, "steps": steps, "hand_over": asdict(hand_over)}
        write_json(json_path, document | {"parts": parts, "sentences": sentences})


def _row(figures: "PartFigures") -> list[object]:
    return [
        f"{figures.width}x{figures.height}",
        figures.dtype,
        figures.part,
        figures.decode_chunk_size or "",
        f"{figures.seconds:.4g}",
        f"{min(figures.all_s):.4g} to {max(figures.all_s):.4g}",
        gib(figures.weight_bytes, figures.peak_bytes),
        "" if figures.difference is None else f"{figures.difference:.1e}",
    ]
