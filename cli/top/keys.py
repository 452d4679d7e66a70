"""The keys that are pressed while a live view is shown: q leaves, any other looks again at once."""

import os
import select
import sys
import time
from types import TracebackType
from typing import Any


class Keys:
    """Takes single keys from the terminal for the length of a block, without showing them.

    Ctrl-C stays what it is. Ctrl-Z is a key like any other: the shell would be left on our screen.
    """

    def __init__(self) -> None:
        #: The terminal and how it was set; None where stdin is none: then there are no keys.
        self._terminal: tuple[int, list[Any]] | None = None

    def __enter__(self) -> "Keys":
        """Take keys one by one from now on."""
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
        """Leave the terminal as it was."""
        if self._terminal is not None:
            import termios

            fd, before = self._terminal
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def leave_within(self, seconds: float) -> bool:
        """Wait, at most until a key is pressed; return whether it says to leave."""
        if self._terminal is None:
            time.sleep(seconds)
            return False
        fd, _ = self._terminal
        if not select.select([fd], [], [], seconds)[0]:
            return False
        pressed = os.read(fd, 1024)
        if not pressed:
            return True  # the terminal has gone
        # Several may have come at once; what begins with an escape is one key, such as an arrow.
        return not pressed.startswith(b"\x1b") and b"q" in pressed.lower()
