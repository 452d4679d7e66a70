"""Pairs of photos in a watched folder, loops, and chains."""

from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.producer.queue import queues, read_job, statuses
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.draft import Draft
from tests.producer.watching import bench as shared
from tests.producer.watching.test_processor import LETHAL, Killed


class Bench(shared.Bench):
    """Keeps the files that wait between two calls."""

    connection: redis.Redis

    def drain(self) -> None:
        """Process what waits until nothing does."""
        while self.waiting.files:
            for path in sorted(self.waiting.files):
                self.process(path, times=1)

    @property
    def pairs(self) -> list[tuple[str, bytes | None]]:
        """The names of the jobs in the queue, with the photos of their last frames."""
        storage = Storage(self.settings.storage)
        found = [job.model_dump() for job in shared.jobs(self.connection)]
        return [(job["name"], (key := job.get("last_image")) and storage.read(key)) for job in found]


@pytest.fixture
def bench(settings: Settings, connection: redis.Redis, photo: Path, tmp_path: Path) -> Bench:
    root = tmp_path / "inbox"
    (root / "day").mkdir(parents=True)
    photo.rename(root / "day" / "a.jpg")
    bench = Bench(settings, root, Draft(family="wan", seed=1))
    bench.connection = connection
    return bench


@pytest.fixture
def last(bench: Bench) -> Path:
    path = bench.root / "day" / "a.last.PNG"
    Image.new("RGB", (64, 64)).save(path)
    return path


@pytest.mark.parametrize("on_success", ["keep", "move:done", "delete"])
def test_two_photos_are_one_video(bench: Bench, last: Path, on_success: str) -> None:
    data = last.read_bytes()
    bench.on_success = on_success
    bench.process("day/a.jpg", times=1)
    assert bench.pairs == []  # the last frame may still grow
    bench.process("day/a.last.PNG", times=1)
    bench.drain()
    assert bench.pairs == [("a", data)]
    assert bench.kinds == ["submitted"]
    kept = bench.root / {"keep": "day", "move:done": "done/day", "delete": "day"}[on_success]
    assert sorted(path.name for path in kept.iterdir()) == ([] if on_success == "delete" else ["a.jpg", "a.last.PNG"])


@pytest.mark.parametrize("on_success", ["keep", "move:done", "delete"])
@pytest.mark.parametrize("place", LETHAL)
def test_a_kill_between_two_steps_makes_one_video_of_a_pair(
    bench: Bench, last: Path, on_success: str, place: str
) -> None:
    data, bench.on_success = last.read_bytes(), on_success
    with pytest.raises(Killed):
        bench.process("day/a.jpg", **LETHAL[place])
    bench.waiting.files.clear()  # the watcher is started again
    for path in sorted((bench.root / "day").iterdir()):
        bench.process(f"day/{path.name}", times=1)
    bench.drain()
    assert bench.pairs == [("a", data)]
    assert last.exists() == (on_success == "keep")


def test_a_last_frame_may_be_named_in_capitals(bench: Bench, last: Path) -> None:
    renamed = last.rename(last.with_name("a.LAST.png"))
    bench.process("day/a.jpg")
    assert bench.pairs == [("a", renamed.read_bytes())]


def test_a_last_frame_that_comes_first_waits(bench: Bench, last: Path) -> None:
    first = bench.root / "day" / "a.jpg"
    moved = first.rename(bench.root / "moved")
    bench.process("day/a.last.PNG")
    bench.drain()
    (event,) = bench.events
    assert event.text == "day/a.last.PNG waits: there is no photo beside it whose last frame it can be."
    moved.rename(first)
    bench.process("day/a.jpg")
    assert bench.pairs == [("a", last.read_bytes())]


def test_a_last_frame_that_comes_late_takes_the_place_of_a_job_that_waits(bench: Bench, last: Path) -> None:
    moved = last.rename(bench.root / "moved")
    bench.process("day/a.jpg")
    bench.process("day/a.jpg")
    assert bench.pairs == [("a", None)]
    (before,) = queues(bench.connection)[1].job_ids
    moved.rename(last)
    bench.process("day/a.last.PNG")
    bench.drain()
    assert bench.pairs == [("a", last.read_bytes())]
    assert statuses(bench.connection, [before]) == ["canceled"]


def test_a_photo_waits_while_its_last_frame_cannot_be_used(bench: Bench, last: Path) -> None:
    data = last.read_bytes()
    last.write_bytes(b"no photo")
    bench.process("day/a.jpg")
    assert "a.last.PNG' is not a photo that can be read" in bench.events[-1].text
    last.unlink()
    last.symlink_to(bench.root / "day" / "a.jpg")
    (file,) = bench.waiting.files.values()
    file.due_s = 0.0
    bench.process("day/a.jpg")
    assert "symbolic link" in bench.events[-1].text
    last.unlink()
    last.write_bytes(data)
    (bench.root / "svdq.toml").write_text("loop = true")
    bench.process("day/a.jpg")
    assert "loop and The last frame" in bench.events[-1].text
    assert bench.pairs == []
    (bench.root / "svdq.toml").unlink()
    bench.process("day/a.jpg")
    assert bench.pairs == [("a", data)]


def test_a_folder_has_loops_and_chains(bench: Bench, tmp_path: Path) -> None:
    config = bench.root / "svdq.toml"
    config.write_text("loop = true")
    bench.process("day/a.jpg")
    assert [job.loop for job in shared.jobs(bench.connection)] == [True]
    bench.connection.flushall()
    config.write_text('prompt = "A"\nthen = ["B", "C"]')
    bench.waiting.files.clear()
    (bench.root / "day" / "a.jpg").touch()
    for kind in ("submitted", "known"):
        (bench.root / "day" / "a.jpg").touch()
        bench.process("day/a.jpg")
        assert bench.kinds[-1] == kind
    queue = queues(bench.connection)[1]
    ids = [*queue.job_ids, *queue.deferred_job_registry.get_job_ids()]
    jobs = {(job := read_job(queue.fetch_job(job_id))).prompt: job for job_id in ids}
    assert sorted(jobs) == ["A", "B", "C"]
    assert {job.name for job in jobs.values()} == {"a"}
    assert jobs["C"].predecessor == next(job_id for job_id in ids if read_job(queue.fetch_job(job_id)).prompt == "B")
