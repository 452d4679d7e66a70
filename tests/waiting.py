"""Waits for what happens in another process or thread."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 180.0  # seconds far beyond what anything here takes; reached only when it never comes

T = TypeVar("T")


class NeverCameError(AssertionError):
    """Something that should have happened did not."""


def wait_until(wanted: Callable[[], T], hint: str | Callable[[], str] = "", patience_s: float = PATIENCE_S) -> T:
    """Wait until something is true and return it; `hint` is or makes what a failure shows.

    Raises:
        NeverCameError: it did not become true in time.
    """
    deadline = time.monotonic() + patience_s
    while not (found := wanted()):
        if time.monotonic() >= deadline:
            raise NeverCameError(f"It never came. {hint if isinstance(hint, str) else hint()}")
        time.sleep(0.05)
    return found
