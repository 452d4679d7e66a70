"""`svdq plan`: says what a model needs of some GPUs, and how long videos take there."""

from dataclasses import asdict, dataclass
from typing import Any

import click

from svdq.cli.formatting import echo, echo_json, table
from svdq.cli.option_types import STEP_MS, json_option
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.memory import size_text
from svdq.pipeline.models.family import PublishedStep
from svdq.pipeline.models.model_name import has_weights, with_presets
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.needs import SizedModel
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.settings_loader import load_settings
from svdq.producer.submitting.draft import read_draft
from svdq.producer.submitting.parameters import as_flag
from svdq.producer.text import count, duration
from svdq.worker.cards import Cards
from svdq.worker.fit import NUM_VIDEOS, Way, lack_of_disk, to_fetch, ways

GPUS = "cards such as 4090 or 2xA5000, or their memory in GB such as 1x24"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ways to run a model on some GPUs, and what they were found from."""

    known: SizedModel
    cards: Cards
    video: VideoParameters
    step: PublishedStep | None  # the published time of a step there
    ways: list[Way]  # the best of those that fit first
    files: str | None  # which of a model's files to take, where it has them in several formats

    def as_json(self) -> dict[str, Any]:
        """Return one JSON object."""
        ways = [asdict(way) for way in self.ways]
        return {"download_bytes": self.known.download_bytes, "files": self.files, "ways": ways}


def make_plan(
    model: str | None,
    gpus: str | None,
    videos: int = NUM_VIDEOS,
    *,
    shape: str | None = None,
    steps: int | None = None,
    step_cache: str | None = None,
    step_ms: float | None = None,
) -> Plan:
    """Find the ways to run a model, by default the configured one on the GPUs of this machine; raises InputError."""
    given = None if gpus is None else Cards.parse(gpus)
    if gpus is not None and given is None:
        raise InputError(f"--gpus {gpus[:80]!r} is not known; give {GPUS}.")
    model = model or load_settings().model
    if not has_weights(model):
        raise InputError(f"The model {model!r} needs no GPU; name another by --model or SVDQ_MODEL.")
    known, cards = sized_model(with_presets(model)), given or Cards.here()
    if cards is None:
        raise InputError("No GPU is visible here; name some with their memory, such as --gpus 1x24 or --gpus 4090.")
    video, step = known.video(shape), cards.step_of(known.published)
    if steps is not None:
        video = video.model_copy(update={"steps": steps})
    if step_cache is not None:
        video = _skipping(video, step_cache, known)
    found = ways(known, video, cards, videos, step_ms / 1000 if step_ms else step.step_s if step else None)
    files = cards.files() if known.has_blocks else None
    return Plan(known=known, cards=cards, video=video, step=step, ways=found, files=files)


def _skipping(video: VideoParameters, step_cache: str, known: SizedModel) -> VideoParameters:
    """Return a video with a threshold, or with a speedup, of skipped steps; raises InputError if none is skipped."""
    if known.family.threshold_for is None:
        raise InputError(f"--step-cache does not apply to {video.title}; leave it out.")
    threshold = read_draft({"step_cache": step_cache}, as_flag).step_cache
    assert threshold is not None
    if isinstance(threshold, str):
        threshold = known.threshold_for(video, threshold)
    if not 0 <= threshold <= 1:
        raise InputError(f"--step-cache {threshold:g} is not allowed: it must be from 0 to 1.")
    return known.family.complete(video.model_copy(update={"step_cache": threshold}), known.facts)


@click.command()
@click.option("--model", metavar="MODEL", help="Model, also before it is fetched [default: SVDQ_MODEL].")
@click.option("--gpus", metavar="KxGB|KxNAME", help="GPUs: 1x24 (GB), 4090 [default: this machine's].")
@click.option(
    "--videos",
    type=click.IntRange(1, 10**9),
    default=NUM_VIDEOS,
    show_default=True,
    metavar="N",
    help="Videos to render.",
)
@click.option("--shape", metavar="WxHxF", help="Shape of the videos [default: the model's own].")
@click.option("--steps", type=click.IntRange(1, 1000), help="Denoising steps [default: the model's own].")
@click.option("--step-cache", metavar="THRESHOLD|1.5x", help="Skip steps, as `svdq submit` [default: none].")
@click.option("--step-ms", type=STEP_MS, help="Milliseconds of a step [default: as published for such a GPU].")
@json_option()
def plan(
    *,
    model: str | None,
    gpus: str | None,
    videos: int,
    shape: str | None,
    steps: int | None,
    step_cache: str | None,
    step_ms: float | None,
    as_json: bool,
) -> None:
    """Say what a model needs of some GPUs, which ways of running it fit, and how long videos take.

    It needs no file of the models that it knows, and says what is to be fetched.

    \b
    Examples:
      svdq plan --model Wan-AI/Wan2.2-I2V-A14B-Diffusers --gpus 4090
      svdq plan --model wan2.2-4step --gpus 2xA5000 --videos 1000
    """
    model = model or load_settings().model
    found = make_plan(model, gpus, videos, shape=shape, steps=steps, step_cache=step_cache, step_ms=step_ms)
    if as_json:
        echo_json(found.as_json())
        return
    known, cards, video, step, files = found.known, found.cards, found.video, found.step, found.files
    num_steps, costs = count(video.steps, "step"), known.unit_costs(video).steps
    num_steps = f"{sum(map(bool, costs))} of {num_steps} computed" if 0.0 in costs else num_steps
    echo(f"{model}: {video.width}x{video.height}, {count(video.num_frames, 'frame')}, {num_steps}.")
    echo(f"{to_fetch(known) or 'Its files are here'}.")
    if lack := lack_of_disk(known):
        echo(f"The disk has {lack}: free some, or set HF_HOME to a folder on a larger one.")
    echo(f"{cards}: {size_text(cards.room_bytes)} for each rank.", "")
    rows = [["command", "a rank needs", "host memory", "fits", count(videos, "video")]]
    for way in found.ways:
        fits = "no" if not way.fits else "in parts" if way.in_parts else "yes"
        time = duration(way.time_s) if way.fits and way.time_s is not None else ""
        host = size_text(way.host_bytes) if way.host_bytes else "-"
        rows.append([way.command, size_text(way.need_bytes), host, fits, time])
    echo(*table(rows), "")
    best = next((way for way in found.ways if way.fits), None)
    if best is None:
        is_text = known.phases(video, "rounds")["embed"] > cards.room_bytes
        files = "files in int8, fp8 or GGUF, the text encoder's too (docs/gpus.md), " if is_text else ""
        echo(f"Nothing fits: choose {files}a smaller --shape, or GPUs with more memory.")
        return
    echo(f"Start with: {best.command}")
    if files is not None:
        echo(f"Files of the transformer to take: {files}.")
    if step_ms is None and step is None:
        echo("No time of a step on such a GPU is known; give one with --step-ms.")
    elif step_ms is None and step is not None:
        echo(f"Times are by steps of {step.step_s:g} s ({step.source}). No night has confirmed them, or the memory.")
