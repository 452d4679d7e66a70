"""One file at a time, with a real Redis, storage and state, and with kills between any two steps."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from svdq.producer.queue import SvdqQueue, fetch, read_arguments
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from svdq.producer.watching.scanner import Debounce
from svdq.producer.watching.state import Event, FileRecord, State
from tests.producer.watching import bench as shared
from tests.queued import finish, write_files
from tests.ranks import rank, save


class Killed(BaseException):
    """Simulates kill -9: svdq does not catch it."""


class LethalStorage(Storage):
    """Is killed before a photo is stored."""

    def has_input(self, key: str, num_bytes: int | None = None) -> bool:
        raise Killed


def kill_at_report(event: Event) -> None:
    """Kill the watcher just after the job is in the queue."""
    raise Killed


class LethalState(State):
    """Is killed before it remembers or forgets a file."""

    def put(self, path: str, record: FileRecord) -> None:
        raise Killed

    def remove(self, path: str) -> None:
        raise Killed


#: Where the watcher is killed, and how.
LETHAL: dict[str, dict[str, Any]] = {
    "before the queue": {"storage_class": LethalStorage},
    "after the queue": {"report": kill_at_report},
    "before it is remembered": {"state_class": LethalState},
}


class Bench(shared.Bench):
    """Each call is as after a restart."""

    def process(self, path: str, **options: Any) -> FileRecord | None:
        self.waiting = Debounce(0)
        return super().process(path, **options)


@pytest.fixture
def bench(settings: Settings, connection: redis.Redis, photo: Path, tmp_path: Path) -> Iterator[Bench]:
    root = tmp_path / "inbox"
    (root / "day").mkdir(parents=True)
    photo.rename(root / "day" / "a.jpg")
    return Bench(settings, root, Draft(frames=2))


def queued(connection: redis.Redis) -> list[int | None]:
    """The frames of the jobs in the queue."""
    return [job.frames for job in shared.jobs(connection)]


@pytest.mark.parametrize("on_success", ["keep", "move:done", "delete"])
@pytest.mark.parametrize("place", LETHAL)
def test_a_kill_between_two_steps_loses_and_duplicates_nothing(
    bench: Bench, connection: redis.Redis, on_success: str, place: str
) -> None:
    bench.on_success = on_success
    root = bench.root
    with pytest.raises(Killed):
        bench.process("day/a.jpg", **LETHAL[place])
    if (root / "day" / "a.jpg").exists():
        bench.process("day/a.jpg")
    assert queued(connection) == [2]
    assert (root / "day" / "a.jpg").exists() == (on_success == "keep")
    assert (root / "done" / "day" / "a.jpg").exists() == (on_success == "move:done")


def test_a_job_has_the_folder_and_the_path_of_its_photo(bench: Bench, connection: redis.Redis) -> None:
    record = bench.process("day/a.jpg")
    (rq_job,) = SvdqQueue(connection=connection).jobs
    arguments = read_arguments(rq_job)
    assert (arguments.photo, arguments.source) == (str(bench.root / "day" / "a.jpg"), "inbox/day/a.jpg")
    (job,) = shared.jobs(connection)
    assert (job.name, job.folder) == ("a", "day")
    assert record is not None
    assert record[1:] == ("submitted", SvdqQueue(connection=connection).job_ids[0])


def test_a_photo_that_was_only_touched_is_known(bench: Bench, connection: redis.Redis) -> None:
    first = bench.process("day/a.jpg")
    connection.flushall()  # as when Redis has forgotten it, long after
    os.utime(bench.root / "day" / "a.jpg", (1_000, 1_000))
    second = bench.process("day/a.jpg")
    assert bench.kinds == ["submitted", "known"]
    assert first is not None
    assert second is not None
    assert (second.job_id, second.signature.mtime_ns) == (first.job_id, 10**12)
    assert queued(connection) == []


def test_a_preview_is_replaced_from_a_watched_folder_too(
    bench: Bench, connection: redis.Redis, storage: Storage
) -> None:
    record = bench.process("day/a.jpg")
    assert record is not None
    write_files(storage, fetch(connection, record.job_id))
    finish(fetch(connection, record.job_id), {"outputs": ["x.mp4"], "model": "preview"})
    save(connection, rank(0, num_ranks=1, model="preview"))
    os.utime(bench.root / "day" / "a.jpg", (1_000, 1_000))
    bench.process("day/a.jpg")
    save(connection, rank(0, num_ranks=1, model="/models/xt"))
    os.utime(bench.root / "day" / "a.jpg", (2_000, 2_000))
    bench.process("day/a.jpg")
    assert bench.kinds == ["submitted", "known", "submitted"]
    assert bench.events[-1].text.endswith("(replaces the video that preview made)")
    assert SvdqQueue(connection=connection).job_ids == [record.job_id]


def test_another_photo_under_the_same_name_is_another_job(
    bench: Bench, connection: redis.Redis, tmp_path: Path
) -> None:
    bench.process("day/a.jpg")
    path = bench.root / "day" / "a.jpg"
    path.write_bytes(path.read_bytes() + b"more")
    bench.process("day/a.jpg")
    assert bench.kinds == ["submitted", "submitted"]
    assert len(queued(connection)) == 2


def test_the_same_photo_is_one_job_in_each_folder(bench: Bench, connection: redis.Redis) -> None:
    data = (bench.root / "day" / "a.jpg").read_bytes()
    (bench.root / "day" / "b.jpg").write_bytes(data)
    (bench.root / "c.jpg").write_bytes(data)
    for path in ("day/a.jpg", "day/b.jpg", "c.jpg"):
        bench.process(path)
    assert bench.kinds == ["submitted", "known", "submitted"]
    assert len(queued(connection)) == 2


@pytest.mark.parametrize("on_success", ["keep", "delete"])
def test_a_bad_file_is_reported_and_never_deleted(bench: Bench, connection: redis.Redis, on_success: str) -> None:
    bench.on_success = on_success
    path = bench.root / "day" / "bad.jpg"
    path.write_text("no photo")
    record = bench.process("day/bad.jpg")
    (event,) = bench.events
    assert (event.kind, event.path) == ("rejected", "day/bad.jpg")
    assert "not a photo" in event.text
    assert queued(connection) == []
    if on_success == "keep":
        assert record is not None
        assert record.outcome == "rejected"
        assert path.exists()
        assert not (bench.root / "rejected").exists()
    else:
        assert record is None
        assert (bench.root / "rejected" / "day" / "bad.jpg").read_text() == "no photo"
        assert "not a photo" in (bench.root / "rejected" / "day" / "bad.jpg.txt").read_text()


def test_an_empty_file_is_waited_for(bench: Bench) -> None:
    (bench.root / "new.jpg").touch()
    assert bench.process("new.jpg", times=2) is None
    assert bench.kinds == ["problem"]
    assert "0 bytes" in bench.events[0].text


def test_a_file_that_cannot_be_moved_is_reported_once_and_submitted_once(bench: Bench, connection: redis.Redis) -> None:
    bench.on_success = "move:done"
    (bench.root / "done").write_text("in the way")
    bench.process("day/a.jpg", times=3)
    assert bench.kinds == ["submitted", "problem"]
    assert "cannot be moved" in bench.events[1].text
    bench.process("day/a.jpg")  # as after a restart
    assert bench.kinds == ["submitted", "problem", "known", "problem"]
    (bench.root / "done").unlink()
    bench.process("day/a.jpg")
    assert (bench.root / "done" / "day" / "a.jpg").exists()
    assert queued(connection) == [2]
