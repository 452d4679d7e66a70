"""Files, processes and keys in Redis that are left though all jobs have ended and all workers are gone."""

import contextlib
import os
from pathlib import Path

import psutil

from svdq.producer import keys
from svdq.producer.status.job_view import view_many
from tests.faults.arena import Arena

#: RQ's keys of jobs in work; all are gone when none is.
KEYS_IN_WORK = ("rq:wip:*", "rq:queue:*:intermediate", "rq:execution:*", "rq:executions:*")


def leftovers(arena: Arena) -> list[str]:
    """List what is left in an arena whose workers have ended, a line each."""
    return [*_keys(arena), *_files(arena), *_processes(arena)]


def _keys(arena: Arena) -> list[str]:
    patterns = (*KEYS_IN_WORK, f"{keys.PREFIX}*")
    found = {key for pattern in patterns for key in arena.connection.scan_iter(pattern)}
    # They are of the database, of stopped jobs for as long as their records last, and of workers of the last days.
    found -= {keys.DATABASE_ID.encode(), keys.STORAGES.encode(), keys.OWNERS.encode(), keys.STOPPED.encode()}
    found.discard(keys.ABILITIES.encode())
    # Caches of owners expire within a day, abilities of workers after days, claims of those that start within minutes,
    # and who needs a video with the record of a failed job. Records of ranks and starting launchers, and a group's turn
    # to clean up, expire soon, however the group ended.
    return [f"Redis key {key.decode()}" for key in found if not _goes_by_itself(arena, key)]


def _goes_by_itself(arena: Arena, key: bytes) -> bool:
    if key.startswith((keys.TURNS.encode(), keys.NEEDED.encode(), keys.ABILITY.encode(), keys.WAKING.encode())):
        return arena.connection.ttl(key) != -1
    expires = key.decode() in (keys.RANKS, keys.STARTING, keys.MAINTAINED) or key.startswith(keys.RANK.encode())
    longest_s = max(keys.RANK_TTL_S, keys.STARTING_TTL_S)
    return expires and arena.connection.ttl(key) in (-2, *range(longest_s + 1))  # -2: it has gone just now


def _files(arena: Arena) -> list[str]:
    left = [
        *(arena.storage / "tmp").glob("*"),
        *(arena.settings.home / "checkpoints").glob("*"),
        *(arena.storage / "checkpoints").glob("*"),
        *arena.tmp.glob("svdq-*"),
        *(arena.settings.home / "run").glob("*"),
        *(arena.settings.home / "runs").glob("*"),
    ]
    # Nothing is beside the files of finished jobs and their sidecars.
    allowed = set()
    for view in view_many(arena.connection, arena.jobs):
        if view.status == "finished":
            allowed |= {Path(output).name for output in view.outputs} | {f"{view.name}-{view.id}.json"}
    left += [path for path in (arena.storage / "outputs").iterdir() if path.name not in allowed]
    return [f"file {path.relative_to(arena.folder)}" for path in left]


def _processes(arena: Arena) -> list[str]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.pid in (os.getpid(), arena.redis.pid) or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SVDQ_HOME", "").startswith(str(arena.settings.home)):
                found.append(f"process {process.pid}: {' '.join(process.info['cmdline'] or ())}")
    return found
