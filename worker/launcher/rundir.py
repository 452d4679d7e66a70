"""The folder through which a launcher and its ranks know each other: process ids and what went wrong. Knows no jobs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from svdq.pipeline import errors
from svdq.pipeline.errors import SvdqError
from svdq.producer.process_identity import is_running, start_of


def write_pid(folder: Path, rank: int) -> None:
    """Leave this process's id and start for the launcher: from now on the rank listens to signals."""
    _write(folder / f"rank{rank}.pid", f"{os.getpid()} {start_of(os.getpid()) or ''}")


def read_pids(folder: Path) -> dict[int, int]:
    """Return the process ids of the ranks that listen or listened, by rank."""
    return {rank: pid for rank, (pid, _) in _read_processes(folder).items()}


def running_pids(folder: Path) -> dict[int, int]:
    """Return the process ids of the ranks that listen, by rank; an id that another process has now is none."""
    found = _read_processes(folder)
    return {rank: pid for rank, (pid, start) in found.items() if is_running(pid, start) is not False}


def _read_processes(folder: Path) -> dict[int, tuple[int, str]]:
    """Read the process id and start of each rank."""
    found = {}
    for path in folder.glob("rank*.pid"):
        pid, _, start = path.read_text().partition(" ")
        found[int(path.stem.removeprefix("rank"))] = (int(pid), start)
    return found


def write_ready(folder: Path) -> None:
    """Tell the launcher that the group is ready for jobs."""
    (folder / "ready").touch()


def is_ready(folder: Path) -> bool:
    """Whether the group has been ready for jobs."""
    return (folder / "ready").exists()


def write_error(folder: Path, error: SvdqError) -> None:
    """Leave why the group cannot run, for the launcher to show once."""
    _write(folder / "error", json.dumps([type(error).__name__, str(error)]))


def read_error(folder: Path) -> SvdqError | None:
    """Return the error that a rank left, if one did."""
    try:
        kind, sentence = json.loads((folder / "error").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    error: SvdqError = getattr(errors, kind, SvdqError)(sentence)
    return error


def write_trace(folder: Path, rank: int, events: list[dict[str, Any]]) -> None:
    """Leave a rank's trace events at its end."""
    _write(folder / f"rank{rank}.trace", json.dumps(events))


def read_traces(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the trace events that ranks have left, those of later groups with process numbers of their own."""
    events: list[dict[str, Any]] = []
    for folder in folders:
        first = 1 + max((event["pid"] for event in events), default=-1)
        for path in sorted(folder.glob("rank*.trace")):
            for event in json.loads(path.read_text(encoding="utf-8")):
                events.append({**event, "pid": event["pid"] + first})
    return events


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
