"""The plan: every rank busy for any number of videos, whatever encode, steps and decode cost."""

import itertools
import math
import random
from collections.abc import Sequence
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.pipeline.planning.blocks import Row, common_end_s
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.planning.planner import LEAD_S, MIN_STAGE_S, Planner
from tests.pipeline.chain import Chain, Video

RANKS = 7


def costs_of(step_s: float, encode_s: float, decode_s: float, speeds: Sequence[float] = (1.0,) * RANKS) -> Costs:
    """Return the costs on ranks of these relative speeds."""
    return Costs(step_s=tuple(step_s / speed for speed in speeds), encode_s=encode_s, decode_s=decode_s)


def run(num_videos: int, costs: Costs, num_steps: int = 25) -> tuple[float, list[Video], Chain]:
    """Make videos that all wait from the start; return the wall time and what became of them."""
    num_ranks = len(costs.step_s)
    chain = Chain(Planner(num_ranks), num_ranks)
    videos = [Video(costs=costs, num_steps=num_steps) for _ in range(num_videos)]
    return chain.run(videos), videos, chain


def bound_s(num_videos: int, costs: Costs, num_steps: int) -> float:
    """Return what no schedule undercuts on ranks that are as fast as the fastest here where a video is alone."""
    row = Row.of(costs, [1.0] * num_steps)
    alone_s = row.upto_s[-1] * min(row.slowness)
    return max(common_end_s([0.0] * len(row.slowness), row.slowness, num_videos * row.upto_s[-1]), alone_s)


def boundaries_of(video: Video) -> tuple[int, ...]:
    assert video.boundaries is not None
    return video.boundaries


def loads(video: Video) -> list[int]:
    return [later - earlier for earlier, later in itertools.pairwise(boundaries_of(video))]


def rank_of(video: Video, unit: int) -> int:
    return next(rank for rank, stop in enumerate(boundaries_of(video)[1:]) if unit < stop)


@pytest.mark.parametrize(
    ("num_steps", "step_ms", "encode_ms", "decode_ms", "most"),
    [
        (25, 50, 9, 220, 1.05),
        (25, 400, 72, 1760, 1.05),
        (25, 76, 14, 338, 1.05),
        (25, 50, 9, 150, 1.02),  # with an upscaler in the last unit, which then takes three steps
        (4, 104, 126, 88, 1.09),
        (4, 1040, 1260, 880, 1.09),
    ],
)
def test_any_number_of_videos_takes_hardly_longer_than_the_bound(
    num_steps: int, step_ms: float, encode_ms: float, decode_ms: float, most: float
) -> None:
    costs = costs_of(step_ms / 1000, encode_ms / 1000, decode_ms / 1000)
    for num_videos in [*range(1, 31), 35, 50]:
        wall_s, _, _ = run(num_videos, costs, num_steps)
        assert wall_s <= most * bound_s(num_videos, costs, num_steps), num_videos


@pytest.mark.parametrize("num_videos", [1, 7, 8, 20, 40])
@pytest.mark.parametrize("decode_s", [0.04, 0.15, 0.37])
def test_finished_videos_are_upscaled_on_all_ranks(num_videos: int, decode_s: float) -> None:
    costs = costs_of(0.05, 0.009, decode_s)
    videos = [Video(costs=costs, num_steps=25, first_unit=26) for _ in range(num_videos)]
    wall_s = Chain(Planner(RANKS), RANKS).run(videos)
    assert wall_s <= 1.001 * math.ceil(num_videos / RANKS) * decode_s


@pytest.mark.parametrize(
    ("num_steps", "step_s", "encode_s", "decode_s"),
    [(25, 0.076, 0.014, 0.338), (25, 0.054, 0.014, 0.338), (25, 0.03, 0.014, 0.338), (4, 0.104, 0.126, 0.088)],
)
def test_an_encode_or_decode_longer_than_a_share_leaves_no_rank_idle(
    num_steps: int, step_s: float, encode_s: float, decode_s: float
) -> None:
    _, videos, _ = run(80, costs_of(step_s, encode_s, decode_s), num_steps)
    ideal_s = (num_steps * step_s + encode_s + decode_s) / RANKS
    finished_s = sorted(video.finished_s for video in videos)
    assert (finished_s[60] - finished_s[20]) / 40 <= ideal_s / 0.98
    for unit, seconds in ((0, encode_s), (num_steps + 1, decode_s)):
        ranks = [rank_of(video, unit) for video in videos[20:60]]
        assert all(ranks.count(rank) <= max(40 * ideal_s / seconds, 0) + 2 for rank in range(RANKS))


def test_very_short_steps_stay_together_while_many_videos_wait() -> None:
    costs = costs_of(0.001, 0.0002, 0.0004)
    wall_s, videos, _ = run(200, costs, num_steps=28)
    for video in videos[: 200 - 2 * RANKS]:
        assert rank_of(video, 0) == rank_of(video, 28), "shares of 4 ms are too short to hand samples over for"
        assert rank_of(video, 29) == RANKS - 1, "frames of a cheap decode travel no further than they must"
    assert wall_s <= 1.06 * 200 * (28 * 0.001 + 0.0006) / RANKS


#: 40 steps as MagCache skips 17 of them, and a model whose last steps are larger.
SKIPPED = [float(character == "X") for character in "XXXXXXXX..X..X..X..X..X..X..X..X.XXXXXXX"]
LARGER = [1.0] * 15 + [4.0] * 3


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
@pytest.mark.parametrize("steps", [SKIPPED, LARGER], ids=["skipped", "larger"])
def test_steps_of_unequal_costs_take_hardly_longer_than_the_bound(steps: list[float], num_ranks: int) -> None:
    costs = costs_of(0.02, 0.01, 0.03, [1.0] * num_ranks)
    row = Row.of(costs, steps)
    for num_videos in [*range(1, 21), 50]:
        videos = [Video(costs=costs, num_steps=len(steps), steps=steps) for _ in range(num_videos)]
        wall_s = Chain(Planner(num_ranks), num_ranks).run(videos)
        work_s = row.upto_s[-1]
        assert wall_s <= 1.06 * max(work_s, num_videos * work_s / num_ranks), num_videos


#: Skipped steps of A14B at 0.06.
SKIPPED_BY_CURVE = [float(character == "X") for character in "XXX..X..X..X..XXXXXX..X..X..X.X.X.XXXXXX"]


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
@pytest.mark.parametrize("steps", [SKIPPED, SKIPPED_BY_CURVE], ids=["evenly", "by curve"])
def test_skipped_steps_cost_a_burst_nothing(steps: list[float], num_ranks: int) -> None:
    """No schedule of whole computed steps ends earlier."""
    costs, computed = costs_of(0.02, 0.0, 0.0, [1.0] * num_ranks), sum(steps)
    for num_videos in [*range(1, 31), 50]:
        videos = [Video(costs=costs, num_steps=len(steps), steps=steps) for _ in range(num_videos)]
        wall_s = Chain(Planner(num_ranks), num_ranks).run(videos)
        assert wall_s == pytest.approx(0.02 * max(computed, math.ceil(num_videos * computed / num_ranks))), num_videos


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_video_is_cut_before_computed_steps_only(data: st.DataObject) -> None:
    """`Chain` asserts it; bound ranks and videos that resume, too."""
    num_ranks = data.draw(st.integers(1, 8))
    step_costs = st.sampled_from([0.0, 0.0, 0.5, 1.0, 5.0])
    videos = []
    for _ in range(12):
        steps = [1.0, *data.draw(st.lists(step_costs, max_size=30))]
        costs = costs_of(data.draw(st.floats(1e-4, 0.1)), 0.01, data.draw(st.floats(0, 0.1)), [1.0] * num_ranks)
        cuts = Row.of(costs, steps).cuts(0)
        cut, end = data.draw(st.sampled_from(cuts[1:])), len(steps) + 2
        bounds = [(0, cut)] * (num_ranks // 2) + [(cut, end)] * (num_ranks - num_ranks // 2)
        if num_ranks == 1 or data.draw(st.booleans()):
            bounds = None
        first_unit = data.draw(st.sampled_from(cuts))
        videos.append(Video(costs=costs, num_steps=len(steps), steps=steps, bounds=bounds, first_unit=first_unit))
    Chain(Planner(num_ranks), num_ranks).run(videos)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_steps_that_stay_together_are_done_once_and_in_about_the_same_time(data: st.DataObject) -> None:
    num_ranks, num_steps = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 60))
    costs = costs_of(data.draw(st.floats(1e-4, 0.03)), 0, data.draw(st.floats(0, 0.1)), [1.0] * num_ranks)
    units = st.integers(0, num_steps + 1)
    videos = [Video(costs=costs, num_steps=num_steps, first_unit=data.draw(units)) for _ in range(30)]
    wall_s = Chain(Planner(num_ranks), num_ranks).run(videos)
    row = Row.of(costs, [1.0] * num_steps)
    left_s = 0.0
    for video in videos:
        boundaries = boundaries_of(video)
        assert (boundaries[0], boundaries[-1]) == (video.first_unit, num_steps + 2)
        left_s += row.seconds(0, video.first_unit, num_steps + 2)
    assert wall_s <= max(left_s / num_ranks, row.upto_s[-1]) + row.upto_s[-1] + 2 * MIN_STAGE_S


@pytest.mark.parametrize("slow", range(RANKS))
def test_a_rank_that_is_slower_gets_less(slow: int) -> None:
    speeds = [1 / 1.5 if rank == slow else 1.0 for rank in range(RANKS)]
    wall_s, _, _ = run(80, costs_of(50, 9, 220, speeds))
    ideal_s = 80 * (25 * 50 + 9 + 220) / sum(speeds)
    assert ideal_s / wall_s >= 0.97


def test_a_decode_of_more_than_a_share_is_not_left_to_a_slow_last_rank() -> None:
    costs = costs_of(1.0, 0.0, 0.7, [1.0, 0.67, 1.0, 1.0, 1.0, 0.67, 0.5, 0.5])
    wall_s, _, _ = run(39, costs, 2)
    assert wall_s <= 1.4 * bound_s(39, costs, 2)


@given(
    num_videos=st.integers(1, 40),
    speeds=st.lists(st.sampled_from([1.0, 1.0, 0.8, 0.67, 0.5]), min_size=1, max_size=8),
    equal=st.booleans(),
    num_steps=st.integers(1, 50),
    encode_s=st.floats(0, 5),  # longer ones take up to a quarter more than the bound
    decode_s=st.floats(0, 20),
)
@settings(max_examples=80, deadline=None)
def test_the_bound_is_reached_within_six_steps_an_encode_and_a_decode(
    num_videos: int, speeds: list[float], equal: bool, num_steps: int, encode_s: float, decode_s: float
) -> None:
    """With unequal speeds also within what a video takes longer on the slowest rank."""
    speeds = [1.0] * len(speeds) if equal else speeds
    costs = costs_of(1.0, encode_s, decode_s, speeds)
    wall_s, _, chain = run(num_videos, costs, num_steps)
    slowness = Row.of(costs, [1.0]).slowness
    slowest, fastest = max(slowness), min(slowness)
    slack_s = slowest * (6 + encode_s + decode_s) + (num_steps + encode_s + decode_s) * (slowest - fastest)
    assert wall_s <= bound_s(num_videos, costs, num_steps) + median(costs.step_s) * slack_s + 1e-6
    assert chain.most_in_flight <= 3 * len(speeds) + 4


@given(st.integers(2, 8), st.integers(2, 50), st.floats(0, 3), st.floats(0, 20))
@settings(max_examples=15, deadline=None)
def test_over_a_run_every_rank_has_its_share(num_ranks: int, num_steps: int, encode_s: float, decode_s: float) -> None:
    """Of videos of a single step, seven ranks and more lose a tenth: a rank gets fewer."""
    costs = costs_of(1.0, encode_s, decode_s, [1.0] * num_ranks)
    row = Row.of(costs, [1.0] * num_steps)
    _, videos, _ = run(20 * num_ranks, costs, num_steps)
    given_s = [0.0] * num_ranks
    # In the middle: neither while ranks begin nor while they end.
    for video in videos[5 * num_ranks : 15 * num_ranks]:
        for rank, (start, stop) in enumerate(itertools.pairwise(boundaries_of(video))):
            given_s[rank] += row.seconds(rank, start, stop)
    for rank_s in given_s:
        assert abs(rank_s - 10 * row.upto_s[-1]) <= 4 * (1 + decode_s + encode_s) + 1e-6


def test_a_video_that_comes_alone_starts_at_once_and_never_waits() -> None:
    one_ms = 25 * 50 + 9 + 220
    videos = [Video(costs=costs_of(50, 9, 220), num_steps=25, queued_s=number * 0.4 * one_ms) for number in range(20)]
    Chain(Planner(RANKS), RANKS).run(videos)
    for video in videos:
        assert video.finished_s - video.queued_s == pytest.approx(one_ms)


@pytest.mark.parametrize("seed", range(6))
def test_videos_that_trickle_in_or_differ_take_as_long_as_with_replicas(seed: int) -> None:
    rng = random.Random(seed)
    costs = costs_of(1, 0.2, 4.4)
    videos = []
    for queued_s in sorted(rng.uniform(0, 300) for _ in range(60)):
        num_steps = rng.choice([10, 25, 25, 50])
        first_unit = rng.choice([0, 0, 0, num_steps // 2, num_steps + 1])
        videos.append(Video(costs=costs, num_steps=num_steps, first_unit=first_unit, queued_s=queued_s))
    wall_s = Chain(Planner(RANKS), RANKS).run(videos)
    replicas_s = [0.0] * RANKS
    for video in videos:
        rank = replicas_s.index(min(replicas_s))
        work_s = Row.of(costs, [1.0] * video.num_steps).seconds(0, video.first_unit, video.num_steps + 2)
        replicas_s[rank] = max(replicas_s[rank], video.queued_s) + work_s
    assert wall_s <= 1.1 * max(replicas_s)


def test_a_job_is_taken_only_when_a_rank_can_start_it_soon() -> None:
    _, videos, _ = run(60, costs_of(50, 9, 220))
    for video in videos[RANKS:]:
        assert video.begun_s - video.taken_s <= 50 + 9 + 1e-6
    assert videos[40].taken_s > videos[20].finished_s, "late ones are taken late"


def row_of(num_ranks: int) -> Row:
    return Row.of(costs_of(1, 0.2, 4.4, [1.0] * num_ranks), [1.0] * 25)


def test_a_video_whose_steps_are_done_is_decoded_by_a_free_rank() -> None:
    planner = Planner(3)
    whole = planner.admit(0, row_of(3), shape=1, num_waiting=1, now=0.0)
    assert whole == (0, 0, 0, 27)
    assert planner.admit(1, row_of(3), shape=1, num_waiting=0, now=0.0, first_unit=26) == (26, 26, 27, 27)


def test_what_failed_or_was_canceled_no_longer_counts() -> None:
    planner = Planner(2)
    for index in range(2):
        planner.admit(index, row_of(2), shape=1, num_waiting=1 - index, now=0.0)
    assert planner.wait_s(10.0) == pytest.approx(0.2 + 25 + 4.4 - 10 - LEAD_S)
    planner.ended(0)
    assert planner.wait_s(10.0) == 0.0
    planner.finished(0, 1, 26, 11.0)


def test_a_rank_that_takes_longer_than_estimated_is_not_given_more() -> None:
    planner = Planner(1)
    planner.admit(0, row_of(1), shape=1, num_waiting=1, now=0.0)
    planner.finished(0, 0, 26, 50.0)
    assert planner.wait_s(50.0) == pytest.approx(4.4 - LEAD_S)


@pytest.mark.parametrize("guess", [0.02, 20.0])
def test_a_guess_of_the_costs_is_good_enough_until_the_first_video_is_done(guess: float) -> None:
    true, guessed = costs_of(1, 0.18, 4.4), costs_of(guess, 0.18 * guess, 4.4 * guess)
    videos = [Video(costs=true, num_steps=25) for _ in range(50)]
    chain = Chain(
        Planner(RANKS), RANKS, estimate=lambda _: true if min(video.finished_s for video in videos) < 1000 else guessed
    )
    assert chain.run(videos) <= 1.2 * 50 * 29.58 / RANKS
