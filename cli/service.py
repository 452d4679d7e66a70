"""What commands that run as services share: they stop at a signal, and notify systemd when they are ready."""

import contextlib
import os
import signal
import socket
from types import FrameType
from typing import Any, Self


def notify_systemd() -> None:
    """Notify systemd that the service is ready, with a datagram to the socket in NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            manager.send(b"READY=1")


class StopSignals:
    """A stop request by SIGINT or SIGTERM; a second signal ends the process at once."""

    def __init__(self) -> None:
        #: The signal, or 0.
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers."""
        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell makes its background jobs ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """Return whether a signal has arrived."""
        return self.number != 0

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
