"""`svdq plan`: estimates GPUs, time and cost of a number of videos."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import datetime

import click

from svdq.cli.formatting import clock, echo, echo_json, table
from svdq.cli.option_types import MILLISECONDS, STEP_MS, NumberRange, json_option, parse_experts
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.memory import size_text
from svdq.pipeline.models.model_file import with_presets
from svdq.pipeline.planning.binding import split_steps
from svdq.pipeline.planning.capacity import CapacityPlan, CapacityQuestion, VideoCosts, make_plan
from svdq.pipeline.planning.costs import Costs
from svdq.producer.text import count, duration, parse_duration, parse_future
from svdq.worker.fit import NUM_VIDEOS, Cards, know, ways


def _parse_gpus(context: click.Context, parameter: click.Parameter, value: str | None) -> int | Cards | None:
    """Parse a number of GPUs, or their number and memory such as 1x24, in a callback."""
    if value is None:
        return None
    if (cards := Cards.parse(value)) is not None:
        return cards
    return int(click.IntRange(1, 512).convert(value, parameter, context))  # type: ignore[arg-type]  # it parses text


@click.command()
@click.option("--videos", type=click.IntRange(1, 10**9), metavar="N", help="Videos to render [with --model: 300].")
@click.option("--model", metavar="MODEL", help="Say what this model needs, before it is fetched, in place of a plan.")
@click.option("--shape", metavar="WxHxF", help="With --model: shape of the videos [default: the model's own].")
@click.option("--deadline", metavar="TIME", help="Time available, such as 8h, or the time of day, such as 07:00.")
@click.option(
    "--gpus",
    callback=_parse_gpus,
    metavar="K|KxGB|KxNAME",
    help="GPUs [default: what the deadline needs]. With --model: 1x24 (GB), 4090 [default: this machine's].",
)
@click.option("--steps", type=click.IntRange(1, 1000), help="Denoising steps [default: those of --segments, else 25].")
@click.option("--step-ms", type=STEP_MS, help="Milliseconds of a step [with --model: as published for such a GPU].")
@click.option("--encode-ms", type=MILLISECONDS, default=0.0, help="Milliseconds of an encode.")
@click.option("--decode-ms", type=MILLISECONDS, default=0.0, help="Milliseconds of a decode.")
@click.option(
    "--segments",
    callback=parse_experts,
    metavar="STEPS+STEPS",
    help="Each GPU of a pipeline holds one of two experts, which do these shares of the steps: 15+25.",
)
@click.option("--gpu-hour-price", type=NumberRange(0), metavar="PRICE", help="Price of a GPU per hour.")
@json_option()
def plan(
    videos: int | None,
    model: str | None,
    shape: str | None,
    deadline: str | None,
    gpus: int | Cards | None,
    steps: int | None,
    step_ms: float | None,
    encode_ms: float,
    decode_ms: float,
    segments: tuple[int, int] | None,
    gpu_hour_price: float | None,
    as_json: bool,
) -> None:
    """Estimate how many GPUs a number of videos needs, the time and the cost, or which GPUs a model needs.

    The JSON beside a finished video has its costs: seconds of the encode, the steps and the decode. The plan compares
    one GPU, one pipeline over all GPUs, and a replica on each GPU.

    With --segments, a pipeline needs the memory for one expert on each GPU; one GPU and replicas need it for both, or
    work in rounds (`svdq worker --experts rounds --groups 7 --ranks 1`), where loading may take 5% of the time.

    With --model, svdq says what is to be fetched, which ways of running the model fit the GPUs, and how long the videos
    take. It needs no file of the models that it knows.

    \b
    Examples:
      svdq plan --videos 500 --steps 25 --step-ms 764 --encode-ms 140 --decode-ms 3383 --gpus 7
      svdq plan --videos 500 --deadline 8h --step-ms 764 --encode-ms 140 --decode-ms 3383 --gpu-hour-price 2.5
      svdq plan --videos 50 --step-ms 5000 --decode-ms 5000 --segments 15+25 --gpus 7
      svdq plan --model Wan-AI/Wan2.2-I2V-A14B-Diffusers --gpus 4090
    """
    if model is not None:
        if deadline or encode_ms or decode_ms or segments or gpu_hour_price is not None or isinstance(gpus, int):
            raise click.UsageError("With --model there are --videos, --shape, --steps, --step-ms and --gpus 1x24 only.")
        _answer_about(model, shape, gpus, videos, steps, step_ms, as_json=as_json)
        return
    if videos is None or step_ms is None:
        raise click.UsageError("Give --videos and --step-ms, or a model with --model.")
    if shape is not None or not isinstance(gpus, int | None):
        raise click.UsageError("--shape and --gpus with memory are for --model; give that, too.")
    now = datetime.now().astimezone()
    costs = Costs(step_s=(step_ms / 1000,), encode_s=encode_ms / 1000, decode_s=decode_ms / 1000)
    video = VideoCosts(steps=steps or sum(segments or (25,)), costs=costs)
    if segments is not None:
        video = replace(video, segments=split_steps(video.steps, segments))
    question = CapacityQuestion(
        videos=videos,
        deadline_s=_deadline_s(deadline, now) if deadline is not None else None,
        gpus=gpus,
        gpu_hour_price=gpu_hour_price,
    )
    found = make_plan(video, question)
    if as_json:
        echo_json(asdict(found))
    else:
        echo(f"{_describe(video)}.", *table(_rows(found)), "", *_sentences(found, now.timestamp()))


def _answer_about(
    model: str,
    shape: str | None,
    cards: Cards | None,
    videos: int | None,
    steps: int | None,
    step_ms: float | None,
    *,
    as_json: bool,
) -> None:
    """Print what a model needs of some GPUs."""
    known, cards = know(with_presets(model)), cards or Cards.here()
    if cards is None:
        raise InputError("No GPU is visible here; name some with their memory, such as --gpus 1x24 or --gpus 4090.")
    video, num_videos, step = known.video(shape), videos or NUM_VIDEOS, cards.step_of(known.published)
    if steps is not None:
        video = video.model_copy(update={"steps": steps})
    found = ways(known, video, cards, num_videos, step_ms / 1000 if step_ms else step.step_s if step else None)
    if as_json:
        echo_json({"download_bytes": known.download_bytes, "ways": [asdict(way) for way in found]})
        return
    echo(f"{model}: {video.width}x{video.height}, {count(video.num_frames, 'frame')}, {count(video.steps, 'step')}.")
    echo(f"{known.to_fetch() or 'Its files are here'}.", f"{cards}: {size_text(cards.room_bytes)} for each rank.", "")
    rows = [["command", "a rank needs", "host memory", "fits", count(num_videos, "video")]]
    for way in found:
        fits = "no" if not way.fits else "in parts" if way.in_parts else "yes"
        time = duration(way.time_s) if way.fits and way.time_s is not None else ""
        host = size_text(way.host_bytes) if way.host_bytes else "-"
        rows.append([way.command, size_text(way.need_bytes), host, fits, time])
    echo(*table(rows), "")
    best = next((way for way in found if way.fits), None)
    if best is None:
        echo("Nothing fits: choose a smaller --shape, or GPUs with more memory.")
        return
    echo(f"Start with: {best.command}")
    if step_ms is None and step is None:
        echo("No time of a step on such a GPU is known; give one with --step-ms.")
    elif step_ms is None and step is not None:
        echo(f"Times are by steps of {step.step_s:g} s ({step.source}). No GPU has confirmed them, or the memory.")


def _describe(video: VideoCosts) -> str:
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
    if not set(text) & set(":-"):
        return parse_duration(text, "--deadline").total_seconds()
    return (parse_future(text, "--deadline", now) - now).total_seconds()


def _rows(found: CapacityPlan) -> list[list[str]]:
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


def _sentences(found: CapacityPlan, now_s: float) -> Iterator[str]:
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
