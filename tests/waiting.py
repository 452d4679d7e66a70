"""Waits for what happens in another process or thread."""

import time
from collections.abc import Callable
from typing import TypeVar

#: Far beyond what anything here takes; reached only when it never comes.
PATIENCE_S = 180.0

T = TypeVar("T")


def wait_until(wanted: Callable[[], T], hint: Callable[[], str] = str) -> T:
    """Wait until something is true and return it; `hint` gives what a failure shows."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := wanted()):
        assert time.monotonic() < deadline, f"it never came\n{hint()}"
        time.sleep(0.05)
    return found
