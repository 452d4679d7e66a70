"""Names of workers and groups that say which process they are, so that another process can tell who is gone.

A worker's name carries host, process id, the place in which that id means something, and when the process was started:
a process id is soon given to someone else, and two containers may share a host's name. Knows no Redis.
"""

import os
import socket
import sys
import uuid
from functools import cache
from pathlib import Path

PREFIX = "svdq"


def new_name() -> str:
    """Make a name for a worker of this process: svdq-<host>-<pid>-<place>.<start>.<random>."""
    pid = os.getpid()
    return f"{PREFIX}-{socket.gethostname()}-{pid}-{_place()}.{_start_of(pid)}.{uuid.uuid4().hex[:4]}"


def group_name(*, on_one_host: bool) -> str:
    """Make the name that all ranks of a group find for themselves, the same after every restart of the group.

    Args:
        on_one_host: whether all its ranks are on this host; then the torchrun that started them names the group,
            else its --rdzv-id and the host of rank 0 do.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    if run_id is not None and not on_one_host:
        return f"{run_id}-{os.environ['MASTER_ADDR']}"
    # A rank that no torchrun has started is a group by itself.
    pid = os.getpid() if run_id is None else os.getppid()
    return f"{socket.gethostname()}-{pid}-{_place()}"


def is_gone(name: str) -> bool:
    """Whether the process of a worker is certainly gone; False when it cannot be known from here."""
    try:
        before, pid, identity = name.rsplit("-", 2)
        place, start, _ = identity.split(".")
        number = int(pid)
    except ValueError:
        return False
    if before != f"{PREFIX}-{socket.gethostname()}" or place != _place():
        return False
    return _start_of(number) != start


def process_is_gone(pid: int) -> bool:
    """Whether there is no process of that id here, or only what is left of one."""
    return _start_of(pid) == ""


@cache
def _place() -> str:
    """Name what a process id is unique in: one boot of one machine, and one namespace (a container) of it."""
    if not sys.platform.startswith("linux"):
        return "host"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot.partition('-')[0]}:{os.stat('/proc/self/ns/pid').st_ino:x}"


def _start_of(pid: int) -> str:
    """Say when a process was started; "" when it is gone, or dead and only not collected by its parent."""
    if not sys.platform.startswith("linux"):
        return _start_by_psutil(pid)
    try:
        # The name, in brackets, may contain anything; behind it: state, …, and in field 22 clock ticks since the boot.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _start_by_psutil(pid: int) -> str:
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.Error:
        return ""
