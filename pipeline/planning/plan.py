"""Answers a planning question: how many GPUs, how long, at what cost, and what else would help. Pure code."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from svdq.pipeline.bench.report import break_even
from svdq.pipeline.planning.capacity import Limit, Model, VideoCosts, Way, largest_useful, limit

#: Numbers of videos in the table of small and large runs.
RUN_SIZES = (1, 2, 5, 10, 50)
#: Largest number of GPUs used in "as much as N GPUs".
_MOST_GPUS = 512


@dataclass(frozen=True, kw_only=True)
class Question:
    """The work to be done, and the available resources."""

    #: Number of videos N.
    videos: int
    #: Seconds available; None without a deadline.
    deadline_s: float | None = None
    #: Number of GPUs; None: as many as were measured together, else as the deadline needs, else the largest useful
    #: group.
    gpus: int | None = None
    #: Price of a GPU hour in any currency.
    gpu_hour_price: float | None = None
    #: Power of a busy GPU, with its share of the machine.
    watts: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one way; names of fields are those of the JSON."""

    way: str
    gpus: int
    groups: int
    #: Seconds until the first video, between two of a group, and until all are done.
    first_s: float
    pace_s: float
    time_s: float
    videos_an_hour: float
    #: Whether it is done in time; None without a deadline.
    in_time: bool | None
    #: Total cost, cost per video and kWh per video; None without a price or power.
    cost_a_video: float | None
    cost: float | None
    kwh_a_video: float | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """A possible change instead of, or besides, buying GPUs."""

    #: The change, as the start of a sentence.
    what: str
    #: Seconds between two videos with it, and until all are done.
    pace_s: float
    time_s: float
    #: Factor by which the number of videos per hour grows.
    factor: float
    #: The smallest number of the present GPUs in one group with the same effect; None if there is none.
    as_gpus: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer."""

    question: Question
    #: Number of GPUs, and how they are used: one pipeline, or several groups if it would have too many ranks.
    gpus: int
    way: str
    #: One GPU, the pipeline, replicas, and what the deadline needs, without duplicates.
    rows: tuple[Row, ...]
    #: (N, seconds on one GPU, seconds by the way) for runs of different sizes.
    runs: tuple[tuple[int, float, float], ...]
    #: The number of videos from which the way is faster than one GPU; None if it never is.
    break_even: float | None
    #: The fewest GPUs that meet the deadline: in one group, as replicas, in the best groups. None: no number does, or
    #: there is no deadline.
    fewest_one_group: int | None
    fewest_replicas: int | None
    fewest: Row | None
    #: The limit of a group of the way, and the largest useful number of ranks with its reason. None if only a pace is
    #: known.
    limit: Limit | None
    largest_useful: int | None
    largest_useful_because: Limit | None
    #: The cost of unequal speeds: the gain in pace if all GPUs were as fast as the fastest.
    lost_to_slower: float | None
    #: What else would help, from `changes`.
    changes: tuple[Change, ...]


def make_plan(model: Model, question: Question) -> Plan:
    """Answer a planning question.

    Args:
        model: what groups can do.
        question: the work to be done.
    """
    one = model.way(1)
    fewest = _fewest(model, question)
    gpus = question.gpus or model.measured_ranks or (fewest.gpus if fewest is not None else model.group_sizes[-1])
    best = _best(model, gpus, question.videos)
    way = model.way(gpus) if gpus in model.group_sizes else best
    ways = [one, way, model.way(1, gpus), *([fewest] if fewest is not None else [])]
    video = model if isinstance(model, VideoCosts) else None
    useful = largest_useful(video) if video is not None else None
    return Plan(
        question=question,
        gpus=gpus,
        way=way.name,
        rows=tuple(_row(row, question) for row in {(row.groups, row.ranks): row for row in ways}.values()),
        runs=tuple((size, one.time_s(size), way.time_s(size)) for size in sorted({*RUN_SIZES, question.videos})),
        break_even=break_even(way.first_s, way.pace_s / way.groups, one.first_s, one.pace_s),
        fewest_one_group=_fewest_in_one(model, question),
        fewest_replicas=one.groups_needed(question.videos, question.deadline_s) if question.deadline_s else None,
        fewest=_row(fewest, question) if fewest is not None else None,
        limit=limit(video, way.ranks) if video is not None else None,
        largest_useful=useful[0] if useful is not None else None,
        largest_useful_because=useful[1] if useful is not None else None,
        lost_to_slower=_lost_to_slower(video, way.ranks) if video is not None else None,
        changes=changes(video, way, question.videos) if video is not None else (),
    )


def changes(video: VideoCosts, before: Way, num_videos: int) -> tuple[Change, ...]:
    """Compare another GPU with cheaper steps and a faster decode, best first, and then with a smaller size.

    Half the pixels come last, since they make a different video. They are assumed to halve all costs; the gain is at
    least that, since attention grows faster than the number of pixels.
    """
    size = (before.ranks, before.groups)
    more = video.way(before.ranks + 1) if before.groups == 1 else _best(video, before.gpus + 1, num_videos)
    options = [
        ("One more GPU", more),
        ("Halving the time of a step (lower precision, a compiled model)", video.scaled(step=0.5).way(*size)),
    ]
    if video.costs.decode_s:
        options.append(("Halving the time of the decode", video.scaled(decode=0.5).way(*size)))
    options.sort(key=lambda option: option[1].pace_s / option[1].groups)
    options.append(("Half the pixels", video.scaled(step=0.5, encode=0.5, decode=0.5, transfer=0.5).way(*size)))
    return tuple(
        Change(
            what=what,
            pace_s=way.pace_s / way.groups,
            time_s=way.time_s(num_videos),
            factor=way.videos_an_hour / before.videos_an_hour,
            as_gpus=_as_gpus(video, before.ranks, way.pace_s) if before.groups == 1 else None,
        )
        for what, way in options
    )


def _row(way: Way, question: Question) -> Row:
    time_s = way.time_s(question.videos)
    gpu_hours = way.gpus * time_s / 3600
    price, watts = question.gpu_hour_price, question.watts
    return Row(
        way=way.name,
        gpus=way.gpus,
        groups=way.groups,
        first_s=way.first_s,
        pace_s=way.pace_s,
        time_s=time_s,
        videos_an_hour=way.videos_an_hour,
        in_time=None if question.deadline_s is None else time_s <= question.deadline_s,
        cost_a_video=None if price is None else gpu_hours * price / question.videos,
        cost=None if price is None else gpu_hours * price,
        kwh_a_video=None if watts is None else gpu_hours * watts / 1000 / question.videos,
    )


def _fewest(model: Model, question: Question) -> Way | None:
    """Return the groups with the fewest GPUs that meet the deadline; among equals, the fastest."""
    if question.deadline_s is None:
        return None
    ways = []
    for ranks in model.group_sizes:
        needed = model.way(ranks).groups_needed(question.videos, question.deadline_s)
        if needed is not None:
            ways.append(model.way(ranks, needed))
    return min(ways, key=lambda way: (way.gpus, way.time_s(question.videos)), default=None)


def _fewest_in_one(model: Model, question: Question) -> int | None:
    if question.deadline_s is None:
        return None
    sizes: Sequence[int] = model.group_sizes
    return next((ranks for ranks in sizes if model.way(ranks).time_s(question.videos) <= question.deadline_s), None)


def _best(model: Model, gpus: int, num_videos: int) -> Way:
    """Return the equal groups of `gpus` GPUs in total that finish first; among equals, the fewest groups."""
    ways = [model.way(ranks, gpus // ranks) for ranks in model.group_sizes if gpus % ranks == 0]
    return min(ways, key=lambda way: (way.time_s(num_videos), way.groups))


def _lost_to_slower(video: VideoCosts, gpus: int) -> float:
    costs = video.on(gpus)
    equal = replace(video, costs=replace(costs, step_s=(min(costs.step_s),)))
    return 1 - equal.way(gpus).pace_s / video.way(gpus).pace_s


def _as_gpus(video: VideoCosts, gpus: int, pace_s: float) -> int | None:
    """Return the smallest group that is as fast, by bisection: a larger group is never slower."""
    if video.way(_MOST_GPUS).pace_s > pace_s * (1 + 1e-9):
        return None
    low, high = gpus, _MOST_GPUS
    while low < high:
        middle = (low + high) // 2
        if video.way(middle).pace_s <= pace_s * (1 + 1e-9):
            high = middle
        else:
            low = middle + 1
    return low
