"""Who still needs a video: marks that copies inherit, and jobs that are submitted while somebody removes it."""

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis

from svdq.pipeline.errors import InputError
from svdq.producer.queue import fetch
from svdq.producer.records import Sidecar
from svdq.producer.results.holders import being_removed, kept, record_copies
from svdq.producer.results.prune import check_clock, find_removals, remove_all
from svdq.producer.results.remove import remove_job
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.finishing import finish_requests, submit_finishing
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.verdicts import record_verdict
from tests.finished import add_video
from tests.queued import finish, write_files

UPSCALE = JobSpec(drafts=(Draft(upscale="2"),))


def submit_copy(settings: Settings, job_id: str, upscale: str = "2") -> str:
    spec = JobSpec(drafts=(Draft(upscale=upscale),))
    [submission] = submit_finishing(settings, finish_requests(settings, spec, [job_id]))
    return submission.id


def add_copy(connection: redis.Redis, settings: Settings, storage: Storage, job_id: str, upscale: str = "2") -> str:
    """Make an upscaled copy as a worker does, without its frames."""
    copy = submit_copy(settings, job_id, upscale)
    rq_job = fetch(connection, copy)
    job = rq_job.kwargs["job"]
    write_files(storage, rq_job)
    stem = f"outputs/{job['name']}-{copy}"
    document = Sidecar(svdq="1", job_id=copy, job=job, outputs=(f"{stem}.mp4",))
    storage.write_text(f"{stem}.json", document.text)
    finish(rq_job)
    return copy


def old(settings: Settings) -> None:
    at = time.time() - 40 * 24 * 3600
    for path in Path(settings.storage).rglob("*"):
        os.utime(path, (at, at))


def prune(connection: redis.Redis, storage: Storage, settings: Settings) -> set[str]:
    found = find_removals(connection, storage, Storage(str(settings.home)), timedelta(days=30), datetime.now(UTC))
    return {removal.job_id for removal in remove_all(connection, found) if removal.kind == "video"}


def test_copies_are_kept_as_what_they_were_made_from(
    connection: redis.Redis, settings: Settings, storage: Storage
) -> None:
    first, second = add_video(storage, 1), add_video(storage, 2, photo=b"2")
    copy = add_copy(connection, settings, storage, first)
    copy_of_copy = add_copy(connection, settings, storage, copy, "1.5")
    rejected = add_copy(connection, settings, storage, first, "3")
    other = add_copy(connection, settings, storage, second)
    other_of_other = add_copy(connection, settings, storage, other, "1.5")
    record_verdict(connection, [first, other], "keep")  # after the copies were made
    record_verdict(connection, [rejected], "reject")
    for key in connection.scan_iter("rq:*"):  # marks outlive the jobs
        connection.delete(key)
    old(settings)
    assert prune(connection, storage, settings) == {rejected, second}
    for job_id in (copy, copy_of_copy, other_of_other):
        assert any(job_id in entry.key for entry in storage.entries("outputs"))
    assert kept(connection, {copy: first, copy_of_copy: first, "f" * 20: ""}) == {copy: first, copy_of_copy: first}
    record_verdict(connection, [first, other], None)
    assert prune(connection, storage, settings) == {first, copy, copy_of_copy, other, other_of_other}


def test_a_circle_of_copies_ends(connection: redis.Redis) -> None:
    record_copies(connection, {"a": "b", "b": "a"})
    assert kept(connection, {"a": "b", "b": "a"}) == {}


def test_a_video_that_is_to_be_upscaled_stays(connection: redis.Redis, settings: Settings, storage: Storage) -> None:
    """Also if that was asked for while a person thought about the question of prune."""
    first, home = add_video(storage, 1), Storage(str(settings.home))
    old(settings)
    found = find_removals(connection, storage, home, timedelta(days=30), datetime.now(UTC))
    copy = submit_copy(settings, first)
    assert [removal.kind for removal in remove_all(connection, found)] == []
    connection.hset(f"rq:job:{copy}", "status", "failed")  # it may be retried
    assert prune(connection, storage, settings) == set()
    assert storage.exists(f"outputs/photo-{first}.mp4")


def test_nothing_is_made_of_a_video_that_is_being_removed(
    connection: redis.Redis, settings: Settings, storage: Storage
) -> None:
    first = add_video(storage, 1)
    with being_removed(connection, first), pytest.raises(InputError, match="is being removed"):
        submit_copy(settings, first)
    assert list(connection.scan_iter("rq:job:*")) == []
    copy = submit_copy(settings, first)
    assert connection.hget(f"rq:job:{copy}", "status") == b"queued"


def test_a_removed_video_leaves_its_copies_by_people(
    connection: redis.Redis, settings: Settings, storage: Storage
) -> None:
    root, home = Path(settings.storage, "outputs"), Storage(str(settings.home))
    copied = add_video(storage, 1)
    (root / "mine").mkdir()
    for end in ("json", "mp4"):
        (root / f"mine/photo-{copied}.{end}").write_bytes((root / f"photo-{copied}.{end}").read_bytes())
    moved = add_copy(connection, settings, storage, copied)
    (root / "best").mkdir()
    for end in ("json", "mp4"):
        (root / f"photo-2x-{moved}.{end}").rename(root / f"best/photo-2x-{moved}.{end}")
    old(settings)
    assert prune(connection, storage, settings) == {copied}
    assert prune(connection, storage, settings) == set(), "also when the original is gone"
    left = {f"outputs/mine/photo-{copied}.{end}" for end in ("json", "mp4")}
    assert {entry.key for entry in storage.entries("outputs")} == left | {
        f"outputs/best/photo-2x-{moved}.{end}" for end in ("json", "mp4")
    }
    assert remove_job(connection, storage, home, moved)
    assert {entry.key for entry in storage.entries("outputs")} == left


@pytest.mark.parametrize("days", [60, -60])
def test_ages_are_not_told_by_a_clock_that_differs(days: int) -> None:
    class Server:
        def time(self) -> tuple[int, int]:
            return int(time.time()) + days * 24 * 3600, 0

    with pytest.raises(InputError, match="the clock of Redis"):
        check_clock(Server())  # type: ignore[arg-type]
