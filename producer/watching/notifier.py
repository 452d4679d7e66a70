"""Reports that something changed in a folder, so that it is scanned at once. Notifications can get lost.

They do in folders that were created a moment ago, when too much happens at once, and on network shares.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from svdq.producer.watching.folder_config import WatchOptions

#: Seconds that `wait` takes at most, so that signals are handled soon.
TICK_S = 0.2
#: Seconds until notifications are tried again after they failed, such as at a limit of inotify.
RETRY_S = 60.0


class Stop(Protocol):
    """A stop request, such as one made by a signal."""

    def is_set(self) -> bool:
        """Return whether to stop."""
        ...


class Notifier:
    """Notifications of the operating system, by watchfiles; or none, where the folder is polled."""

    def __init__(self, root: Path, options: WatchOptions, stop: Stop) -> None:
        """Initialize; nothing is noticed before the first `wait`.

        Args:
            root: the watched folder, resolved.
            options: how it is watched.
            stop: ends a wait.
        """
        self._root = root
        self._recursive = options.selection.recursive
        self._poll = options.poll or options.once
        self._stop = stop
        self._batches: Iterator[object] | None = None
        self._retry_at_s = 0.0
        #: Why there are no notifications although they are wanted, or None.
        self.problem: str | None = None

    @property
    def is_polling(self) -> bool:
        """Whether there are no notifications."""
        return self._poll or self.problem is not None

    def wait(self) -> bool:
        """Wait for at most `TICK_S`; return whether something may have changed."""
        if self._poll or time.monotonic() < self._retry_at_s:
            time.sleep(TICK_S)
            return False
        is_new = self._batches is None
        if self._batches is None:
            self._batches = self._watch()
        try:
            batch = next(self._batches, None)
        except (OSError, RuntimeError, UnicodeError) as error:  # RuntimeError: also when a changed name is not UTF-8
            self._batches = None
            if is_new:
                is_name = isinstance(error, UnicodeError)
                self.problem = "the path of the folder is not valid UTF-8" if is_name else str(error)
                self._retry_at_s = time.monotonic() + RETRY_S
            return True
        self.problem = None
        return is_new or bool(batch)

    def restart(self) -> None:
        """Start again, because the path of the folder now names another folder."""
        self._batches, self._retry_at_s = None, 0.0

    def _watch(self) -> Iterator[object]:
        # Imported here: it loads a compiled library that polling does without.
        from watchfiles import watch

        return watch(
            self._root,
            watch_filter=lambda _change, path: not os.path.basename(path).startswith("."),
            debounce=round(TICK_S * 1000),
            rust_timeout=round(TICK_S * 1000),
            yield_on_timeout=True,
            stop_event=self._stop,
            raise_interrupt=False,
            recursive=self._recursive,
            ignore_permission_denied=True,
        )
