"""Identifies processes by name, so that another process can check whether the one that wrote a name still runs.

A process id is soon used again, and containers may share a host name. So a name also has the start of its process and
the scope of its id: one boot of one machine and, on Linux, one PID namespace (a container).
"""

import hashlib
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

PREFIX = "svdq"
PARENT_PID = "TORCHRUN_PID"  # in which torchrun gives its process id to its ranks
PROC = Path("/proc")


def worker_name() -> str:
    """Return a new name for a worker in this process: svdq-<host>-<pid>-<scope>.<start>.<random>."""
    return process_name(os.getpid(), uuid.uuid4().hex[:4])


def process_name(pid: int, label: str) -> str:
    """Return a name of a process of this host that `is_gone` can check; the label has no dot and no hyphen."""
    return f"{PREFIX}-{socket.gethostname()}-{pid}-{scope()}.{start_of(pid) or ''}.{label}"


def group_name() -> str:
    """Return the name of this rank's group: the same for all its ranks, and after every restart of the group."""
    return f"{socket.gethostname()}-{os.getppid()}-{scope()}"  # the process id of torchrun


def is_gone(name: str) -> bool:
    """Return whether the process with a `process_name` has certainly ended; False if that cannot be checked here."""
    try:
        before, pid, identity = name.rsplit("-", 2)
        its_scope, start, _ = identity.split(".")
        number = int(pid)
    except ValueError:
        return False
    return before == f"{PREFIX}-{socket.gethostname()}" and is_running(number, start, its_scope) is False


def is_running(pid: int, start: str = "", its_scope: str | None = None) -> bool | None:
    """Return whether a process is running; None if that cannot be checked here.

    `start` is its `start_of`, since another process may have its id now; "" if unknown. `its_scope` is its `scope`;
    None for a process of this host and container.
    """
    # Without the boot's id, a scope does not say which machine it is.
    if its_scope is not None and (its_scope != scope() or its_scope.startswith("x")):
        return None
    found = start_of(pid)
    if found is None:
        return None
    return found != "" and start in ("", found)


@cache
def scope() -> str:
    """Return a hash of the boot of this machine and, on Linux, the PID namespace, in which process ids are unique.

    Starts with "x" if the boot is unknown: systemd's ProcSubset=pid hides its id.
    """
    if not sys.platform.startswith("linux"):
        return hashlib.sha256(str(uuid.getnode()).encode()).hexdigest()[:12]
    namespace = os.stat("/proc/self/ns/pid").st_ino
    try:
        boot = Path(PROC, "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"x{namespace:x}"
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:12]


def start_of(pid: int) -> str | None:
    """Return when a process of this host started, in clock ticks since the boot.

    "" if it has ended, even if its parent has not collected it. None if it runs and its start is unknown: with hidepid
    or ProtectProc=invisible a process of another user has no folder in /proc, and only Linux has that folder.
    """
    try:
        # The name, in parentheses, may contain anything; after it comes the state, and the start is field 22.
        fields = Path(PROC, str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if _exists(pid) else ""
    except OSError:
        return None
    return "" if fields[0] in "ZX" else fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def die_with_parent(number: signal.Signals = signal.SIGTERM, *, parent: int | None = None) -> Callable[[], None] | None:
    """Return a function for a child to run first: the kernel then sends it a signal when its parent is killed.

    `parent` is the parent's process id; None is this process. The function ends the child at once if its parent has
    ended. None where the kernel cannot do that.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    expected = os.getpid() if parent is None else parent

    def ask_kernel() -> None:
        prctl(1, number)  # PR_SET_PDEATHSIG
        if os.getppid() != expected:  # the parent was killed before the kernel was asked
            os._exit(1)

    return ask_kernel


def name_process(name: str) -> None:
    """Set the name under which `ps` and `top` show this process, of at most 15 characters, where the kernel can."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME
