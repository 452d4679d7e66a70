"""Reads the costs of a video for `svdq plan` and `svdq advise`: from options, a recording, or a live group."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from svdq.pipeline.planning.capacity import GivenPace, VideoCosts
    from svdq.producer.status.ranks import ShapeCosts


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """The options that give the costs of a video; units are in the names. None where an option was left out."""

    #: A recording, or `live`.
    source: str | None
    #: WxHxF, for live groups.
    shape: str | None
    steps: int | None
    step_ms: float | None
    encode_ms: float
    decode_ms: float
    transfer_ms: float
    one_gpu_s: float | None
    fill_s: float | None
    pace_s: float | None
    #: Number of GPUs to which fill_s and pace_s apply.
    gpus: int | None
    redis_url: str | None


def model_of(options: CostOptions) -> "tuple[VideoCosts | GivenPace, str]":
    """Build a capacity model from the given costs, and describe their source.

    Raises:
        InputError: costs were given in no way or in several, or a recording or a group has none.
    """
    from dataclasses import replace

    from svdq.pipeline.errors import InputError
    from svdq.pipeline.partition import Costs
    from svdq.pipeline.planning.capacity import GivenPace, VideoCosts
    from svdq.pipeline.planning.recordings import read_profile

    source, steps, step_ms, gpus = options.source, options.steps, options.step_ms, options.gpus
    one_gpu_s, fill_s, pace_s = given = (options.one_gpu_s, options.fill_s, options.pace_s)
    ways = [source is not None, step_ms is not None, any(value is not None for value in given)]
    if sum(ways) != 1:
        raise InputError(
            "Give the costs of a video in one way: --from FILE, --from live, --step-ms, or --one-gpu-s, --fill-s and "
            "--pace-s."
        )
    if source is not None:
        if source == "live":
            video, name = live_costs(options.redis_url, options.shape, steps or 25)
            return video, f"From {name}."
        video = read_profile(Path(source)).video
        return replace(video, steps=steps or video.steps), f"From {source}: {_cost_words(video, steps or video.steps)}."
    if step_ms is not None:
        costs = Costs(step_s=(step_ms / 1000,), encode_s=options.encode_ms / 1000, decode_s=options.decode_ms / 1000)
        video = VideoCosts(steps=steps or 25, costs=costs, transfer_s=options.transfer_ms / 1000)
        return video, f"As given: {_cost_words(video, video.steps)}."
    if one_gpu_s is None or fill_s is None or pace_s is None or gpus is None:
        raise InputError("--one-gpu-s, --fill-s, --pace-s and --gpus belong together; give all four.")
    model = GivenPace(ranks=gpus, one_gpu_s=one_gpu_s, fill_s=fill_s, pace_s=pace_s)
    return model, (
        f"As given: {one_gpu_s:g} s per video on one GPU; on {gpus} GPUs, the first one after {fill_s:g} s, then one "
        f"every {pace_s:g} s."
    )


def live_costs(redis_url: str | None, shape: str | None, steps: int) -> "tuple[VideoCosts, str]":
    """Return the costs that a live group has measured for a shape, and name the group.

    Raises:
        InputError: no live group has measured the shape.
    """
    from svdq.pipeline.errors import InputError
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.status.ranks import read_groups

    with session(Settings.load(redis_url=redis_url)) as connection:
        groups = read_groups(connection)
    known = [(group, costs) for group in groups for costs in (group.intake.costs if group.intake else ())]
    wanted = [one for one in known if shape in (None, shape_name(one[1]))]
    if not wanted:
        have = ", ".join(sorted({shape_name(costs) for _, costs in known}))
        raise InputError(
            f"No live group has measured {'any video' if shape is None else shape}; "
            + (f"there is {have}." if have else "render a few videos with svdq worker first, or use svdq bench --json.")
        )
    group, costs = wanted[-1]
    video = costs_of(costs, steps)
    return video, f"group {group.name}, {shape_name(costs)}: {_cost_words(video, steps)}"


def costs_of(costs: "ShapeCosts", steps: int) -> "VideoCosts":
    """Convert a group's measured costs of a shape to those of a video with `steps` steps."""
    from svdq.pipeline.partition import Costs
    from svdq.pipeline.planning.capacity import VideoCosts

    return VideoCosts(steps=steps, costs=Costs(step_s=costs.step_s, encode_s=costs.encode_s, decode_s=costs.decode_s))


def shape_name(costs: "ShapeCosts") -> str:
    """Format a shape as options do: 1024x576x25."""
    return f"{costs.width}x{costs.height}x{costs.frames}"


def _cost_words(video: "VideoCosts", steps: int) -> str:
    from statistics import median

    costs = video.costs
    words = f"{steps} steps of {_milliseconds(median(costs.step_s))}"
    for name, seconds in (("encode", costs.encode_s), ("decode", costs.decode_s), ("hand-over", video.transfer_s)):
        if seconds:
            words += f", {name} {_milliseconds(seconds)}"
    return words


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds >= 1 else f"{seconds * 1000:.4g} ms"
