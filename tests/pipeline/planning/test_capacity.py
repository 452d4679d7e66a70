"""The capacity model against figures that are known: the reference tables, and a pipeline played through by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdq.pipeline.errors import InputError
from svdq.pipeline.partition import Costs, Partitioner
from svdq.pipeline.planning.capacity import GivenPace, Limit, VideoCosts, largest_useful, limit
from svdq.pipeline.planning.plan import Question, make_plan

#: SVD-XT at 576x1024x25 on an H100.
H100 = VideoCosts(steps=25, costs=Costs(step_s=(0.764,), encode_s=0.140, decode_s=3.383))
REFERENCE = GivenPace(ranks=7, one_gpu_s=31.96, fill_s=35.30, pace_s=4.39)


def video(steps: int = 25, step_s: float = 0.05, **values: float) -> VideoCosts:
    costs = Costs(step_s=(step_s,), encode_s=values.pop("encode_s", 0.0), decode_s=values.pop("decode_s", 0.0))
    return VideoCosts(steps=steps, costs=costs, **values)


def played(costs: Costs, steps: int, num_videos: int) -> list[float]:
    """When each video is done: whole steps, each rank one video at a time, no other rule."""
    partitioner = Partitioner(len(costs.step_s))
    free_s = [0.0] * len(costs.step_s)
    done_s = []
    for _ in range(num_videos):
        boundaries = partitioner.split(0, steps, costs)
        now_s = 0.0
        for rank, step_s in enumerate(costs.step_s):
            work_s = costs.fixed_s[rank] + (boundaries[rank + 1] - boundaries[rank]) * step_s
            now_s = free_s[rank] = max(now_s, free_s[rank]) + work_s
        done_s.append(now_s)
    return done_s


@pytest.mark.parametrize(
    ("num_videos", "one_gpu_s", "seven_gpus_s"),
    [(1, 31.96, 35.30), (2, 63.92, 39.69), (5, 159.80, 52.86), (10, 319.60, 74.81), (50, 1598.00, 250.41)],
)
def test_the_reference_table_of_measured_paces(num_videos: int, one_gpu_s: float, seven_gpus_s: float) -> None:
    found = make_plan(REFERENCE, Question(videos=num_videos))
    assert {size: (one, many) for size, one, many in found.runs}[num_videos] == pytest.approx((one_gpu_s, seven_gpus_s))
    assert found.break_even == pytest.approx(1.12, abs=0.005)


@pytest.mark.parametrize(
    ("num_videos", "one_gpu_s", "seven_gpus_s"), [(1, 4.2, 4.2), (2, 8.4, 4.8), (5, 21.0, 6.6), (50, 210.0, 33.6)]
)
def test_28_steps_of_150_ms_on_seven(num_videos: int, one_gpu_s: float, seven_gpus_s: float) -> None:
    model = video(28, 0.150)
    assert model.way(1).time_s(num_videos) == pytest.approx(one_gpu_s)
    assert model.way(7).time_s(num_videos) == pytest.approx(seven_gpus_s)


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("steps", [7, 25, 50])
@pytest.mark.parametrize(("encode_s", "decode_s"), [(0.0, 0.0), (0.15, 0.1), (0.01, 0.22)])
def test_a_pipeline_that_is_played_through(ranks: int, steps: int, encode_s: float, decode_s: float) -> None:
    model = video(steps, encode_s=encode_s, decode_s=decode_s)
    done_s = played(model.on(ranks), steps, 200)
    way = model.way(ranks)
    assert done_s[0] == pytest.approx(way.first_s)
    # Single videos are late or early by a step, a run is not.
    assert done_s[-1] == pytest.approx(way.time_s(200), rel=0.02)
    assert (done_s[-1] - done_s[99]) / 100 == pytest.approx(way.pace_s, rel=0.02)


def test_unequal_gpus_are_played_through() -> None:
    model = VideoCosts(steps=28, costs=Costs(step_s=(0.05, 0.05, 0.075, 0.05), decode_s=0.1))
    done_s = played(model.costs, 28, 200)
    assert (done_s[-1] - done_s[99]) / 100 == pytest.approx(model.way(4).pace_s, rel=0.02)
    assert model.way(3).pace_s == pytest.approx((28 * 0.05 + 0.1) / 3)  # goes without the slow one
    assert model.way(5).pace_s < model.way(4).pace_s


def test_replicas_make_whole_videos() -> None:
    replicas = video(10, 1.0).way(1, 4)
    assert [replicas.time_s(number) for number in (1, 4, 5, 8, 9)] == pytest.approx([10, 10, 20, 20, 30])


@given(
    st.integers(1, 60),
    st.integers(1, 12),
    st.integers(1, 5),
    st.floats(0, 3),
    st.floats(0, 3),
    st.integers(1, 300),
)
def test_videos_and_times_are_each_others_inverse(
    steps: int, ranks: int, groups: int, encode_s: float, decode_s: float, num_videos: int
) -> None:
    way = video(steps, 0.3, encode_s=encode_s, decode_s=decode_s).way(ranks, groups)
    assert way.finished(way.time_s(num_videos)) >= num_videos
    assert way.finished(way.time_s(num_videos) - way.pace_s / 2) < num_videos
    each = way.groups_needed(num_videos, way.time_s(num_videos))
    assert each is not None
    assert each <= groups


@pytest.mark.parametrize(
    ("model", "ranks", "reason"),
    [
        (H100, 7, Limit.DECODE),
        (video(50), 50, Limit.STEPS),
        # 25 x 50 ms over 12 ranks is 104 ms, over 13 it is 96.
        (video(25, transfer_s=0.1), 13, Limit.TRANSFER),
        (video(25, encode_s=0.5), 4, Limit.ENCODE),
        # Two ranks: one of them decodes for as long as the other takes for all steps.
        (video(10, 0.1, decode_s=1.0), 2, Limit.DECODE),
        (video(1), 1, Limit.STEPS),
    ],
)
def test_the_largest_useful_group(model: VideoCosts, ranks: int, reason: Limit) -> None:
    assert largest_useful(model) == (ranks, reason)
    before_s, pace_s, after_s = (model.way(max(1, number)).pace_s for number in (ranks - 1, ranks, ranks + 1))
    assert ranks == 1 or pace_s < before_s
    if reason is not Limit.STEPS:
        assert after_s == pytest.approx(pace_s)
        assert limit(model, ranks + 1) is reason


def test_overhead_costs_every_rank_and_a_transfer_only_the_first_video() -> None:
    plain, slowed = video(28), video(28, overhead_s=0.01, transfer_s=0.02)
    assert slowed.way(7).pace_s == pytest.approx(plain.way(7).pace_s + 0.01)
    assert slowed.way(7).first_s == pytest.approx(plain.way(7).first_s + 7 * 0.01 + 6 * 0.02)
    assert slowed.way(1) == plain.way(1)


def test_a_pace_alone_says_nothing_of_other_groups() -> None:
    with pytest.raises(InputError, match="give --steps"):
        REFERENCE.way(3)
