"""Answers who still needs the files of a video: jobs that continue or upscale it, and marks to keep it or its original.

`svdq prune`, `svdq remove`, the page and the API ask before they remove a video, and again while `being_removed` keeps
new jobs from needing it.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import redis

from svdq.pipeline.errors import InputError
from svdq.producer import job_control, keys
from svdq.producer.queue import ENDED, statuses
from svdq.producer.verdicts import read_verdicts, record_verdict


def record_copies(connection: redis.Redis, copies: Mapping[str, str]) -> None:
    """Record which copy each job upscales once more; the jobs themselves name the original of both."""
    if copies:
        fields: Any = copies
        connection.hset(keys.COPIES, mapping=fields)


def jobs_that_need(connection: redis.Redis, job_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the jobs without a video of their own yet that need the video of each job, with their statuses.

    Of chains, all later links.
    """
    found: dict[str, dict[str, str]] = {job_id: {} for job_id in job_ids}
    nearest = {job_id: {job_id} for job_id in job_ids}  # the jobs whose videos need the video of each key
    seen: set[str] = set(job_ids)
    while nearest:
        with connection.pipeline(transaction=False) as pipeline:
            for job_id in nearest:
                pipeline.smembers(f"{keys.NEEDED}{job_id}")
            answers = pipeline.execute()
        later: dict[str, set[str]] = {}
        for origins, members in zip(nearest.values(), answers, strict=True):
            for member in members:
                later.setdefault(member.decode(errors="replace"), set()).update(origins)
        for (job_id, origins), status in zip(later.items(), statuses(connection, list(later)), strict=True):
            if status not in (None, "finished"):
                for origin in origins - {job_id}:
                    found[origin][job_id] = status
        nearest = {job_id: origins for job_id, origins in later.items() if job_id not in seen}
        seen.update(later)
    return found


def kept(connection: redis.Redis, originals: Mapping[str, str]) -> dict[str, str]:
    """Return the videos of these that are to be kept, each with the id of the video whose mark says so.

    `originals` maps the id of each video to the id of the one that it was upscaled from, "" for none. A copy without a
    mark of its own has the mark of the video that it was made from.
    """
    found: dict[str, str] = {}
    asked = {job_id: job_id for job_id in originals}
    seen: dict[str, set[str]] = {job_id: {job_id} for job_id in originals}
    while asked:
        at = list(asked.values())
        made_from: Any = connection.hmget(keys.COPIES, at)
        origins: dict[str, str] = {}
        for (job_id, video), mark, origin in zip(asked.items(), read_verdicts(connection, at), made_from, strict=True):
            if mark == "keep":
                found[job_id] = video
            elif mark is None:
                # A copy of a copy names its original, which is asked last.
                before = origin.decode(errors="replace") if origin else originals[job_id]
                if before and before not in seen[job_id]:
                    seen[job_id].add(before)
                    origins[job_id] = before
        asked = origins
    return found


def check_unneeded(connection: redis.Redis, originals: Mapping[str, str]) -> None:
    """Raise InputError if one of these videos has not ended, is to be kept, or a job is about to use its files."""
    job_ids = list(originals)
    for job_id, status in zip(job_ids, statuses(connection, job_ids), strict=True):
        if status in job_control.GOING:
            raise InputError(f"Job {job_id!r} is {status}: `svdq cancel {job_id}` it first.")
    check_not_kept(connection, originals)
    for job_id, needing in jobs_that_need(connection, job_ids).items():
        for other, status in needing.items():
            if status in job_control.GOING:
                raise InputError(
                    f"Job {job_id!r} is needed by job {other!r}, which is {status} and uses its video: "
                    f"`svdq cancel {other}` that first."
                )


def check_not_kept(connection: redis.Redis, originals: Mapping[str, str]) -> None:
    """Raise InputError if one of these videos is to be kept."""
    for job_id, marked in kept(connection, originals).items():
        if marked == job_id:
            raise InputError(f"Job {job_id!r} has a video that is to be kept: `svdq mark none {job_id}` it first.")
        raise InputError(
            f"Job {job_id!r} has a copy of the video of {marked!r}, which is to be kept: `svdq mark reject {job_id}` "
            "it first."
        )


def is_needed(connection: redis.Redis, job_id: str, original: str) -> bool:
    """Return whether a video must stay until somebody says otherwise: also jobs that may be retried need it."""
    (status,) = statuses(connection, [job_id])
    if status is not None and status not in ENDED:
        return True
    return bool(jobs_that_need(connection, [job_id])[job_id] or kept(connection, {job_id: original}))


@contextlib.contextmanager
def being_removed(connection: redis.Redis, job_id: str) -> Iterator[None]:
    """Have new jobs that would need the video of a job refused within a block; ask in it who needs that now."""
    key = f"{keys.REMOVING}{job_id}"
    connection.set(key, "", ex=keys.REMOVING_TTL_S)
    try:
        yield
    finally:
        connection.delete(key)


def forget_marks(connection: redis.Redis, job_ids: Collection[str]) -> None:
    """Forget the verdicts about videos that were removed, of what they were copies, and who needed them."""
    record_verdict(connection, list(job_ids), None)
    if job_ids:
        connection.hdel(keys.COPIES, *job_ids)
        connection.delete(*(f"{keys.NEEDED}{job_id}" for job_id in job_ids))
