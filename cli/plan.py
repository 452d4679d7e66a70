"""`svdq plan` and `advise`: estimate GPUs, time and cost of videos, and show what would help a run most."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import clock, echo, echo_json, table
from svdq.cli.main import connect, json_option, redis_options
from svdq.cli.option_types import MILLISECONDS, Number, parse_experts
from svdq.producer.text import count
from svdq.producer.timeparse import duration

if TYPE_CHECKING:
    from svdq.pipeline.planning.advice import Remedy
    from svdq.pipeline.planning.capacity import Plan, VideoCosts
    from svdq.pipeline.planning.recordings import Profile
    from svdq.producer.status.ranks import GroupStatus


@click.command()
@click.option("--videos", type=click.IntRange(1, 10**9), required=True, metavar="N", help="Number of videos to render.")
@click.option("--deadline", metavar="TIME", help="Time available, such as 8h, or the time of day, such as 07:00.")
@click.option("--gpus", type=click.IntRange(1, 512), help="GPUs [default: as measured, else what the deadline needs].")
@click.option("--from", "source", metavar="FILE|live", help="A file of svdq bench --json, or a live group.")
@click.option("--steps", type=click.IntRange(1, 1000), help="Denoising steps [default: as recorded, else 25].")
@click.option("--step-ms", type=Number(0, 1e9, min_open=True), help="Milliseconds of a step; replaces --from.")
@click.option("--encode-ms", type=MILLISECONDS, default=0.0, help="Milliseconds of an encode.")
@click.option("--decode-ms", type=MILLISECONDS, default=0.0, help="Milliseconds of a decode.")
@click.option(
    "--segments",
    callback=parse_experts,
    metavar="STEPS+STEPS",
    help="Each GPU of a pipeline holds one of two experts, which do these shares of the steps: 15+25.",
)
@click.option("--gpu-hour-price", type=Number(0), metavar="PRICE", help="Price of a GPU per hour.")
@json_option()
@redis_options
def plan(
    videos: int,
    deadline: str | None,
    gpus: int | None,
    source: str | None,
    steps: int | None,
    step_ms: float | None,
    encode_ms: float,
    decode_ms: float,
    segments: tuple[int, int] | None,
    gpu_hour_price: float | None,
    as_json: bool,
    redis_url: str | None,
) -> None:
    """Estimate how many GPUs a number of videos needs, the time and the cost, and what else would help.

    The costs of a video come from a recording, from a running group (--from live), or from --step-ms, --encode-ms and
    --decode-ms. The plan compares one GPU, one pipeline over all GPUs, and a replica on each GPU.

    With --segments, a pipeline needs the memory for one expert on each GPU; one GPU and replicas need it for both. Give
    it with --from live, too, for a group whose ranks are bound to experts: a group does not report that.

    \b
    Examples:
      svdq plan --videos 500 --deadline 8h --from bench.json
      svdq plan --videos 500 --deadline 07:00 --from live
      svdq plan --videos 500 --steps 25 --step-ms 764 --encode-ms 140 --decode-ms 3383 --gpus 7
      svdq plan --videos 500 --deadline 8h --from bench.json --gpu-hour-price 2.5
      svdq plan --videos 50 --step-ms 5000 --decode-ms 5000 --segments 15+25 --gpus 7
    """
    from svdq.pipeline.costs import Costs
    from svdq.pipeline.errors import InputError
    from svdq.pipeline.models.names import split_steps
    from svdq.pipeline.planning.capacity import Question, VideoCosts, make_plan
    from svdq.pipeline.planning.recordings import read_profile

    now = datetime.now().astimezone()
    if source is not None and step_ms is None:
        profile = _live_profiles(redis_url)[-1] if source == "live" else read_profile(Path(source))
        origin, video = profile.source, replace(profile.video, steps=steps or profile.video.steps)
        segments = segments or video.segments
    elif step_ms is not None and source is None:
        costs = Costs(step_s=(step_ms / 1000,), encode_s=encode_ms / 1000, decode_s=decode_ms / 1000)
        origin, video = "As given", VideoCosts(steps=steps or sum(segments or (25,)), costs=costs)
    else:
        raise InputError("Give the costs of a video in one way: --from FILE, --from live, or --step-ms.")
    if segments is not None:
        video = replace(video, segments=split_steps(video.steps, segments))
    question = Question(
        videos=videos,
        deadline_s=_deadline_s(deadline, now) if deadline is not None else None,
        gpus=gpus,
        gpu_hour_price=gpu_hour_price,
    )
    found = make_plan(video, question)
    origin = f"{origin}: {_describe(video)}."
    if as_json:
        echo_json({"source": origin, **asdict(found)})
    else:
        echo(origin, *table(_rows(found)), "", *_sentences(found, now.timestamp()))


def _describe(video: "VideoCosts") -> str:
    step_s = video.step_s(len(video.costs.step_s))
    words = f"{count(video.steps, 'step')} of {seconds(step_s)}"
    for name, value in (("encode", video.costs.encode_s), ("decode", video.costs.decode_s)):
        if value:
            words += f", {name} {seconds(value)}"
    if video.segments is not None:
        words += f", experts {video.segments[0]} + {video.segments[1]}"
    return words


def _deadline_s(text: str, now: datetime) -> float:
    """Parse a duration such as 8h, or a future time; return seconds."""
    from svdq.producer.timeparse import parse_duration, parse_future

    if not set(text) & set(":-"):
        return parse_duration(text, "--deadline").total_seconds()
    return (parse_future(text, "--deadline", now) - now).total_seconds()


def _rows(found: "Plan") -> list[list[str]]:
    question = found.question
    rows = [["layout", "GPUs", "a video", "videos/h", f"{question.videos:,} videos"]]
    rows[0] += ["in time"] * (question.deadline_s is not None)
    rows[0] += ["cost", "cost a video"] * (question.gpu_hour_price is not None)
    for row in found.rows:
        cells = [row.layout, str(row.gpus), seconds(row.pace_s), rate(row.videos_an_hour), seconds(row.time_s)]
        if row.in_time is not None:
            cells.append("yes" if row.in_time else "no")
        if row.cost is not None:
            cells += [f"{row.cost:,.2f}", f"{row.cost_a_video:.4f}"]
        rows.append(cells)
    return rows


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
        available = duration(question.deadline_s)
        if found.fewest is None:
            yield f"No number of GPUs renders {question.videos:,} videos in {available}."
        else:
            enough = "1 GPU is" if found.fewest == 1 else f"{found.fewest} GPUs are"
            # Every plan has the row of the fewest GPUs: as one GPU, or as a pipeline.
            time_s = next(row.time_s for row in found.rows if row.gpus == found.fewest)
            end = clock(now_s + time_s)
            yield f"{enough} enough for {question.videos:,} videos in {available}: started now, they are done at {end}."
    if found.gpus > found.largest_useful:
        yield f"A group is useful with up to {found.largest_useful} ranks: beyond it rank 0 only encodes; use --groups."
    for change in found.changes:
        time = seconds(change.time_s)
        yield f"{change.what}: {change.factor:.2f} times as many videos; {question.videos:,} in {time}."


@click.command()
@click.argument("recording", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option("group")
@redis_options
def advise(recording: Path | None, as_json: bool, redis_url: str | None) -> None:
    """Show where the time goes, which resource limits the run, and the one change that would help most.

    RECORDING is a file of svdq bench --json. Without it, the running groups are analyzed, by their figures of the last
    ten seconds.

    \b
    Examples:
      svdq advise                       the groups that are running now
      svdq advise bench.json            what svdq bench --json bench.json wrote
    """
    from svdq.pipeline.planning.advice import advise as advise_on
    from svdq.pipeline.planning.recordings import read_profile

    profiles = [read_profile(recording)] if recording is not None else _live_profiles(redis_url)
    for profile in profiles:
        advice = advise_on(profile)
        if as_json:
            echo_json({"source": profile.source, "busy": profile.busy, **asdict(advice)})
            continue
        echo(f"{profile.source}:", advice.time, f"This would help most: {_remedy(advice.best)}")
        echo(*(f"After that: {_remedy(other)}" for other in advice.others))


def _remedy(remedy: "Remedy") -> str:
    return f"{remedy.text} Expected: {remedy.factor:.2f} times as many videos."


def _live_profiles(redis_url: str | None) -> "list[Profile]":
    """Build the profiles of all groups that have finished a video."""
    from svdq.pipeline.errors import InputError
    from svdq.producer.status.ranks import read_groups

    with connect(redis_url=redis_url) as connection:
        groups = read_groups(connection)
    profiles = [profile for group in groups if (profile := _profile(group)) is not None]
    if not profiles:
        raise InputError("No running group has finished a video; give a file of svdq bench --json, or try again later.")
    return profiles


def _profile(group: "GroupStatus") -> "Profile | None":
    """Build the current profile of a group; None before its first video and while a rank is missing."""
    from svdq.pipeline.costs import Costs
    from svdq.pipeline.planning.capacity import VideoCosts
    from svdq.pipeline.planning.recordings import Profile

    intake = group.intake
    if intake is None or not intake.costs or len(group.ranks) != group.ranks[0].num_ranks:
        return None
    costs = intake.costs[-1]
    steps = next((rank.steps for rank in group.ranks if rank.steps), 25)
    busy = tuple(min(1.0, rank.busy_share) for rank in group.ranks)
    idle = 1 - sum(busy) / len(busy)
    is_writing = any(condition.job_ids for condition in group.conditions)
    return Profile(
        source=f"Group {group.name}, {costs.width}x{costs.height}x{costs.frames}",
        video=VideoCosts(
            steps=steps, costs=Costs(step_s=costs.step_s, encode_s=costs.encode_s, decode_s=costs.decode_s)
        ),
        busy=busy,
        no_jobs=idle if not is_writing and len(intake.in_flight) < len(busy) else 0.0,
        writing=idle if is_writing else 0.0,
    )
