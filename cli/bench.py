"""`svdq bench`: options and output of the measurements of pipeline and worker."""

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from svdq.cli.formatting import echo, table
from svdq.cli.option_types import MILLISECONDS, STEP_MS, OutputFile, parse_experts


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Any, ...] | None:
    if value is None:
        return None
    kind = float if parameter.name == "rank_speed" else int
    try:
        numbers = tuple(kind(item) for item in value.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise click.BadParameter(f"{value!r} is not a list of positive numbers such as 1,2,4,7")
    return numbers


def _step_ms(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    """Parse the milliseconds of all steps, or of successive ones: 40*8,200*3."""
    found: list[float] = []
    for part in value.split(","):
        milliseconds, times, number = part.partition("*")
        if times and not (number.isascii() and number.isdecimal() and 0 < int(number) <= MAX_STEPS):
            raise click.BadParameter(f"{part!r} is not milliseconds times a number of steps, such as 40*8")
        found += [STEP_MS.convert(milliseconds, parameter, context)] * int(number or 1)
    return tuple(found)


MAX_STEPS = 1000


@click.command()
@click.option("--model", default="simulated", show_default=True, help="simulated, preview, or a model folder.")
@click.option("--ranks", type=click.IntRange(1, 512), default=7, show_default=True, help="Ranks of the group.")
@click.option(
    "--steps", type=click.IntRange(1, MAX_STEPS), help="Denoising steps [default: 25, or as many as --step-ms lists]."
)
@click.option(
    "--skipped", type=click.IntRange(0), default=0, show_default=True, help="Simulated steps that cost nothing."
)
@click.option(
    "--step-ms",
    callback=_step_ms,
    default="50",
    show_default=True,
    metavar="MS[*STEPS],...",
    help="Simulated step, or steps of different costs, 40*8,200*3.",
)
@click.option("--encode-ms", type=MILLISECONDS, default=0.0, show_default=True, help="Simulated encode.")
@click.option("--decode-ms", type=MILLISECONDS, default=0.0, show_default=True, help="Simulated decode.")
@click.option(
    "--segments",
    callback=parse_experts,
    metavar="STEPS+STEPS",
    help="Simulate two experts with these shares of the steps, 15+25.",
)
@click.option(
    "--experts",
    type=click.Choice(["bound", "rounds"]),
    default="bound",
    show_default=True,
    help="With --segments: each rank holds one expert, or the only rank one at a time, in rounds over many videos.",
)
@click.option("--load-ms", type=MILLISECONDS, default=0.0, show_default=True, help="Simulated load, in rounds.")
@click.option("--rank-speed", callback=_numbers, help="Slowdown of each simulated rank: 1,1,1,1.5,1,1,1.")
@click.option("--samples", type=click.IntRange(1, 10**6), default=80, show_default=True, help="Videos per run.")
@click.option(
    "--warmup-samples",
    type=click.IntRange(0),
    help="Videos left out at the start and at the end, or of the first burst [default: 2 K].",
)
@click.option("--frames", type=click.IntRange(1, 1024), help="Frames per video [default: 14 or fewer].")
@click.option("--size", default="576x320", show_default=True, help="WIDTHxHEIGHT.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="cpu", show_default=True, help="Where to compute."
)
@click.option(
    "--through",
    type=click.Choice(["loop", "daemon"]),
    default="loop",
    show_default=True,
    help="The bare loop, or the whole worker with Redis and files.",
)
@click.option("--burst", callback=_numbers, help="Measure how long so many videos take on an idle group: 1,7,8,50.")
@click.option(
    "--json",
    "json_path",
    type=OutputFile(),
    is_flag=False,
    flag_value="/dev/stdout",
    metavar="[FILE]",
    help="Print the figures as JSON in place of a table, or write them to this file.",
)
@click.option("--plot", "plot_path", type=OutputFile(".png"), help="Write a timeline to this PNG file.")
@click.option("--trace", "trace_path", type=OutputFile(), help="Write a Chrome trace to this file.")
def bench(*, json_path: Path | None, plot_path: Path | None, trace_path: Path | None, **options: Any) -> None:
    """Measure the pipeline: pace, efficiency, busy shares and memory.

    Efficiency is the ideal time per video, (steps x step + encode + decode) / ranks, divided by the measured time
    between finished videos in steady state. Steps that are skipped do not count. For ranks of unequal speed, step is
    the harmonic mean of theirs. With --segments, the ideal is what the ranks with the slower expert need; of rounds, it
    has no time to load.

    With --burst, the same ranks get each number N of videos at once. The table compares the time until the last one
    ends with the lower bound of any schedule, the larger of one video's time W and N x W / ranks, which a few whole
    steps may not divide into, and with the shortest time of replicas: as many groups of one rank. The first row is a
    burst before any costs are measured.

    \b
    Examples:
      svdq bench                                  seven simulated ranks, 25 steps of 50 ms
      svdq bench --through daemon                 with real Redis and real files
      svdq bench --burst 1,2,7,8,10,14,20,50      a few videos at a time
      svdq bench --steps 40 --segments 15+25      ranks that hold one of two experts each
      svdq bench --step-ms 40*8,200*3 --encode-ms 90 --decode-ms 160     two kinds of steps
      svdq bench --ranks 1 --segments 15+25 --experts rounds --load-ms 500 --burst 60
    """
    # Like Ctrl-C, so that ranks, workers and their Redis server end and temporary folders are removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from svdq.pipeline.errors import require_torch

    require_torch("`svdq bench`")
    from svdq.worker.bench.measure import BenchOptions, headless_pyplot, run_bench, write_results

    if plot_path is not None:
        headless_pyplot()  # so that a missing matplotlib is reported before the run
    step_ms = options.pop("step_ms")
    options["steps"] = options["steps"] or (len(step_ms) if len(step_ms) > 1 else 25)
    costs = tuple(each / step_ms[0] for each in step_ms) if len(step_ms) > 1 else ()
    report = run_bench(BenchOptions(**options, step_ms=step_ms[0], costs=costs))
    if json_path != Path("/dev/stdout"):
        columns = BURST_COLUMNS if report.bursts else RUN_COLUMNS
        rows = [[cell(figures) for cell in columns.values()] for figures in report.bursts or report.runs]
        echo(*table([list(columns), *rows]))
    for run in report.runs:
        if run.doubt:
            echo(run.doubt, err=True)
    write_results(report, json_path=json_path, plot_path=plot_path, trace_path=trace_path)


RUN_COLUMNS: dict[str, Callable[[Any], object]] = {
    "efficiency": lambda run: f"{run.efficiency:.4f}",
    "s/video": lambda run: f"{run.per_sample_s:.4f}",
    "p95 (s)": lambda run: f"{run.per_sample_p95_s:.4f}",
    "first (s)": lambda run: f"{run.first_sample_s:.3f}",
    "steps/rank": lambda run: " ".join(f"{steps:.3g}" for steps in run.steps_per_rank),
    "busy share by rank": lambda run: " ".join(f"{share:.2f}" for share in run.busy_share),
    "MiB by rank": lambda run: " ".join(f"{rss_mb:.0f}" for rss_mb in run.rss_mb),
}
BURST_COLUMNS: dict[str, Callable[[Any], object]] = {
    "videos": lambda burst: f"{burst.videos} (first)" if burst.is_first else burst.videos,
    "wall (s)": lambda burst: f"{burst.wall_s:.3f}",
    "bound (s)": lambda burst: f"{burst.bound_s:.3f}",
    "ratio": lambda burst: f"{burst.ratio:.3f}",
    "replicas (s)": lambda burst: f"{burst.replicas_s:.3f}",
    "pipeline/replicas": lambda burst: f"{burst.pipeline_over_replicas:.3f}",
}
