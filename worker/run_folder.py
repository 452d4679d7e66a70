"""The files that a launcher and its ranks share besides `config`: process ids, restarts, errors and traces."""

import contextlib
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from svdq.pipeline import errors
from svdq.pipeline.errors import SvdqError, UnavailableError
from svdq.producer.files import make_home, sweep, temporary_name, unusable
from svdq.producer.processes import is_running, start_of

RUN = "run"  # folder under SVDQ_HOME with a folder for each running launcher
PROBE_BYTES = 2**14  # bytes that a home must have room for; a full disk still takes empty files


def check_home(home: Path) -> None:
    """Make the folder of runs; raise an UnavailableError if this user may not write to it or its disk is full."""
    try:
        make_home(home)
        (home / RUN).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=home / RUN) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        raise UnavailableError(
            f"The folder {str(home)!r} cannot be written ({unusable(home, error)}); set SVDQ_HOME to a folder that you "
            "can write to."
        ) from error


@contextlib.contextmanager
def parent_folder(home: Path) -> Iterator[Path]:
    """Make a private folder for the groups of a launcher during a block; remove what killed launchers left."""
    parent = home / RUN
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent.iterdir(), abandoned_s=math.inf)
    folder = parent / temporary_name()
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_pid(folder: Path, rank: int) -> None:
    """Write the id and start of this process: from now on the rank handles signals."""
    _write(folder / f"rank{rank}.pid", f"{os.getpid()} {start_of(os.getpid()) or ''}")


def running_pids(folder: Path) -> dict[int, int]:
    """Return the process ids of the ranks that handle signals, by rank; not an id that was given to another process."""
    found = {}
    for path in folder.glob("rank*.pid"):
        pid, _, start = path.read_text().partition(" ")
        if is_running(int(pid), start) is not False:
            found[int(path.stem.removeprefix("rank"))] = int(pid)
    return found


def write_ready(folder: Path, restart_count: int) -> None:
    """Record that the group is ready for jobs; -1: that it was ready before its present start."""
    (folder / "idle").unlink(missing_ok=True)
    _write(folder / "ready", str(restart_count))


def last_ready(folder: Path) -> int | None:
    """Return the restart after which the group was ready for jobs last, 0 for its start; None if it never was."""
    return _number(folder / "ready") if (folder / "ready").exists() else None


def ready_at(folder: Path) -> float:
    """Return when the group was ready for jobs last, in seconds since the epoch."""
    return (folder / "ready").stat().st_mtime


def write_idle(folder: Path, queues: Sequence[str]) -> None:
    """Record that the ranks end because they had nothing to do; `queues` are those that they took jobs from."""
    _write(folder / "idle", json.dumps(queues))


def read_idle(folder: Path) -> list[str] | None:
    """Return the queues of a group whose ranks ended because they had nothing to do; None if that is not why."""
    path = folder / "idle"
    return [str(name) for name in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else None


def write_record(folder: Path, rank: int, record: str) -> None:
    """Write the last status of a rank, JSON, at its end."""
    _write(folder / f"rank{rank}.record", record)


def read_records(folder: Path) -> list[str]:
    """Return the last status of each rank, the first rank first."""
    paths = sorted(folder.glob("rank*.record"), key=lambda path: int(path.stem.removeprefix("rank")))
    return [path.read_text(encoding="utf-8") for path in paths]


def write_restart(folder: Path, restart_count: int) -> None:
    """Record that the group was restarted."""
    _write(folder / "restarted", str(restart_count))


def await_permission(folder: Path, restart_count: int) -> None:
    """Wait until the launcher permits a group that was restarted to use its GPUs."""
    while _number(folder / "permitted") < restart_count:
        time.sleep(0.1)


def restarts(folder: Path) -> int:
    """Return how often the group was restarted."""
    return _number(folder / "restarted")


def permit(folder: Path, restart_count: int) -> None:
    """Let the ranks of a restart use their GPUs."""
    _write(folder / "permitted", str(restart_count))


def write_error(folder: Path, error: SvdqError) -> None:
    """Write why the group cannot run, for the launcher to print once."""
    _write(folder / "error", json.dumps([type(error).__name__, str(error)]))


def read_error(folder: Path) -> SvdqError | None:
    """Return the error that a rank wrote, if one did."""
    try:
        kind, sentence = json.loads((folder / "error").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    error: SvdqError = getattr(errors, kind, SvdqError)(sentence)
    return error


def write_failure(folder: Path, restart_count: int, reason: str) -> None:
    """Record why a rank of this start or restart of the group ended."""
    _write(folder / "failure", json.dumps([restart_count, reason]))


def read_failure(folder: Path, restart_count: int) -> str:
    """Return why a rank of this start of the group, or of a later one, ended; "" if that is not recorded."""
    try:
        of, reason = json.loads((folder / "failure").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    return str(reason) if of >= restart_count else ""


def write_crowded(folder: Path, need: int) -> None:
    """Record that another program has taken memory of a rank's GPU; its launcher ends the group until `need` is free.

    `need` is the free bytes of the GPU that the rank's present video needs.
    """
    _write(folder / "crowded", str(need))


def read_crowded(folder: Path) -> int | None:
    """Return the free bytes of a GPU for which the group is to end and wait; None: it is not."""
    return _number(folder / "crowded") if (folder / "crowded").exists() else None


def write_trace(folder: Path, rank: int, events: list[dict[str, Any]]) -> None:
    """Write the trace events of a rank at its end."""
    _write(folder / f"rank{rank}.trace", json.dumps(events))


def read_traces(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the trace events of all ranks; process numbers continue from group to group."""
    events: list[dict[str, Any]] = []
    for folder in folders:
        first = 1 + max((event["pid"] for event in events), default=-1)
        for path in sorted(folder.glob("rank*.trace")):
            for event in json.loads(path.read_text(encoding="utf-8")):
                events.append({**event, "pid": event["pid"] + first})
    return events


def _number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
