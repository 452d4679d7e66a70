import threading
from collections.abc import Iterator

import pytest

from svdq.producer.threads import AHEAD, Budget, ordered_map
from tests.waiting import wait_until


def test_results_are_in_order_and_few_items_start_ahead() -> None:
    begun = 0

    def items() -> Iterator[int]:
        nonlocal begun
        while begun < 1000:
            begun += 1
            yield begun

    for number, result in enumerate(ordered_map(lambda item: item * 2, items(), num_threads=3), 1):
        assert result == number * 2
        assert begun - number <= AHEAD * 3
    assert begun == 1000


def test_several_work_at_a_time() -> None:
    meeting = threading.Barrier(4, timeout=60)
    assert len(list(ordered_map(lambda _: meeting.wait(), range(8), num_threads=4))) == 8


def test_an_error_ends_it() -> None:
    with pytest.raises(ZeroDivisionError):
        list(ordered_map(lambda item: 1 // item, [1, 0, 1], num_threads=2))


def test_an_error_does_not_wait_for_what_hangs() -> None:
    hanging = threading.Event()
    with pytest.raises(ZeroDivisionError):
        list(ordered_map(lambda item: 1 // item if item != 2 else hanging.wait(60), [0, 2, 2], num_threads=3))
    assert not hanging.is_set()
    hanging.set()


def test_smaller_items_do_not_overtake_one_that_waits() -> None:
    budget = Budget(10)

    def take(amount: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: budget.take(amount).__enter__(), daemon=True)
        thread.start()
        thread.join(0.1)
        return thread

    with budget.take(1):
        large = take(11)
        wait_until(lambda: take(0).is_alive(), patience_s=5)
    large.join(30)
    assert not large.is_alive()


def test_only_a_single_item_exceeds_a_budget() -> None:
    budget = Budget(10)
    taken: list[int] = []
    seen = []
    lock = threading.Lock()

    def take(amount: int) -> None:
        with budget.take(amount):
            with lock:
                taken.append(amount)
                seen.append(list(taken))
            with lock:
                taken.remove(amount)

    list(ordered_map(take, [1, 9, 2, 11, 5, 5, 100, 1, 1, 10] * 20, num_threads=8))
    assert len(seen) == 200
    assert all(sum(amounts) <= 10 or len(amounts) == 1 for amounts in seen)
