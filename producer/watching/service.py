"""Telling systemd that a service is up, by its protocol: one datagram to the socket that it names."""

import contextlib
import os
import socket


def notify_ready() -> None:
    """Tell that this process is ready, if a service manager wants to know."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            manager.send(b"READY=1")
