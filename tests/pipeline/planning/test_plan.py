"""The answers of a plan: what is enough is enough, and one GPU less is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdq.pipeline.partition import Costs
from svdq.pipeline.planning.capacity import GivenPace, Limit, VideoCosts
from svdq.pipeline.planning.chart import draw_plan
from svdq.pipeline.planning.plan import Question, make_plan

H100 = VideoCosts(steps=25, costs=Costs(step_s=(0.764,), encode_s=0.140, decode_s=3.383))


@given(st.integers(1, 2000), st.floats(20, 40_000), st.floats(0, 4), st.integers(1, 30))
def test_the_fewest_gpus_for_a_deadline(num_videos: int, deadline_s: float, decode_s: float, steps: int) -> None:
    model = VideoCosts(steps=steps, costs=Costs(step_s=(0.764,), decode_s=decode_s))
    found = make_plan(model, Question(videos=num_videos, deadline_s=deadline_s))
    if model.way(1).first_s > deadline_s:
        assert found.fewest is found.fewest_replicas is found.fewest_one_group is None
        return
    assert found.fewest is not None
    assert found.fewest.in_time
    for gpus in {found.fewest.gpus - 1} - {0}:
        ways = [model.way(ranks, gpus // ranks) for ranks in model.group_sizes if gpus % ranks == 0]
        assert min(way.time_s(num_videos) for way in ways) > deadline_s
    if found.fewest_one_group is not None:
        assert model.way(found.fewest_one_group).time_s(num_videos) <= deadline_s
    assert found.fewest.gpus <= (found.fewest_replicas or 0)


def test_cost_and_energy() -> None:
    found = make_plan(H100, Question(videos=100, gpus=7, gpu_hour_price=2.0, watts=500.0))
    one, pipeline, replicas = found.rows
    assert (one.gpus, pipeline.gpus, replicas.gpus, replicas.groups) == (1, 7, 7, 7)
    assert one.cost == pytest.approx(100 * 22.623 / 3600 * 2.0)
    assert pipeline.cost == pytest.approx(7 * (22.623 + 99 * 3.383) / 3600 * 2.0)
    assert pipeline.cost_a_video == pytest.approx((pipeline.cost or 0) / 100)
    assert one.kwh_a_video == pytest.approx(22.623 / 3600 * 0.5)
    assert (found.limit, found.largest_useful) == (Limit.DECODE, 7)


def test_with_more_gpus_than_a_group_can_use_there_are_several_groups() -> None:
    found = make_plan(H100, Question(videos=5000, gpus=16))
    assert found.way == "8 groups of 2" or found.way == "16 replicas"
    by_what = {change.what.split()[0]: change for change in found.changes}
    assert by_what["One"].factor == pytest.approx(17 / 16, rel=0.01)


def test_cheaper_steps_against_another_gpu() -> None:
    model = VideoCosts(steps=28, costs=Costs(step_s=(0.15,)))
    cheaper, more, smaller = make_plan(model, Question(videos=500, gpus=7)).changes
    assert cheaper.what.startswith("Halving the time of a step")
    assert (cheaper.factor, cheaper.as_gpus) == (pytest.approx(2.0), 14)
    assert (more.what, more.factor, more.as_gpus) == ("One more GPU", pytest.approx(8 / 7), 8)
    assert smaller.what == "Half the pixels"
    # Where the decode is all that counts, neither cheaper steps nor GPUs do anything.
    first, *others = make_plan(H100, Question(videos=500, gpus=7)).changes
    assert first.what == "Halving the time of the decode"
    assert [round(change.factor, 2) for change in others[:2]] == [1.0, 1.0]


def test_unequal_gpus_are_told() -> None:
    model = VideoCosts(steps=28, costs=Costs(step_s=(0.05, 0.1)))
    found = make_plan(model, Question(videos=10))
    assert found.gpus == 2
    assert found.lost_to_slower == pytest.approx(1 - 28 * 0.05 / 2 / (28 / 30))


@pytest.mark.parametrize("model", [H100, GivenPace(ranks=7, one_gpu_s=31.96, fill_s=35.30, pace_s=4.39)])
@pytest.mark.parametrize("deadline_s", [None, 3600.0])
def test_the_picture(model, deadline_s, tmp_path) -> None:
    draw_plan(model, make_plan(model, Question(videos=500, deadline_s=deadline_s)), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
