"""When jobs will be done, worked out by hand for small cases."""

import pytest

from svdq.producer.status.eta import job_eta_s, queue_eta_s, trouble_of
from svdq.producer.status.ranks import GroupStatus, IntakeStatus, RankStatus, Trouble
from tests.producer.status.test_ranks import COSTS, rank

PARAMETERS = {"steps": 8, "frames": 2, "width": 64, "height": 64, "max_guidance_scale": 3.0}
#: The mean of a step on the two ranks of COSTS.
STEP_S = 0.375


def group(
    *, in_flight: tuple[str, ...] = (), pace_s: float | None = None, measured: bool = True, **rank_1
) -> GroupStatus:
    intake = IntakeStatus(worker="w", in_flight=in_flight, pace_s=pace_s, costs=(COSTS,) if measured else ())
    ranks: tuple[RankStatus, ...] = (rank(0, intake=intake), rank(1, **rank_1))
    return GroupStatus(name="here-1", ranks=ranks)


def test_a_job_in_flight_has_its_steps_and_the_decode_before_it() -> None:
    assert job_eta_s("a", PARAMETERS, 3, None, [group(in_flight=("a",))]) == pytest.approx(5 * STEP_S + 2.0)
    assert job_eta_s("a", PARAMETERS, 8, None, [group(in_flight=("a",))]) == pytest.approx(2.0)


def test_of_the_first_of_its_shape_only_the_steps_are_known() -> None:
    first = group(in_flight=("a",), measured=False, job_id="a", step_s=0.5)
    assert job_eta_s("a", PARAMETERS, 3, None, [first]) == pytest.approx(2.5)
    assert job_eta_s("a", PARAMETERS, 3, None, [group(in_flight=("a",), measured=False)]) is None
    larger = PARAMETERS | {"width": 128}
    assert job_eta_s("a", larger, 3, None, [group(in_flight=("a",))]) is None


def test_a_job_that_waits_comes_after_those_before_it_at_the_pace_of_all_groups() -> None:
    alone_s = 0.1 + 8 * STEP_S + 2.0
    assert job_eta_s("a", PARAMETERS, 0, 6, [group(pace_s=4.0)]) == pytest.approx(6 * 4 + alone_s)
    assert job_eta_s("a", PARAMETERS, 0, 6, [group(pace_s=4.0), group(pace_s=4.0)]) == pytest.approx(6 * 2 + alone_s)
    # Which frames it will have is the model's to say.
    assert job_eta_s("a", PARAMETERS | {"frames": None}, 0, 0, [group(pace_s=4.0)]) == pytest.approx(alone_s)
    assert job_eta_s("a", PARAMETERS, 0, 6, [group()]) is None
    assert job_eta_s("a", PARAMETERS, 0, 6, []) is None


def test_who_waits_for_the_storage_waits_for_nobody_knows_how_long() -> None:
    trouble = Trouble(effect="Videos wait", reason="Full.", since=1.0, attempts=2, job_ids=("a", "b"))
    stuck = [group(in_flight=("a", "b", "c"), troubles=(trouble,))]
    assert trouble_of("b", stuck) == trouble
    assert trouble_of("c", stuck) is None
    assert job_eta_s("a", PARAMETERS, 8, None, stuck) is None
    assert job_eta_s("c", PARAMETERS, 8, None, stuck) is not None


def test_the_queue_is_done_when_what_waits_and_what_is_in_flight_is() -> None:
    assert queue_eta_s(10, [group(in_flight=("a", "b"), pace_s=4.0)]) == pytest.approx(12 * 4)
    two = [group(in_flight=("a", "b"), pace_s=4.0), group(in_flight=("c",), pace_s=2.0)]
    assert queue_eta_s(12, two) == pytest.approx(15 / 0.75)
    assert queue_eta_s(10, [group()]) is None
    assert queue_eta_s(0, []) is None
