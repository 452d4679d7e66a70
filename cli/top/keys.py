"""Reads keys while a live view is shown: q quits, any other key refreshes at once."""

import os
import select
import sys
import time
from types import TracebackType
from typing import Any


class Keys:
    """Reads single keys from the terminal within a `with` block, without echo.

    Ctrl-C still interrupts. Ctrl-Z is read as a key: suspending would leave the shell on our screen.
    """

    def __init__(self) -> None:
        #: The terminal and its settings; None if stdin is no terminal, and then no keys are read.
        self._terminal: tuple[int, list[Any]] | None = None

    def __enter__(self) -> "Keys":
        """Read keys one by one from now on."""
        if sys.stdin is not None and sys.stdin.isatty():
            import termios
            import tty

            fd = sys.stdin.fileno()
            self._terminal = (fd, termios.tcgetattr(fd))
            tty.setcbreak(fd)
            settings = termios.tcgetattr(fd)
            settings[6][termios.VSUSP] = b"\0"  # no key
            termios.tcsetattr(fd, termios.TCSADRAIN, settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the terminal."""
        if self._terminal is not None:
            import termios

            fd, before = self._terminal
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def leave_within(self, seconds: float) -> bool:
        """Wait until a key is pressed or the time is over; return whether the key means quit."""
        if self._terminal is None:
            time.sleep(seconds)
            return False
        fd, _ = self._terminal
        if not select.select([fd], [], [], seconds)[0]:
            return False
        pressed = os.read(fd, 1024)
        if not pressed:
            return True  # the terminal is gone
        # Several keys may have arrived at once; a sequence that begins with an escape is one key, such as an arrow.
        return not pressed.startswith(b"\x1b") and b"q" in pressed.lower()
