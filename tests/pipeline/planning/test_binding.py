"""Which rank holds which expert, and which steps it may do: every step can be done, and the slower side is fast."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdq.pipeline.planning.binding import Segment, bind, bounds_of
from svdq.pipeline.planning.costs import CostPrior

HIGH, LOW = frozenset({"high"}), frozenset({"low"})
FREE = CostPrior(encode_steps=0, decode_steps=0)


def two(boundary: int, steps: int) -> tuple[Segment, ...]:
    """The segments of a video; an expert without steps has none."""
    both = (Segment(component="high", start=0, stop=boundary), Segment(component="low", start=boundary, stop=steps))
    return tuple(segment for segment in both if segment.start < segment.stop)


@pytest.mark.parametrize(
    ("num_ranks", "expected"), [(2, [HIGH, LOW]), (3, [HIGH] + [LOW] * 2), (7, [HIGH] * 3 + [LOW] * 4)]
)
def test_ranks_are_divided_so_that_the_slower_side_is_fast(num_ranks: int, expected: list) -> None:
    assert bind(two(15, 40), [False] * num_ranks, FREE) == expected


def test_one_rank_at_the_boundary_holds_both_where_it_has_room() -> None:
    room = [False, False, True, False, False, False, False]
    assert bind(two(15, 40), room, FREE) == [HIGH, HIGH, None, LOW, LOW, LOW, LOW]
    # Elsewhere it would keep no other rank from having too much.
    assert bind(two(15, 40), [True] + [False] * 6, FREE) == [HIGH] * 3 + [LOW] * 4


@pytest.mark.parametrize("room", [[False], [True] * 7])
def test_a_rank_alone_and_ranks_with_room_hold_everything(room: list[bool]) -> None:
    assert bind(two(15, 40), room, FREE) == [None] * len(room)


def test_a_model_with_one_component_is_not_bound() -> None:
    assert bind(two(40, 40), [False] * 3, FREE) == [None] * 3


def test_a_rank_with_all_steps_does_none_that_later_ranks_cannot_follow() -> None:
    bounds = bounds_of(two(15, 40), [None, HIGH, LOW, None], range(4), range(4))
    assert bounds == [(0, 16), (0, 16), (16, 42), (16, 42)]


def test_ranks_without_an_encoder_or_a_decoder_do_not_encode_or_decode() -> None:
    bounds = bounds_of(two(15, 40), [None] * 4, encoders=[0, 1, 3], decoders=[0, 2, 3])
    assert bounds == [(0, 41), (0, 41), (1, 42), (1, 42)], "ranks before or after one that cannot do not either"
    bounds = bounds_of(two(15, 40), [frozenset(), HIGH, LOW], encoders=[0], decoders=[1, 2])
    assert bounds == [(0, 1), (1, 16), (16, 42)]


@given(
    room=st.lists(st.booleans(), min_size=1, max_size=9),
    typical=st.tuples(st.integers(0, 9), st.integers(1, 9)),
    video=st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(any),
    encode_steps=st.floats(0, 9),
    decode_steps=st.floats(0, 9),
)
def test_the_chain_can_do_every_step_of_every_video(room, typical, video, encode_steps, decode_steps) -> None:
    prior = CostPrior(encode_steps=encode_steps, decode_steps=decode_steps)
    components = bind(two(typical[0], sum(typical)), room, prior)
    segments = two(video[0], sum(video))
    if typical[0] == 0:
        assert components == [None] * len(room)
    every = range(len(room))
    bounds = bounds_of(segments, components, every, every)
    assert (bounds[0][0], bounds[-1][1]) == (0, sum(video) + 2)
    assert all(a[0] <= b[0] and a[1] <= b[1] and b[0] <= a[1] for a, b in pairwise(bounds))
    for held, (start, stop) in zip(components, bounds, strict=True):
        assert start <= stop
        for segment in segments:
            does = max(start, segment.start + 1) < min(stop, segment.stop + 1)
            assert not does or held is None or segment.component in held
    for rank, held in enumerate(components):
        assert held is not None or room[rank] or len(room) == 1 or typical[0] == 0
