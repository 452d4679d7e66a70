"""The capacity law: against figures worked out by hand, and properties that any plan must have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdq.pipeline.planning.binding import Segment, bind
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import CostPrior, Costs

#: SVD-XT at 576x1024x25 on an H100: W = 22.623 s.
H100 = VideoCosts(steps=25, costs=Costs(step_s=(0.764,), encode_s=0.140, decode_s=3.383))


#: Two experts of 15 and 25 steps of 5 s: W = 206 s.
EXPERTS = VideoCosts(steps=40, costs=Costs(step_s=(5.0,), encode_s=1.0, decode_s=5.0), segments=(15, 25))


def video(steps: int = 25, *step_s: float, encode_s: float = 0.0, decode_s: float = 0.0) -> VideoCosts:
    return VideoCosts(steps=steps, costs=Costs(step_s=step_s or (0.05,), encode_s=encode_s, decode_s=decode_s))


@pytest.mark.parametrize(
    ("num_videos", "pipeline_s", "replicas_s"),
    [(1, 22.623, 22.623), (7, 22.623, 22.623), (8, 25.855, 45.246), (10, 32.319, 45.246), (50, 161.593, 180.984)],
)
def test_small_and_large_runs_on_seven(num_videos: int, pipeline_s: float, replicas_s: float) -> None:
    assert H100.time_s(7, num_videos) == pytest.approx(pipeline_s, abs=0.01)
    assert H100.replicas_time_s(7, num_videos) == pytest.approx(replicas_s, abs=0.01)


def test_unequal_gpus_share_the_steps_by_their_speeds() -> None:
    model = video(28, 0.05, 0.05, 0.075, 0.05)
    # Three GPUs make 20 steps a second each and one 13.3, together 73.3.
    assert model.pace_s(4) == pytest.approx(28 / (3 * 20 + 1 / 0.075))
    assert model.pace_s(3) == pytest.approx(28 * 0.05 / 3)  # goes without the slow one
    assert model.step_s(5) == pytest.approx(5 / (4 * 20 + 1 / 0.075))  # another one like most


def test_encode_and_decode_are_shared_out_as_the_steps_are() -> None:
    model = video(9, 0.1, encode_s=0.1)
    assert [model.pace_s(ranks) for ranks in (1, 2, 10, 20)] == pytest.approx([1.0, 0.5, 0.1, 0.05])


def test_ranks_of_one_expert_wait_for_those_of_the_slower_one() -> None:
    assert EXPERTS.division(7) == (3, 4)
    assert EXPERTS.pace_s(7) == pytest.approx(130 / 4)
    assert EXPERTS.pace_s(2) == pytest.approx(130)
    # The second experts wait for the first video; the last one is there when they have made the others.
    assert EXPERTS.time_s(7, 50) == pytest.approx(76 + 50 * 130 / 4)
    assert EXPERTS.time_s(7, 1) == pytest.approx(206)
    assert EXPERTS.time_s(1, 2) == pytest.approx(2 * 206)


@given(st.integers(2, 12), st.integers(1, 40), st.integers(1, 40), st.floats(0, 5), st.floats(0, 9))
def test_ranks_are_divided_as_a_worker_binds_them(
    ranks: int, first: int, second: int, encode_steps: float, decode_steps: float
) -> None:
    costs = Costs(step_s=(2.0,), encode_s=2 * encode_steps, decode_s=2 * decode_steps)
    model = VideoCosts(steps=first + second, costs=costs, segments=(first, second))
    segments = [Segment(component="a", start=0, stop=first), Segment(component="b", start=first, stop=first + second)]
    held = bind(segments, [False] * ranks, CostPrior(encode_steps=encode_steps, decode_steps=decode_steps))
    number = held.count(frozenset("a"))
    work = first + encode_steps, second + decode_steps
    slowest = max(work[0] / number, work[1] / (ranks - number))
    assert model.pace_s(ranks) == pytest.approx(2 * slowest)
