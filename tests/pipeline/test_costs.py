"""Running estimates of costs: from a guess to measurements, deaf to disturbances."""

from svdq.pipeline.costs import CostBook, Guess, Shape

SHAPE = Shape(frames=14, width=576, height=320, guided=True)
OTHER = Shape(frames=25, width=1024, height=576, guided=True)


def book() -> CostBook:
    return CostBook(3, Guess(encode_steps=0.2, decode_steps=4.4))


def test_before_anything_is_measured_the_guess_counts_in_steps() -> None:
    costs = book().estimate(SHAPE)
    assert costs.step_s == (1.0, 1.0, 1.0)
    assert costs.encode_s == 0.2
    assert costs.decode_s == 4.4


def test_measurements_replace_the_guess_for_their_shape_only() -> None:
    costs_book = book()
    costs_book.record(SHAPE, [(0, 4, 0.4), (1, 4, 0.8), (2, 2, 0.2)], {"encode": 0.05, "decode": 0.3})
    costs = costs_book.estimate(SHAPE)
    assert costs.step_s == (0.1, 0.2, 0.1)
    assert (costs.encode_s, costs.decode_s) == (0.05, 0.3)
    assert costs_book.estimate(OTHER).step_s == (1.0, 1.0, 1.0)


def test_a_rank_without_measurements_is_taken_to_be_typical() -> None:
    costs_book = book()
    costs_book.record(SHAPE, [(0, 4, 0.4), (1, 4, 0.4)], {})
    assert costs_book.estimate(SHAPE).step_s == (0.1, 0.1, 0.1)


def test_disturbed_measurements_move_nothing() -> None:
    costs_book = book()
    for number in range(15):
        disturbed = 5.0 if number % 3 == 0 else 0.4
        costs_book.record(SHAPE, [(0, 4, disturbed), (1, 4, 0.4), (2, 4, 0.4)], {"decode": disturbed})
    costs = costs_book.estimate(SHAPE)
    assert costs.step_s == (0.1, 0.1, 0.1)
    assert costs.decode_s == 0.4


def test_nearly_equal_ranks_count_as_equal_and_slower_ones_do_not() -> None:
    costs_book = book()
    costs_book.record(SHAPE, [(0, 1, 0.100), (1, 1, 0.104), (2, 1, 0.150)], {})
    step_s = costs_book.estimate(SHAPE).step_s
    assert step_s[0] == 0.104 or step_s[0] == step_s[1]
    assert step_s[2] == 0.150


def test_estimates_follow_a_lasting_change() -> None:
    costs_book = book()
    for step_s in [0.1] * 20 + [0.2] * 20:
        costs_book.record(SHAPE, [(rank, 1, step_s) for rank in range(3)], {})
    assert costs_book.estimate(SHAPE).step_s == (0.2, 0.2, 0.2)
