"""A command on a separate terminal."""

import contextlib
import os
import pty
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.forks import Fork
from tests.waiting import PATIENCE_S


@dataclass
class Terminal:
    """A running command, and what it has drawn."""

    process: Fork
    #: Our end of it, and the command's.
    ours: int
    theirs: int
    text: str = ""

    def read_until(self, wanted: str) -> str:
        """Read what it draws until some text is there."""
        deadline = time.monotonic() + PATIENCE_S
        while wanted not in self.text:
            assert time.monotonic() < deadline, self.text
            self.text += os.read(self.ours, 65536).decode(errors="replace")
        return self.text

    def end(self) -> int:
        """Read on until it has ended; return the exit code."""
        os.set_blocking(self.ours, False)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            is_over = self.process.poll() is not None
            with contextlib.suppress(BlockingIOError, OSError):
                self.text += os.read(self.ours, 65536).decode(errors="replace")
                continue
            if is_over:
                return self.process.wait()
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)


@contextlib.contextmanager
def terminal(*arguments: object, size: tuple[int, int] = (24, 80), **environment: str) -> Iterator[Terminal]:
    """Run `svdq` on a terminal of so many lines and columns; kill it at the end of the block."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    tty, words = Path(os.ttyname(theirs)), [str(word) for word in arguments]
    process = Fork(words, tty, tty, stdin=tty, **{"TERM": "xterm-256color", **environment})
    try:
        yield Terminal(process, ours, theirs)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
