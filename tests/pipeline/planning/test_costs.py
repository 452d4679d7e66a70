"""Running estimates of costs: from a guess to measurements, deaf to disturbances."""

from statistics import quantiles

import pytest

from svdq.pipeline.planning.costs import CostModel, CostPrior, Shape

SHAPE = Shape(frames=14, width=576, height=320, guided=True)
OTHER = Shape(frames=25, width=1024, height=576, guided=True)


def cost_model() -> CostModel:
    return CostModel(3, CostPrior(encode_steps=0.2, decode_steps=4.4))


def record(model: CostModel, stages: list[tuple[int, int, float]], **seconds: float) -> None:
    """Record steps on ranks, an encode, and a decode on the last rank."""
    for rank, num_steps, steps_s in stages:
        model.record_step(SHAPE, rank, steps_s / num_steps)
    for kind, its_s in seconds.items():
        model.record(SHAPE, 0 if kind == "encode" else 2, kind, its_s)


def test_before_anything_is_measured_the_guess_counts_in_steps() -> None:
    costs = cost_model().estimate(SHAPE)
    assert costs.step_s == (1.0, 1.0, 1.0)
    assert costs.encode_s == 0.2
    assert costs.decode_s == 4.4


def test_measurements_replace_the_guess_for_their_shape_only() -> None:
    model = cost_model()
    record(model, [(0, 4, 0.4), (1, 4, 0.8), (2, 2, 0.2)], encode=0.05, decode=0.3)
    costs = model.estimate(SHAPE)
    assert costs.step_s == (0.1, 0.2, 0.1)
    assert (costs.encode_s, costs.decode_s) == pytest.approx((0.05, 0.3))
    assert model.estimate(OTHER).step_s == (1.0, 1.0, 1.0)


def test_a_rank_without_measurements_is_taken_to_be_typical() -> None:
    model = cost_model()
    record(model, [(0, 4, 0.4), (1, 4, 0.4)])
    assert model.estimate(SHAPE).step_s == (0.1, 0.1, 0.1)


def test_disturbed_measurements_move_nothing() -> None:
    model = cost_model()
    for number in range(15):
        disturbed = 5.0 if number % 3 == 0 else 0.4
        record(model, [(0, 4, disturbed), (1, 4, 0.4), (2, 4, 0.4)], decode=disturbed)
    costs = model.estimate(SHAPE)
    assert costs.step_s == (0.1, 0.1, 0.1)
    assert costs.decode_s == pytest.approx(0.4)


@pytest.mark.parametrize("number", range(2, 20))
def test_an_estimate_is_the_lower_quartile_of_the_last_fifteen(number: int) -> None:
    model = cost_model()
    times = [((7 * each) % 11 + 1) / 10 for each in range(number)]
    for its_s in times:
        record(model, [], encode=its_s)
    assert model.estimate(SHAPE).encode_s == pytest.approx(quantiles(times[-15:], n=4, method="inclusive")[0])


def test_nearly_equal_ranks_count_as_equal_and_slower_ones_do_not() -> None:
    model = cost_model()
    record(model, [(0, 1, 0.100), (1, 1, 0.104), (2, 1, 0.150)])
    step_s = model.estimate(SHAPE).step_s
    assert step_s[0] == 0.104 or step_s[0] == step_s[1]
    assert step_s[2] == 0.150


def test_estimates_follow_a_lasting_change() -> None:
    model = cost_model()
    for step_s in [0.1] * 20 + [0.2] * 20:
        record(model, [(rank, 1, step_s) for rank in range(3)])
    assert model.estimate(SHAPE).step_s == (0.2, 0.2, 0.2)


def test_a_decode_on_a_slow_rank_counts_as_one_on_a_typical_rank() -> None:
    model = cost_model()
    record(model, [(0, 1, 0.1), (1, 1, 0.1), (2, 1, 0.15)], decode=0.6)
    costs = model.estimate(SHAPE)
    assert costs.decode_s == pytest.approx(0.4)


def test_the_prior_may_know_how_long_a_step_takes() -> None:
    costs = CostModel(2, CostPrior(encode_steps=0.5, decode_steps=3.0, step_s=0.2)).estimate(SHAPE)
    assert (costs.step_s, costs.encode_s, costs.decode_s) == ((0.2, 0.2), 0.1, 0.2 * 3.0)


def test_steps_of_another_cost_are_measured_where_a_rank_does_both() -> None:
    model = cost_model()
    assert model.estimate(SHAPE).refined([1.0, 5.0, 0.0]) == [1.0, 5.0, 0.0]
    record(model, [(0, 4, 0.4), (1, 2, 0.2)])
    model.record_step(SHAPE, 1, 0.6, cost=5.0)
    model.record_step(SHAPE, 1, 0.005, cost=0.0)
    model.record_step(SHAPE, 2, 0.9, cost=5.0)
    costs = model.estimate(SHAPE)
    assert costs.refined([1.0, 5.0, 0.0, 0.5]) == pytest.approx([1.0, 6.0, 0.05, 0.5])
    assert costs.step_s == pytest.approx((0.1, 0.1, 0.15)), "the last rank is slow, as its costly steps show"


def test_upscaling_is_measured_apart_from_the_decode() -> None:
    model, upscaled = cost_model(), SHAPE._replace(upscale="2")
    record(model, [(0, 1, 0.1)], encode=0.05, decode=0.3)
    assert model.is_measured(SHAPE)
    assert not model.is_measured(upscaled)
    model.record(upscaled, 1, "upscale", 7.0)
    assert model.is_measured(upscaled)
    assert (model.estimate(SHAPE).decode_s, model.estimate(upscaled).decode_s) == pytest.approx((0.3, 7.3))
    assert len(model.measured()) == 1
    assert [each.seconds for each in model.upscales()] == [7.0]


def test_costs_are_read_while_another_rank_is_measured_for_the_first_time() -> None:
    """The thread that publishes the costs reads them beside the stage loop, and ended with an error."""
    model = CostModel(3, CostPrior(encode_steps=0.5, decode_steps=3.0))

    class Seconds(float):
        def __truediv__(self, other: float) -> "Seconds":
            return self

        def __lt__(self, other: float) -> bool:
            model.record_step(SHAPE, 2, 9.0)
            return float.__lt__(self, other)

    for seconds in (4.0, 4.0):
        model.record_step(SHAPE, 0, Seconds(seconds))
    assert model.estimate(SHAPE).step_s == (4.0, 4.0, 4.0)
    assert model.estimate(SHAPE).step_s[2] == 9.0
