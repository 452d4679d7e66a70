"""Threads beside a block, and in bounded memory: an ordered map, and budgets that threads share."""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
NUM_CORES = os.cpu_count() or 1
AHEAD = 4  # items started ahead of the current one, per thread
LEFT_S = 2.0  # seconds that an end before the last item waits for items that are under way
END_S = 1.0  # seconds that the end of a block waits for the thread beside it


@contextlib.contextmanager
def beside(run: Callable[[threading.Event], object], name: str) -> Iterator[None]:
    """Run a function in a thread during a block; the event that it gets is set at the end, and END_S waited for it."""
    ended = threading.Event()
    thread = threading.Thread(target=run, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(END_S)


def ordered_map(work: Callable[[Item], Result], items: Iterable[Item], *, num_threads: int) -> Iterator[Result]:
    """Yield the results in the order of the items, holding few of either.

    What is under way when it ends early, as by an error, has LEFT_S seconds to end, and goes on in its threads.
    """
    ahead: deque[Future[Result]] = deque()
    waiting: queue.SimpleQueue[tuple[Future[Result], Item] | None] = queue.SimpleQueue()
    num_started = 0
    try:
        for item in items:
            future: Future[Result] = Future()
            ahead.append(future)
            waiting.put((future, item))
            if num_started < num_threads:
                num_started += 1
                # Not of a pool, which an error, Ctrl-C and the end of the process would wait for.
                threading.Thread(target=_work, args=(work, waiting), name="work", daemon=True).start()
            if len(ahead) == AHEAD * num_threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        for future in ahead:
            future.cancel()
        for _ in range(num_started):
            waiting.put(None)
        wait([future for future in ahead if not future.cancelled()], LEFT_S)


def _work(work: Callable[[Item], Result], waiting: "queue.SimpleQueue[tuple[Future[Result], Item] | None]") -> None:
    while (each := waiting.get()) is not None:
        future, item = each
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for it
                future.set_exception(error)


class Budget:
    """Memory that threads share. A thread that needs more than is left waits, and others behind it."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def take(self, amount: int) -> Iterator[None]:
        """Reserve an amount within a block; an amount larger than the total waits until it is alone."""
        with self._turn, self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + amount <= self._total)
            self._taken += amount
        try:
            yield
        finally:
            with self._changed:
                self._taken -= amount
                self._changed.notify_all()


Reserve = Callable[[int], contextlib.AbstractContextManager[object]]  # such as `Budget.take`
DECODED = Budget(1 << 27)  # bytes of memory that decodings of photos take at a time, all of this process together
MAX_DECODED_BYTES = 480 << 20  # the same for one photo that somebody else has sent or dropped


def within(seconds: float | None, call: Callable[[], Result]) -> Result:
    """Return what a call returns, or raise a TimeoutError; then, or after Ctrl-C, it continues in a daemon thread."""
    done: Future[Result] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again below
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(seconds)
