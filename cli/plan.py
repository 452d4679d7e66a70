"""`svdq plan`: estimate the number of GPUs, the time and the cost of a number of videos."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.formatting import clock, echo, table
from svdq.cli.main import redis_options
from svdq.cli.option_types import MILLISECONDS, Number
from svdq.producer.timeparse import duration

if TYPE_CHECKING:
    from svdq.pipeline.planning.plan import Plan, Row

EXAMPLES = """\b
Examples:
  svdq plan --videos 500 --deadline 8h --from bench.json
  svdq plan --videos 500 --deadline 07:00 --from live
  svdq plan --videos 500 --steps 25 --step-ms 764 --encode-ms 140 --decode-ms 3383 --gpus 7
  svdq plan --videos 50 --one-gpu-s 31.96 --fill-s 35.30 --pace-s 4.39 --gpus 7
  svdq plan --videos 500 --deadline 8h --from bench.json --gpu-hour-price 2.5 --watts 700 --plot plan.png
"""

_SECONDS = Number(0, 1e9, min_open=True)


@click.command(epilog=EXAMPLES)
@click.option("--videos", type=click.IntRange(1, 10**9), required=True, metavar="N", help="Number of videos to render.")
@click.option("--deadline", metavar="TIME", help="Time available, such as 8h, or the time of day, such as 07:00.")
@click.option("--gpus", type=click.IntRange(1, 512), help="GPUs [default: what the deadline needs, or as measured].")
@click.option("--from", "source", metavar="FILE|live", help="A file of svdq bench or --trace, or a live group.")
@click.option("--shape", metavar="WxHxF", help="With --from live: shape of the videos [default: the latest].")
@click.option("--steps", type=click.IntRange(1, 1000), help="Denoising steps [default: as recorded, else 25].")
@click.option("--step-ms", type=_SECONDS, help="Milliseconds of a step; replaces --from.")
@click.option("--encode-ms", type=MILLISECONDS, default=0.0, help="Milliseconds of an encode.")
@click.option("--decode-ms", type=MILLISECONDS, default=0.0, help="Milliseconds of a decode.")
@click.option("--transfer-ms", type=MILLISECONDS, default=0.0, help="Milliseconds of a hand-over.")
@click.option("--one-gpu-s", type=_SECONDS, help="Seconds of a video on one GPU; with the next two, replaces --from.")
@click.option("--fill-s", type=_SECONDS, help="Seconds until the first video of --gpus GPUs.")
@click.option("--pace-s", type=_SECONDS, help="Seconds between two videos of --gpus GPUs after it.")
@click.option("--gpu-hour-price", type=Number(0), metavar="PRICE", help="Price of a GPU per hour.")
@click.option("--watts", type=Number(0), help="Power of a busy GPU, with its share of the machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a chart as PNG.")
@redis_options
def plan(
    videos: int,
    deadline: str | None,
    gpus: int | None,
    gpu_hour_price: float | None,
    watts: float | None,
    as_json: bool,
    plot_path: Path | None,
    **costs: Any,
) -> None:
    """Estimate how many GPUs a number of videos needs, the time and the cost, and what else would help.

    The costs of a video come from a recording, from a running group (--from live), or from options (--step-ms, or
    --one-gpu-s, --fill-s and --pace-s). The plan compares one GPU, one pipeline over all GPUs, a replica on each GPU,
    and several groups that share the queue.
    """
    from datetime import datetime

    from svdq.cli.costs import CostOptions, model_of
    from svdq.pipeline.planning.plan import Question, make_plan

    now = datetime.now().astimezone()
    model, source = model_of(CostOptions(gpus=gpus, **costs))
    question = Question(
        videos=videos,
        deadline_s=_deadline_s(deadline, now) if deadline is not None else None,
        gpus=gpus,
        gpu_hour_price=gpu_hour_price,
        watts=watts,
    )
    found = make_plan(model, question)
    if as_json:
        echo(json.dumps({"source": source, **asdict(found)}))
    else:
        echo(source)
        for line in (*table(_rows(found)), "", *table(_runs(found)), ""):
            echo(line)
        for line in _sentences(found, now.timestamp()):
            echo(line)
    if plot_path is not None:
        from svdq.pipeline.planning.chart import draw_plan

        draw_plan(model, found, plot_path)


def _deadline_s(text: str, now: Any) -> float:
    """Parse a duration such as 8h, or a future time; return seconds."""
    import re

    from svdq.producer.timeparse import parse_duration, parse_future

    if re.fullmatch(r"\d+[a-z]", text.strip()):
        return parse_duration(text, "--deadline").total_seconds()
    return float((parse_future(text, "--deadline", now) - now).total_seconds())


def _rows(found: "Plan") -> list[list[str]]:
    question = found.question
    head = ["way", "GPUs", "first video", "a video", "videos/h", f"{question.videos} videos"]
    head += ["in time"] * (question.deadline_s is not None) + ["cost", "cost a video"] * (
        question.gpu_hour_price is not None
    )
    head += ["kWh a video"] * (question.watts is not None)
    return [head, *(_row(row) for row in found.rows)]


def _runs(found: "Plan") -> list[list[str]]:
    head = ["videos", "one GPU (s)", f"{found.way} (s)", "times as fast"]
    return [
        head,
        *([str(size), f"{one_s:.2f}", f"{many_s:.2f}", f"{one_s / many_s:.2f}"] for size, one_s, many_s in found.runs),
    ]


def _row(row: "Row") -> list[str]:
    cells = [
        row.way,
        str(row.gpus),
        seconds(row.first_s),
        seconds(row.pace_s / row.groups),
        rate(row.videos_an_hour),
    ]
    cells.append(seconds(row.time_s))
    if row.in_time is not None:
        cells.append("yes" if row.in_time else "no")
    if row.cost is not None:
        cells += [f"{row.cost:,.2f}", f"{row.cost_a_video:.4f}"]
    if row.kwh_a_video is not None:
        cells.append(f"{row.kwh_a_video:.4f}")
    return cells


def count(gpus: int) -> str:
    """Format a number of GPUs."""
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def rate(value: float) -> str:
    """Format a number of videos an hour without an exponent."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def seconds(value: float) -> str:
    """Format a duration with four significant digits, or as hours and minutes from ten minutes on."""
    if value < 0.9995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.4g} s" if value < 600 else duration(value)


def _sentences(found: "Plan", now_s: float) -> Iterator[str]:
    question = found.question
    if question.deadline_s is not None:
        yield from _deadline_sentences(found, now_s)
    if found.gpus == 1:
        pass
    elif found.break_even is None:
        yield f"It is never faster than one GPU ({found.way})."
    else:
        yield f"Break-even with one GPU is at {found.break_even:.2f} videos ({found.way})."
    if found.limit is not None and found.gpus > 1:
        yield _limit_sentence(found)
    if found.lost_to_slower is not None and found.lost_to_slower > 0.01:
        yield f"If all GPUs were as fast as the fastest, a video would take {found.lost_to_slower:.0%} less time."
    for change in found.changes:
        as_gpus = f", as much as {change.as_gpus} GPUs" if change.as_gpus and change.as_gpus > found.gpus + 1 else ""
        yield (
            f"{change.what}: {change.factor:.2f} times as many videos{as_gpus}; "
            f"{question.videos} in {seconds(change.time_s)}."
        )


def _deadline_sentences(found: "Plan", now_s: float) -> Iterator[str]:
    fewest, question = found.fewest, found.question
    assert question.deadline_s is not None
    if fewest is None:
        yield (
            f"No number of GPUs renders {question.videos} videos in {duration(question.deadline_s)}: one video alone "
            f"takes {seconds(found.rows[0].first_s)}."
        )
        return
    enough = f"{count(fewest.gpus)} {'is' if fewest.gpus == 1 else 'are'} enough"
    yield (
        f"{enough} for {question.videos} videos in {duration(question.deadline_s)} ({fewest.way}): started now, "
        f"they are done at {clock(now_s + fewest.time_s)}."
    )
    if fewest.gpus > 1:
        one = f"One pipeline of {found.fewest_one_group}" if found.fewest_one_group else "No one pipeline"
        yield f"{one} is enough; replicas need {found.fewest_replicas}."


def _limit_sentence(found: "Plan") -> str:
    from svdq.pipeline.planning.capacity import Limit

    assert found.limit is not None
    now = {
        Limit.STEPS: "the denoising steps: all ranks are equally busy",
        Limit.DECODE: "the decode: the last rank does nothing else",
        Limit.ENCODE: "the encode: rank 0 does nothing else",
        Limit.TRANSFER: "the link: hand-overs take longer than a rank's share",
    }[found.limit]
    then = {
        Limit.STEPS: "beyond it ranks have no step in some videos",
        Limit.DECODE: "beyond it the last rank only decodes",
        Limit.ENCODE: "beyond it rank 0 only encodes",
        Limit.TRANSFER: "beyond it the link is the bottleneck",
    }[found.largest_useful_because or Limit.STEPS]
    return f"The limit ({found.way}) is {now}. A group is useful with up to {found.largest_useful} ranks: {then}."
