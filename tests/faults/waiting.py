"""Waits for a condition, up to a limit of time."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds between looks.
LOOK_S = 0.05
#: Seconds that anything here may take; reached only when it never comes.
PATIENCE_S = 120.0


class NeverCameError(Exception):
    """Something that should have happened did not."""


def wait_until(wanted: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """Wait until something is true and return it.

    Raises:
        NeverCameError: it did not come true in time.
    """
    deadline = time.monotonic() + patience_s
    while not (found := wanted()):
        if time.monotonic() >= deadline:
            raise NeverCameError(f"{what}: not within {patience_s:.0f} s")
        time.sleep(LOOK_S)
    return found
