"""The folder shared by a launcher and the ranks of one group: configuration, process ids, errors and traces."""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from svdq.pipeline import errors
from svdq.pipeline.errors import SvdqError
from svdq.producer.files import sweep, temporary_name
from svdq.producer.processes import is_running, start_of
from svdq.producer.settings import SECRETS
from svdq.worker.config import RunConfig

#: Seconds between two looks for the answer of the launcher.
POLL_S = 0.1


@contextlib.contextmanager
def parent_folder(parent: Path) -> Iterator[Path]:
    """Make a private folder for the groups of one launcher during a block; remove those of killed launchers."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent.iterdir(), abandoned_s=math.inf)
    folder = parent / temporary_name()
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_config(folder: Path, config: RunConfig) -> None:
    """Write the configuration of the group's ranks."""
    _write(folder / "config.json", config.model_dump_json(exclude={"settings": {*SECRETS}}))


def read_config(folder: Path) -> RunConfig:
    """Read the configuration of the group's ranks."""
    return RunConfig.model_validate_json((folder / "config.json").read_bytes())


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


def write_ready(folder: Path) -> None:
    """Record that the group is ready for jobs."""
    (folder / "ready").touch()


def is_ready(folder: Path) -> bool:
    """Whether the group has been ready for jobs."""
    return (folder / "ready").exists()


def await_permission(folder: Path, restart_count: int) -> None:
    """Ask the launcher whether a group that was restarted may use its GPUs, and wait until it may."""
    _write(folder / "restarted", str(restart_count))
    while _number(folder / "permitted") < restart_count:
        time.sleep(POLL_S)


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
    """Read a number; 0 while there is no file."""
    return int(path.read_text()) if path.exists() else 0


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
