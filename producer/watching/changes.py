"""Being woken when something changes in a folder. What is told are hints: who needs to be sure looks at the folder.

Hints can be lost: in folders that were made this moment, when too much happens at once, on network shares.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

#: Seconds that a wait lasts at most, so that a signal is heard.
TICK_S = 0.2
#: Seconds until inotify is tried again where it could not be had, such as when its limits are reached.
RETRY_S = 60.0


class Stop(Protocol):
    """Tells whether to stop; set by a signal."""

    def is_set(self) -> bool:
        """Whether to stop."""
        ...


class Changes(Protocol):
    """Where hints come from."""

    #: Why changes go unnoticed at present, or None.
    trouble: str | None

    def wait(self) -> set[str] | None:
        """Wait a moment; return paths that have changed, from the watched folder on, or None: any may have."""
        ...

    def restart(self) -> None:
        """Begin anew, for the folder is another one than before."""
        ...


class Polling:
    """No hints: the folder is looked at again and again."""

    def __init__(self) -> None:
        self.trouble: str | None = None

    def wait(self) -> set[str]:
        """Wait a moment."""
        time.sleep(TICK_S)
        return set()

    def restart(self) -> None:
        """Nothing to begin."""


class Notifications:
    """Hints from the kernel: inotify, or what watchfiles has for other systems."""

    def __init__(self, root: Path, recursive: bool, stop: Stop) -> None:
        """Make it; nothing is noticed before the first `wait`.

        Args:
            root: the watched folder, resolved.
            recursive: whether changes in folders of the folder are wanted.
            stop: ends a wait.
        """
        self._root = root
        self._recursive = recursive
        self._stop = stop
        self._batches: Iterator[set[str]] | None = None
        self._has_worked = False
        self._retry_at_s = 0.0
        self.trouble: str | None = None

    def wait(self) -> set[str] | None:
        """Wait a moment; return paths that have changed, from the watched folder on, or None: any may have."""
        is_new = self._batches is None
        if self._batches is None:
            if time.monotonic() < self._retry_at_s:
                time.sleep(TICK_S)
                return set()
            self._batches, self._has_worked = self._watch(), False
        try:
            batch = next(self._batches, set[str]())
        except (OSError, RuntimeError) as error:  # RuntimeError: among others, a name that is not UTF-8 has changed
            self._batches = None
            if not self._has_worked:
                self.trouble, self._retry_at_s = str(error), time.monotonic() + RETRY_S
            return None
        self._has_worked, self.trouble = True, None
        return None if is_new or str(self._root) in batch else batch

    def restart(self) -> None:
        """Begin anew, for the folder is another one than before."""
        self._batches, self._retry_at_s = None, 0.0

    def _watch(self) -> Iterator[set[str]]:
        # Imported here: it loads a compiled library that polling does without.
        from watchfiles import watch

        prefix = f"{self._root}{os.sep}"
        batches = watch(
            self._root,
            watch_filter=None,
            debounce=round(TICK_S * 1000),
            rust_timeout=round(TICK_S * 1000),
            yield_on_timeout=True,
            stop_event=self._stop,
            raise_interrupt=False,
            recursive=self._recursive,
            ignore_permission_denied=True,
        )
        for batch in batches:
            yield {path.removeprefix(prefix) for _, path in batch}
