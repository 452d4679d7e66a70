"""Shares of steps: fair, whole, in order, for any number of ranks and steps."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from svdq.pipeline.partition import Costs, Partitioner, fair_shares, fair_time_s

COSTS = st.builds(
    lambda step_s, encode_s, decode_s: Costs(step_s=tuple(step_s), encode_s=encode_s, decode_s=decode_s),
    st.lists(st.floats(0.2, 5.0), min_size=1, max_size=10),
    st.floats(0, 10),
    st.floats(0, 40),
)
STEPS = st.integers(0, 60)


def loads(boundaries: tuple[int, ...]) -> list[int]:
    return [later - earlier for earlier, later in itertools.pairwise(boundaries)]


@given(COSTS, STEPS)
def test_shares_sum_to_the_steps_and_no_rank_with_a_share_is_busier_than_another(costs: Costs, num_steps: int) -> None:
    shares = fair_shares(num_steps, costs)
    assert sum(shares) == pytest.approx(num_steps)
    busy = [share * step + fixed for share, step, fixed in zip(shares, costs.step_s, costs.fixed_s, strict=True)]
    common = {round(busy_s, 6) for busy_s, share in zip(busy, shares, strict=True) if share > 1e-9}
    assert len(common) <= 1 or max(common) - min(common) < 1e-5
    for busy_s, share in zip(busy, shares, strict=True):
        if num_steps and share <= 1e-9:
            assert busy_s >= max(common) - 1e-5, "a rank without steps has time for some"


@given(COSTS, STEPS, st.integers(0, 60), st.integers(1, 30))
def test_boundaries_are_monotone_and_cover_every_step_once(
    costs: Costs, num_steps: int, first_step: int, num_samples: int
) -> None:
    partitioner = Partitioner(len(costs.step_s))
    for _ in range(num_samples):
        boundaries = partitioner.split(first_step, first_step + num_steps, costs)
        assert boundaries[0] == first_step
        assert boundaries[-1] == first_step + num_steps
        assert len(boundaries) == len(costs.step_s) + 1
        assert min(loads(boundaries)) >= 0


@given(COSTS, st.integers(1, 60))
@example(Costs(step_s=(1.0, 1.0, 1.0, 4.0, 5.0, 5.0)), 1)  # whoever is owed most first: a rank falls 1.01 steps behind
@settings(max_examples=60)
def test_in_the_long_run_every_rank_carries_its_share_within_a_step_per_round(costs: Costs, num_steps: int) -> None:
    num_ranks, num_samples = len(costs.step_s), 20 * len(costs.step_s)
    partitioner = Partitioner(num_ranks)
    done = [0] * num_ranks
    shares = fair_shares(num_steps, costs)
    for number in range(1, num_samples + 1):
        for rank, load in enumerate(loads(partitioner.split(0, num_steps, costs))):
            done[rank] += load
            assert abs(load - shares[rank]) < 1 + 1e-6, "a rank's load is its share rounded up or down"
        if number % num_ranks == 0:
            for rank, share in enumerate(shares):
                assert abs(done[rank] - number * share) <= 1 + 1e-6


def test_twenty_five_steps_on_seven_ranks_cost_less_than_four_a_video() -> None:
    partitioner = Partitioner(7)
    costs = Costs(step_s=(1.0,) * 7)
    done = [0] * 7
    for _ in range(7):
        for rank, load in enumerate(loads(partitioner.split(0, 25, costs))):
            assert load in {3, 4}
            done[rank] += load
    assert done == [25] * 7


def test_a_decode_worth_more_than_a_fair_share_leaves_the_last_rank_without_steps() -> None:
    # The proportions of SVD-XT on an H100: 76 ms a step, 14 ms to encode, 338 ms to decode.
    costs = Costs(step_s=(76.0,) * 7, encode_s=14, decode_s=338)
    assert fair_shares(25, costs)[-1] == 0
    assert fair_time_s(25, costs) == 338
    assert loads(Partitioner(7).split(0, 25, costs))[-1] == 0


def test_a_slower_rank_gets_fewer_steps() -> None:
    shares = fair_shares(28, Costs(step_s=(1, 1, 1, 1.5, 1, 1, 1)))
    assert shares[3] == pytest.approx(shares[0] / 1.5)


def test_a_change_of_estimates_from_guessed_to_measured_units_does_not_shift_shares() -> None:
    partitioner = Partitioner(7)
    for _ in range(3):  # nothing measured yet: costs in units of a step
        partitioner.split(0, 25, Costs(step_s=(1.0,) * 7))
    done = [0] * 7
    for _ in range(14):
        for rank, load in enumerate(loads(partitioner.split(0, 25, Costs(step_s=(0.05,) * 7)))):
            done[rank] += load
    assert max(done) - min(done) <= 2


def test_more_ranks_than_steps() -> None:
    partitioner = Partitioner(7)
    done = [0] * 7
    for _ in range(7):
        for rank, load in enumerate(loads(partitioner.split(0, 3, Costs(step_s=(1.0,) * 7)))):
            done[rank] += load
    assert done == [3] * 7
