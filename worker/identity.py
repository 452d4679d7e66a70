"""Names of workers and groups that say which process they are, so that another process can tell who is gone.

A worker's name carries host, process id, the place in which that id means something, and when the process was started:
a process id is soon given to someone else, and two containers may share a host's name.
"""

import os
import socket
import sys
import uuid
from functools import cache
from pathlib import Path

PREFIX = "svdq"
#: Where the kernel shows its processes.
PROC = Path("/proc")


def new_name() -> str:
    """Make a name for a worker of this process: svdq-<host>-<pid>-<place>.<start>.<random>."""
    return name_of(os.getpid(), uuid.uuid4().hex[:4])


def name_of(pid: int, label: str) -> str:
    """Name a process of this host so that `is_gone` recognizes it; the label has no dot and no hyphen."""
    return f"{PREFIX}-{socket.gethostname()}-{pid}-{_place()}.{_start_of(pid)}.{label}"


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
    """Whether the process of a worker is certainly gone; False when this process cannot know."""
    try:
        before, pid, identity = name.rsplit("-", 2)
        place, start, _ = identity.split(".")
        number = int(pid)
    except ValueError:
        return False
    if before != f"{PREFIX}-{socket.gethostname()}" or place != _place() or place.startswith(":"):
        return False
    found = _start_of(number)
    return found is not None and found != start


def start_of(pid: int) -> str:
    """Say when a process of this host was started, for `process_is_gone`; "" when that is unknown."""
    return _start_of(pid) or ""


def process_is_gone(pid: int, start: str = "") -> bool:
    """Whether there is certainly no process of that id here, or only what is left of one.

    Args:
        pid: its id, of this host and container.
        start: what `start_of` said of it: a process with another start is another one; "" means that it is unknown.
    """
    found = _start_of(pid)
    return found == "" or (found is not None and start not in ("", found))


@cache
def _place() -> str:
    """Name what a process id is unique in: one boot of one machine, and one namespace (a container) of it.

    Starts with a colon where the boot is unknown: systemd's ProcSubset=pid hides its id.
    """
    if not sys.platform.startswith("linux"):
        return "host"
    try:
        boot = Path(PROC, "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{boot.partition('-')[0]}:{os.stat('/proc/self/ns/pid').st_ino:x}"


def _start_of(pid: int) -> str | None:
    """Say when a process was started; "" when it is gone, or dead and not collected by its parent.

    None when there is a process about which this one may not know more: with hidepid or ProtectProc=invisible a
    process of another user has no folder in /proc.
    """
    if not sys.platform.startswith("linux"):
        return _start_by_psutil(pid)
    try:
        # The name, in brackets, may contain anything; behind it: state, …, and in field 22 clock ticks since the boot.
        fields = Path(PROC, str(pid), "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if _exists(pid) else ""
    except PermissionError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    """Whether the kernel knows a process of that id, visible or not."""
    try:
        os.kill(pid, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _start_by_psutil(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.0f}"
    except psutil.AccessDenied:
        return None
    except psutil.Error:
        return ""
