"""Where `svdq plan` and `svdq advise` take the costs of a video from: options, a recording, or a live group."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from svdq.pipeline.planning.capacity import GivenPace, VideoCosts
    from svdq.producer.status.ranks import ShapeCosts


@dataclass(frozen=True, kw_only=True)
class CostOptions:
    """The options that say what a video costs; units are in the names. None where an option was left out."""

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
    #: GPUs that fill_s and pace_s are those of.
    gpus: int | None
    redis_url: str | None


def model_of(options: CostOptions) -> "tuple[VideoCosts | GivenPace, str]":
    """Make a model out of the one way in which costs were given, and say which.

    Raises:
        InputError: they were given in no way or in several, or a recording or a group has none.
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
            "Say what a video costs in one way: --from FILE, --from live, --step-ms, or --one-gpu-s with --fill-s and "
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
        f"As given: {one_gpu_s:g} s a video on one GPU; the first one of {gpus} GPUs after {fill_s:g} s, then one "
        f"every {pace_s:g} s."
    )


def live_costs(redis_url: str | None, shape: str | None, steps: int) -> "tuple[VideoCosts, str]":
    """Take what a live group has measured of a shape, and say of which.

    Raises:
        InputError: no group is there that has measured it.
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
    """Turn what a group tells of a shape into costs of a video of so many steps."""
    from svdq.pipeline.partition import Costs
    from svdq.pipeline.planning.capacity import VideoCosts

    return VideoCosts(steps=steps, costs=Costs(step_s=costs.step_s, encode_s=costs.encode_s, decode_s=costs.decode_s))


def shape_name(costs: "ShapeCosts") -> str:
    """Write a shape as options do: 1024x576x25."""
    return f"{costs.width}x{costs.height}x{costs.frames}"


def _cost_words(video: "VideoCosts", steps: int) -> str:
    from statistics import median

    costs = video.costs
    words = f"{steps} steps of {median(costs.step_s) * 1000:.4g} ms"
    for name, seconds in (("encode", costs.encode_s), ("decode", costs.decode_s), ("hand-over", video.transfer_s)):
        if seconds:
            words += f", {name} {seconds * 1000:.4g} ms"
    return words
