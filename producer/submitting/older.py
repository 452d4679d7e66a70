"""Finds older videos of the same photos that still wait, such as those with a prompt that was corrected since."""

import contextlib
import re
import zlib
from collections.abc import Collection, Iterator, Sequence

import redis

from svdq.producer.job import INPUT_KEY, last_frame_key
from svdq.producer.job_control import WAITING
from svdq.producer.queue import read_job
from svdq.producer.status.registries import newest_ids
from svdq.producer.submitting.entries import Submission
from svdq.producer.untrusted_job import AT_ONCE, UntrustedJob, key_of

_PHOTO = re.compile(INPUT_KEY.pattern.encode())
_MAX_BYTES = 1 << 20  # of a job's arguments; larger ones are not svdq's


def older_waiting(connection: redis.Redis, made: Sequence[Submission]) -> list[str]:
    """Return the ids of waiting jobs that make other videos of the photos of a submission, oldest first in each queue.

    Only jobs of the same owner or of nobody, and none that upscales a finished video or that the submission waits for.
    A link that continues a chain of the submission in another way is one of them.
    """
    owners: dict[str, set[str]] = {}
    for each in made:
        for photo in (each.job.image, last_frame_key(each.id)):
            owners.setdefault(photo, {""}).add(each.entry.owner)
    spared = {each.id for each in made}.union(*(each.entry.after for each in made))
    waiting = [job_id for job_id in newest_ids(connection, statuses=WAITING) if job_id not in spared]
    found = []
    for start in range(0, len(waiting), AT_ONCE):
        likely = _that_name(connection, owners.keys(), waiting[start : start + AT_ONCE])
        for rq_job in filter(None, UntrustedJob.fetch_many(likely, connection)):
            job = read_job(rq_job)
            if job and not job.finishes and rq_job.owner in owners.get(job.image, ()):
                found.append(rq_job.id)
    return found


def _that_name(connection: redis.Redis, photos: Collection[str], job_ids: Sequence[str]) -> Iterator[str]:
    """Yield the jobs whose arguments name one of the photos; it costs a tenth of reading the jobs."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hget(key_of(job_id), "data")
        answers = pipeline.execute(raise_on_error=False)
    for job_id, answer in zip(job_ids, answers, strict=True):
        with contextlib.suppress(zlib.error, TypeError):  # anyone may have written it
            text = zlib.decompressobj().decompress(answer, _MAX_BYTES)
            if any(name.decode() in photos for name in _PHOTO.findall(text)):
                yield job_id
