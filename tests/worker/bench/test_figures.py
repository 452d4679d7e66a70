"""The arithmetic behind `svdq bench`, on known times."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdq.pipeline.errors import SvdqError
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.trace import Span
from svdq.worker.bench.figures import (
    RankMeasurements,
    busy_share,
    check_failures,
    make_bursts,
    make_run,
    measured_costs,
    steady_part,
    work_rate,
)


def log(
    *, finished_s: list[float] | None = None, spans: list[tuple[str, str, float, float]] | None = None
) -> RankMeasurements:
    return RankMeasurements(
        spans=[Span(*span) for span in spans or ()], finished_s=finished_s or [], failures=[], rss_mb=5.0
    )


def test_steady_state_leaves_the_warm_up_out_and_sees_through_turns() -> None:
    # Four, three, four, three ... steps of 1 s: single intervals differ, the pace over two videos does not.
    finished_s = [100.0, 150.0]
    for number in range(10):
        finished_s.append(finished_s[-1] + (4 if number % 2 else 3))
    finished_s += [200.0]
    logs = [log(spans=[("encode", "a", 0.0, 1.0), ("steps 0-6", "a", 1.0, 190.0)]), log(finished_s=finished_s)]
    costs = Costs(step_s=(1.0, 1.0))
    run = make_run(logs, VideoCosts(steps=7, costs=costs), 1)
    assert run.per_sample_s == run.per_sample_p95_s == pytest.approx(3.5)


def test_busy_share_counts_the_work_within_the_period_once() -> None:
    spans = [
        ("encode", "b", 1.5, 1.6),
        ("steps 0-1", "a", 0.0, 2.0),
        ("steps 0-1", "b", 3.0, 5.0),
        ("write", "c", 2, 3),
    ]
    assert busy_share([Span(*span) for span in spans], 1.0, 4.0) == pytest.approx(2 / 3)


def test_efficiency_is_the_ideal_time_over_the_measured_one() -> None:
    finished_s = [10.0 + 4.0 * number for number in range(12)]
    logs = [
        log(spans=[("encode", "-", 0.0, 0.2), ("encode", "a", 10.0, 12.0), ("steps 0-6", "a", 12.0, 34.0)]),
        log(finished_s=finished_s, spans=[("steps 7-13", "a", 10.0, 32.0), ("write", "a", 10.0, 54.0)]),
    ]
    run = make_run(logs, VideoCosts(steps=14, costs=Costs(step_s=(0.5, 0.5), encode_s=0.2)), 0)
    # 14 steps and an encode in the 44 s from the first video to the last.
    assert run.per_sample_mean_s == pytest.approx(44)
    assert run.efficiency == pytest.approx(7.2 / 2 / 44)
    assert run.first_sample_s == 10.0
    assert run.busy_share == pytest.approx([24 / 44, 22 / 44])
    assert run.steps_per_rank == pytest.approx([7 / 12, 7 / 12])


def test_figures_that_cannot_be_are_errors_and_those_that_disagree_say_so() -> None:
    costs = Costs(step_s=(0.5, 0.5))
    spans = [("encode", "a", 0.0, 0.0), ("steps 0-3", "a", 0.0, 2.0), ("encode", "b", 20.0, 20.0)]
    logs = [log(spans=spans), log(finished_s=[2.0, 12.0, 22.0, 32.0], spans=[("steps 4-7", "a", 2.0, 4.0)])]
    assert make_run(logs, VideoCosts(steps=8, costs=costs), 0).doubt.endswith("by the work done: -72.2%.")
    with pytest.raises(SvdqError, match="The trace has 8 steps of a in place of 9"):
        make_run(logs, VideoCosts(steps=9, costs=costs), 0)
    logs = [log(spans=[*spans[:1], ("steps 0-3", "a", 0.0, 20.0)]), log(finished_s=[0.0, 1.0, 2.0, 3.0])]
    with pytest.raises(SvdqError, match=r"efficiency came out as .* a step took 5000 ms on average, and counts 5e\+04"):
        make_run(logs, VideoCosts(steps=4, costs=Costs(step_s=(50.0, 50.0))), 0)


def test_the_ideal_of_bound_ranks_is_the_pace_of_the_slower_expert() -> None:
    spans = [("encode", "a", 0.0, 1.0), ("steps 0-14", "a", 1.0, 16.0), ("encode", "b", 60.0, 61.0)]
    logs = [log(spans=spans), log(finished_s=[10.0, 40.0, 70.0], spans=[("steps 15-39", "a", 10.0, 60.0)])]
    costs = Costs(step_s=(1.0, 1.0), encode_s=1.0)
    runs = [make_run(logs, VideoCosts(steps=40, costs=costs, segments=segments), 0) for segments in (None, (15, 25))]
    assert runs[1].per_sample_mean_s == runs[0].per_sample_mean_s
    assert runs[1].efficiency / runs[0].efficiency == pytest.approx(25 / (41 / 2))


def test_work_counts_from_the_first_videos_to_the_last_admission() -> None:
    costs = Costs(step_s=(1.0, 1.0), encode_s=0.5, decode_s=2.0)
    logs = [
        log(
            finished_s=[2.5, 6.5],
            spans=[("encode", "a", 0.0, 0.5), ("steps 0-3", "a", 0.5, 4.5), ("encode", "b", 6.0, 6.5)],
        ),
        log(spans=[("decode", "a", 4.5, 6.5), ("steps 0-3", "b", 6.5, 12.5)]),
    ]
    # From 2.5 to 6: two steps, and three quarters of a decode.
    assert work_rate(logs, costs, *steady_part(logs, 0)) == pytest.approx((2 + 1.5) / 3.5)
    # All admitted before: to the end.
    assert work_rate(logs, costs, *steady_part(logs, 1)) == pytest.approx(4 / 6)


@given(st.lists(st.lists(st.floats(0.001, 10.0), min_size=4, max_size=12), min_size=1, max_size=3))
def test_no_group_does_more_than_all_of_its_time_by_measured_costs(durations_s: list[list[float]]) -> None:
    """However times scatter, as on a machine that computes something else too."""
    logs = []
    for times_s in durations_s:
        ends_s = list(accumulate(times_s))
        spans = [("steps 0-1", "a", end_s - time_s, end_s) for end_s, time_s in zip(ends_s, times_s, strict=True)]
        logs.append(log(spans=spans))
    end_s = min(log.spans[-1].end_s for log in logs)
    costs = measured_costs(logs, 0.3 * end_s, end_s)
    assert work_rate(logs, costs, 0.3 * end_s, end_s) <= len(logs) * (1 + 1e-9)


def test_a_step_costs_the_harmonic_mean_of_the_ranks() -> None:
    # In 6 s, the ranks do 6 + 3 + 2 steps: 11 steps take as long as on three ranks of 18/11 s.
    costs = Costs(step_s=(1.0, 2.0, 3.0), encode_s=0.5, decode_s=2.5)
    assert VideoCosts(steps=11, costs=costs).video_s(3) == pytest.approx(18 + 3)


def encodes(*starts_s: float) -> list[tuple[str, str, float, float]]:
    return [("encode", "", start_s, start_s + 0.1) for start_s in starts_s]


def test_bursts_are_compared_with_the_shortest_possible_time() -> None:
    logs = [log(spans=encodes(1.0, 1.5, 7.0)), log(finished_s=[5.0, 6.0, 9.0])]
    costs = Costs(step_s=(0.5, 0.5), encode_s=0.1, decode_s=0.4)
    video = VideoCosts(steps=3, costs=costs)
    first, second = make_bursts(logs, video, [2, 1])
    assert (first.videos, first.is_first, first.wall_s, first.replicas_s) == (2, True, 5.0, pytest.approx(2.0))
    assert first.bound_s == second.bound_s == pytest.approx(2.0)
    assert (first.ratio, first.pipeline_over_replicas) == pytest.approx((2.5, 2.5))
    assert (second.ratio, second.is_first, second.pipeline_over_replicas) == pytest.approx((1.0, False, 1.0))
    (large,) = make_bursts(logs, video, [3])
    assert (large.bound_s, large.replicas_s) == pytest.approx((3.0, 4.0))


def test_a_failed_video_is_an_error() -> None:
    failed = RankMeasurements(**{**vars(log()), "failures": ["it is bad"]})
    with pytest.raises(SvdqError, match="1 of the videos failed; the first one: it is bad"):
        check_failures([log(), failed])
