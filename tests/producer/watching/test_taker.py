"""One file at a time, with a real Redis, storage and ledger, and with kills between any two steps."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from svdq.producer.queue import SvdqQueue, read_job
from svdq.producer.settings import Settings
from svdq.producer.submitting.enqueue import Enqueued, Entry
from svdq.producer.submitting.options import SubmitOptions
from svdq.producer.submitting.order import Order
from svdq.producer.submitting.photos import Photo
from svdq.producer.watching.aftermath import Then
from svdq.producer.watching.defaults import FolderDefaults
from svdq.producer.watching.events import Event
from svdq.producer.watching.ledger import Ledger, Record, State
from svdq.producer.watching.selection import Selection
from svdq.producer.watching.settling import Settling
from svdq.producer.watching.submitter import Submitter
from svdq.producer.watching.taker import Taker
from svdq.producer.watching.tree import Tree


class Killed(BaseException):
    """Stands for kill -9: nothing of ours catches it."""


class LethalSubmitter(Submitter):
    """Is killed before or after it submits."""

    def __init__(self, settings: Settings, *, submits: bool) -> None:
        super().__init__(settings)
        self._submits = submits

    def submit(self, photo: Photo, entry: Entry) -> Enqueued:
        if self._submits:
            super().submit(photo, entry)
        raise Killed


class LethalLedger(Ledger):
    """Is killed before it writes down a file in one state, or that a file is done with."""

    def __init__(self, home: Path, root: Path, before: State | None) -> None:
        super().__init__(home, root)
        self._before = before

    def put(self, path: str, record: Record) -> None:
        if record.state is self._before:
            raise Killed
        super().put(path, record)

    def remove(self, path: str) -> None:
        if self._before is None:
            raise Killed
        super().remove(path)


class Bench:
    """A watched folder with one taker after another, each as after a restart."""

    def __init__(self, settings: Settings, root: Path) -> None:
        self.settings = settings
        self.root = root
        self.then = "keep"
        self.order = Order(options=(SubmitOptions(frames=2),))
        self.events: list[Event] = []

    def take(self, path: str, *, submitter: Submitter | None = None, ledger: Ledger | None = None) -> Record | None:
        """Take a file that has stopped growing; return what is remembered of it."""
        with ledger or Ledger(self.settings.home, self.root) as open_ledger:
            settling = Settling(0)
            tree = Tree(self.root, Selection(recursive=True), [])
            taker = Taker(
                tree=tree,
                ledger=open_ledger,
                defaults=FolderDefaults(self.root, self.order),
                submitter=submitter or Submitter(self.settings),
                then=Then.read(self.then, self.root),
                settling=settling,
                settle_s=0,
                patient=True,
                tell=self.events.append,
            )
            signature = tree.look(path)
            assert signature is not None
            settling.see(path, signature, time.monotonic())
            taker.take(path)
            return open_ledger.get(path)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture
def bench(settings: Settings, connection: redis.Redis, photo: Path, tmp_path: Path) -> Iterator[Bench]:
    root = tmp_path / "inbox"
    (root / "day").mkdir(parents=True)
    photo.rename(root / "day" / "a.jpg")
    return Bench(settings, root)


def queued(connection: redis.Redis) -> list[int | None]:
    """The frames of the jobs in the queue."""
    jobs = map(read_job, SvdqQueue(connection=connection).jobs)
    return [job.frames for job in jobs if job is not None]


@pytest.mark.parametrize("then", ["keep", "move:done", "delete"])
@pytest.mark.parametrize("place", ["before the queue", "after the queue", "before it is done with"])
def test_a_kill_between_two_steps_neither_loses_nor_doubles(
    bench: Bench, connection: redis.Redis, then: str, place: str
) -> None:
    bench.then = then
    settings, root = bench.settings, bench.root
    submitter = ledger = None
    if place == "before it is done with":
        ledger = LethalLedger(settings.home, root, State.DONE if then == "keep" else None)
    else:
        submitter = LethalSubmitter(settings, submits=place == "after the queue")
    with pytest.raises(Killed):
        bench.take("day/a.jpg", submitter=submitter, ledger=ledger)
    # Whoever starts it again may ask for something else: this photo's wish was there before.
    bench.order = Order(options=(SubmitOptions(frames=9),))
    if (root / "day" / "a.jpg").exists():
        bench.take("day/a.jpg")
    assert queued(connection) == [2]
    assert (root / "day" / "a.jpg").exists() == (then == "keep")
    assert (root / "done" / "day" / "a.jpg").exists() == (then == "move:done")


def test_a_job_has_the_folder_of_its_photo(bench: Bench, connection: redis.Redis) -> None:
    record = bench.take("day/a.jpg")
    (job,) = map(read_job, SvdqQueue(connection=connection).jobs)
    assert job is not None
    assert (job.name, job.folder) == ("a", "day")
    assert record == replace(record, state=State.DONE, job_id=SvdqQueue(connection=connection).job_ids[0])


def test_a_photo_that_was_only_touched_is_known(bench: Bench, connection: redis.Redis) -> None:
    first = bench.take("day/a.jpg")
    connection.flushall()  # as when Redis has forgotten it, long after
    os.utime(bench.root / "day" / "a.jpg", (1_000, 1_000))
    second = bench.take("day/a.jpg")
    assert bench.kinds == ["submitted", "known"]
    assert first is not None
    assert second is not None
    assert (second.job_id, second.signature.mtime_ns) == (first.job_id, 10**12)
    assert queued(connection) == []


def test_another_photo_under_the_same_name_is_another_job(
    bench: Bench, connection: redis.Redis, tmp_path: Path
) -> None:
    bench.take("day/a.jpg")
    path = bench.root / "day" / "a.jpg"
    path.write_bytes(path.read_bytes() + b"more")
    bench.take("day/a.jpg")
    assert bench.kinds == ["submitted", "submitted"]
    assert len(queued(connection)) == 2


def test_the_same_photo_is_one_job_in_a_folder_and_another_in_another_folder(
    bench: Bench, connection: redis.Redis
) -> None:
    data = (bench.root / "day" / "a.jpg").read_bytes()
    (bench.root / "day" / "b.jpg").write_bytes(data)
    (bench.root / "c.jpg").write_bytes(data)
    for path in ("day/a.jpg", "day/b.jpg", "c.jpg"):
        bench.take(path)
    assert bench.kinds == ["submitted", "known", "submitted"]
    assert len(queued(connection)) == 2


@pytest.mark.parametrize("then", ["keep", "delete"])
def test_a_bad_file_is_told_and_never_deleted(bench: Bench, connection: redis.Redis, then: str) -> None:
    bench.then = then
    path = bench.root / "day" / "bad.jpg"
    path.write_text("no photo")
    record = bench.take("day/bad.jpg")
    (event,) = bench.events
    assert (event.kind, event.path) == ("rejected", "day/bad.jpg")
    assert "not a photo" in event.text
    assert queued(connection) == []
    if then == "keep":
        assert record is not None
        assert record.state is State.BAD
        assert path.exists()
        assert not (bench.root / "rejected").exists()
    else:
        assert record is None
        assert (bench.root / "rejected" / "day" / "bad.jpg").read_text() == "no photo"
        assert "not a photo" in (bench.root / "rejected" / "day" / "bad.jpg.txt").read_text()


def test_an_empty_file_beside_its_download_is_waited_for(bench: Bench) -> None:
    (bench.root / "new.jpg").touch()
    (bench.root / "new.x81.jpg.part").touch()
    assert bench.take("new.jpg") is None
    assert bench.events == []


def test_a_file_that_cannot_be_moved_is_told_once_and_submitted_once(bench: Bench, connection: redis.Redis) -> None:
    bench.then = "move:done"
    (bench.root / "done").write_text("in the way")
    for _ in range(2):
        record = bench.take("day/a.jpg")
        assert record is not None
        assert record.state is State.SUBMITTED
    assert bench.kinds == ["submitted", "trouble", "trouble"]  # one of each taker
    assert "cannot be moved" in bench.events[1].text
    assert queued(connection) == [2]
