"""Rounds: each set of components is loaded once a round, and rounds are as large as loading needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdq.pipeline.planning.binding import Segment
from svdq.pipeline.planning.rounds import (
    DECODER,
    ENCODERS,
    FIRST_VIDEOS,
    GATHER_S,
    LOAD_SHARE,
    MOST_VIDEOS,
    ROUND_S,
    TEXT_ENCODER,
    Leg,
    Rounds,
    legs_of,
)

HIGH, LOW = "transformer", "transformer_2"
SETS = (TEXT_ENCODER, ENCODERS, HIGH, LOW, DECODER)
SEGMENTS = (Segment(component=HIGH, start=0, stop=15), Segment(component=LOW, start=15, stop=40))


def admit(rounds: Rounds, index: int, first_unit: int = 0, *, has_text=False, num_waiting=0, now=0.0) -> None:
    rounds.admit(index, legs_of(SEGMENTS, first_unit, has_text=has_text), num_waiting=num_waiting, now=now)


def measured(video_s: float, load_s: float = 0.0) -> Rounds:
    rounds = Rounds(SETS)
    rounds.video_s = video_s
    rounds.load_s = {HIGH: load_s / 2, LOW: load_s / 2}
    return rounds


def work(rounds: Rounds, now: float = 100.0) -> list[tuple[str, int]]:
    """Do all that can be done, and return the set and the video of each leg."""
    done = []
    while (index := rounds.choose(now)) is not None:
        rounds.held = rounds.leg(index).components
        done.append((rounds.held, index))
        rounds.advance(index)
    return done


def work_up_to(rounds: Rounds, components: str) -> list[tuple[str, int]]:
    done = []
    while rounds.held != components:
        index = rounds.choose(0.0)
        rounds.held = rounds.leg(index).components
        done.append((rounds.held, index))
        rounds.advance(index)
    return done


def test_urgent_videos_come_first_in_each_leg_of_their_round() -> None:
    rounds = Rounds(SETS)
    for index, priority in enumerate((1, 2, 1, 0)):
        rounds.admit(index, legs_of(SEGMENTS, 0, has_text=False), num_waiting=0, now=0.0, priority=priority)
    places = {index: each.num_before for index, each in rounds.outlook(lambda *_: 1.0).items()}
    assert places == {3: 0, 0: 1, 2: 2, 1: 3}
    assert work(rounds) == [(components, index) for components in SETS[1:] for index in (3, 0, 2, 1)]


def test_a_video_is_divided_by_the_sets_that_its_units_need() -> None:
    assert legs_of(SEGMENTS, 0, has_text=True) == [
        Leg(TEXT_ENCODER, 0, 0), Leg(ENCODERS, 0, 1), Leg(HIGH, 1, 16), Leg(LOW, 16, 41), Leg(DECODER, 41, 42),
    ]  # fmt: skip
    assert legs_of(SEGMENTS, 20, has_text=False) == [Leg(LOW, 20, 41), Leg(DECODER, 41, 42)]
    assert legs_of(SEGMENTS[1:], 41, has_text=False) == [Leg(DECODER, 41, 42)]


def test_videos_of_a_round_go_on_together_in_their_order() -> None:
    rounds = Rounds(SETS)
    for index in (0, 1, 2):
        admit(rounds, index, has_text=index != 1)
    expected = [(TEXT_ENCODER, 0), (TEXT_ENCODER, 2)]
    assert work(rounds) == expected + [(each, index) for each in SETS[1:] for index in (0, 1, 2)]
    assert len(rounds) == 0


@given(st.lists(st.tuples(st.sampled_from([0, 1, 9, 16, 30, 41]), st.booleans()), min_size=1, max_size=20))
def test_each_set_is_loaded_once_for_new_videos_and_every_leg_is_done_once(videos) -> None:
    rounds = Rounds(SETS)
    legs = set()
    for index, (first_unit, has_text) in enumerate(videos):
        has_text = has_text and not first_unit
        admit(rounds, index, first_unit, has_text=has_text)
        legs |= {(leg.components, index) for leg in legs_of(SEGMENTS, first_unit, has_text=has_text)}
    done = work(rounds)
    assert len(done) == len(legs)
    assert set(done) == legs
    new = [components for components, index in done if videos[index][0] == 0]
    changes = [components for place, components in enumerate(new) if place == 0 or new[place - 1] != components]
    assert len(changes) == len(set(changes))


def test_after_a_crash_the_furthest_come_first_and_new_videos_behind_them() -> None:
    rounds = Rounds(SETS)
    for index, first_unit in enumerate([41, 20, 3, 41]):
        admit(rounds, index, first_unit)
    admit(rounds, 4)
    assert work(rounds) == [
        (DECODER, 0), (DECODER, 3), (LOW, 1), (DECODER, 1), (HIGH, 2), (LOW, 2), (DECODER, 2),
        *[(components, 4) for components in SETS[1:]],
    ]  # fmt: skip


def test_nothing_begins_while_more_videos_that_continue_may_come() -> None:
    rounds = Rounds(SETS)
    admit(rounds, 0, 20, num_waiting=3, now=10.0)
    assert rounds.choose(10.1) is None
    admit(rounds, 1, 41, num_waiting=0, now=10.2)
    assert rounds.choose(10.2) == 1, "the furthest"


def test_while_more_of_a_round_come_videos_are_encoded_alone() -> None:
    rounds = measured(video_s=10.0)
    admit(rounds, 0, has_text=True, num_waiting=1, now=1.0)
    assert work(rounds, 1.1) == [(TEXT_ENCODER, 0)], "another prompt may come"
    assert work(rounds, 1.0 + GATHER_S) == [(components, 0) for components in SETS[1:]], "none did"
    rounds = measured(video_s=10.0)
    admit(rounds, 0, num_waiting=1, now=1.0)
    assert work(rounds, 1.1) == [(ENCODERS, 0)]
    admit(rounds, 1, now=2.0)
    assert work(rounds, 2.0) == [(ENCODERS, 1), *[(each, index) for each in SETS[2:] for index in (0, 1)]]


def test_the_first_round_is_small() -> None:
    rounds = Rounds(SETS)
    for index in range(FIRST_VIDEOS):
        assert rounds.wants_more()
        admit(rounds, index, num_waiting=100)
    assert not rounds.wants_more()
    assert rounds.choose(0.0) == 0, "a full round waits for no more"


@pytest.mark.parametrize(("video_s", "load_s", "expected"), [(600, 20, 1), (100, 20, 4), (2, 4, 40), (0.01, 1, 64)])
def test_a_round_has_so_many_videos_that_loading_takes_at_most_its_share(video_s, load_s, expected) -> None:
    rounds = measured(video_s, load_s)
    assert rounds.size == expected
    assert rounds.size == MOST_VIDEOS or load_s <= LOAD_SHARE * rounds.size * video_s
    assert measured(video_s=1.0, load_s=0.01).size == ROUND_S


def test_groups_leave_each_other_their_shares_of_the_jobs_that_wait() -> None:
    taken, waiting = [], 300
    while waiting:
        rounds = Rounds(SETS, num_groups=7)
        rounds.video_s = 0.01
        number = 0
        while waiting and rounds.wants_more():
            waiting -= 1
            admit(rounds, number, num_waiting=waiting)
            number += 1
        taken.append(number)
    assert taken[:3] == [43, 37, 32]
    assert taken[-1] == 1


def test_after_a_load_the_next_video_has_time_to_come() -> None:
    rounds = measured(video_s=10.0)
    admit(rounds, 0, has_text=True, num_waiting=1, now=1.0)
    assert rounds.choose(1.0) == 0
    rounds.loaded(TEXT_ENCODER, 30.0, 31.0)
    rounds.advance(0)
    assert rounds.choose(32.0) is None
    assert rounds.choose(31.0 + GATHER_S) == 0


def test_the_memory_of_the_states_bounds_a_round() -> None:
    rounds = Rounds(SETS, most_bytes=250)
    rounds.video_s, rounds.state_bytes = 0.01, 100
    taken = 0
    while rounds.wants_more():
        admit(rounds, taken)
        taken += 1
    assert taken == 3
    rounds = Rounds(SETS, most_bytes=0)
    rounds.state_bytes = 100
    assert rounds.wants_more(), "one video is made in any case"


def test_a_round_closes_at_its_expert_and_the_next_opens_at_its_decode() -> None:
    rounds = measured(video_s=10.0)
    admit(rounds, 0)
    for components in (ENCODERS, HIGH, LOW):
        assert rounds.choose(0.0) == 0
        assert rounds.wants_more() == (components == ENCODERS)
        rounds.held = components
        rounds.advance(0)
    assert rounds.choose(0.0) == 0
    rounds.held = DECODER
    assert rounds.wants_more()
    admit(rounds, 1)
    assert work(rounds) == [(DECODER, 0), *[(each, 1) for each in SETS[1:]]]


def test_a_video_that_comes_when_its_round_has_begun_goes_on_with_the_next() -> None:
    rounds = measured(video_s=10.0)
    admit(rounds, 0)
    assert work_up_to(rounds, HIGH) == [(ENCODERS, 0), (HIGH, 0)]
    admit(rounds, 1)  # rank 0 has waited for it since the round was open
    assert not rounds.wants_more()
    assert work(rounds) == [(LOW, 0), (DECODER, 0), *[(each, 1) for each in SETS[1:]]]


def test_a_video_that_ends_early_is_forgotten() -> None:
    rounds = Rounds(SETS)
    admit(rounds, 0)
    admit(rounds, 1)
    rounds.end(0)
    assert work(rounds) == [(components, 1) for components in SETS[1:]]
    assert rounds.wants_more()


def test_the_outlook_counts_the_videos_before_each_and_the_loads() -> None:
    rounds = Rounds(SETS)
    for index in range(3):
        admit(rounds, index)
    rounds.held, rounds.load_s = ENCODERS, {HIGH: 5.0, LOW: 5.0, DECODER: 1.0}
    for _ in range(2):
        rounds.advance(rounds.choose(0.0))
    outlook = rounds.outlook(lambda index, leg: float(leg.stop - leg.start))
    assert [(each.components, each.num_before) for _, each in sorted(outlook.items())] == [
        (HIGH, 0), (HIGH, 1), (ENCODERS, 0),
    ]  # fmt: skip
    # An encode, 3 x 15 and 3 x 25 steps, 3 loads, and the decodes one after the other.
    before_s = 1 + 3 * 40 + 11
    assert [each.eta_s for _, each in sorted(outlook.items())] == [before_s + 1, before_s + 2, before_s + 3]
