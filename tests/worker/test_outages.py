"""Trying again what the storage refuses: what is waited for, for how long, and what is seen of it meanwhile."""

import errno
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from svdq.pipeline.errors import InputError, SvdqError, UnavailableError
from svdq.pipeline.loop.protocols import Request
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.job import Job, JobArguments, last_frame_key
from svdq.producer.records import JobResult
from svdq.producer.storage.storage import Storage
from svdq.worker import outages
from svdq.worker.intake.prefetcher import IntakeOptions, Prefetcher, RefusedError
from svdq.worker.memory_plan import MemoryPlan, RankInfo
from svdq.worker.outages import NoLongerWantedError, RetryStoppedError, StorageRetry
from tests.queued import SvdJob, WanJob
from tests.worker.conftest import with_frames

pytestmark = pytest.mark.usefixtures("short_delays")

MODEL = ModelInfo(name="fake", notice="")


class Refusing:
    """Refuses until it is told not to."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_attempts = 0

    def __call__(self) -> str:
        self.num_attempts += 1
        if not self.opened.is_set():
            raise OSError(errno.ENOSPC, f"No space left ({self.num_attempts})")
        return "done"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_a_condition_lasts_as_long_as_the_storage_refuses(pool, until, caplog) -> None:
    caplog.set_level(logging.INFO)
    retry, storage = StorageRetry("Videos wait"), Refusing()
    assert retry.condition is None
    done = pool.submit(retry.call, storage)
    first = until(lambda: retry.condition)
    later = until(lambda: (found := retry.condition) and found.attempts >= 3 and found)
    assert (later.effect, later.since) == ("Videos wait", first.since)
    assert later.reason == f"[Errno 28] No space left ({later.attempts})"
    storage.opened.set()
    assert done.result(60) == "done"
    assert retry.condition is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_stop_ends_the_waiting_at_once(pool, until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 600)
    retry = StorageRetry("Videos wait")
    done = pool.submit(retry.call, Refusing())
    until(lambda: retry.condition)
    retry.stop()
    with pytest.raises(RetryStoppedError):
        done.result(60)
    assert retry.condition is None


def test_a_call_that_is_no_longer_wanted_ends(pool, until, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 600)
    retry, is_wanted = StorageRetry("Videos wait"), threading.Event()
    is_wanted.set()
    done = pool.submit(retry.call, Refusing(), is_wanted.is_set)
    until(lambda: retry.condition)
    is_wanted.clear()
    retry.wake()
    with pytest.raises(NoLongerWantedError):
        done.result(60)
    assert retry.call(lambda: "the next", is_wanted.is_set) == "the next"


@pytest.fixture
def quickly_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "UNANSWERED_S", 0.05)
    monkeypatch.setattr(outages, "ANSWER_S", 0.05)


@pytest.mark.usefixtures("quickly_said")
def test_a_storage_that_hangs_is_said_once_and_its_return_once(pool, until, caplog) -> None:
    caplog.set_level(logging.INFO)
    answers = threading.Event()
    retry = StorageRetry("Videos wait", lambda: answers.wait(60))
    done = pool.submit(retry.call, lambda: answers.wait(60))
    assert "has not answered for" in until(lambda: retry.condition).reason
    answers.set()
    assert done.result(60)
    assert retry.condition is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.usefixtures("quickly_said")
def test_a_long_write_to_a_storage_that_answers_is_no_outage(pool, until, caplog) -> None:
    num_asked, may_end = [], threading.Event()

    def answers() -> bool:
        num_asked.append(1)
        return True

    retry = StorageRetry("Videos wait", answers)
    done = pool.submit(retry.call, lambda: may_end.wait(60))
    until(lambda: len(num_asked) >= 3)
    assert retry.condition is None
    may_end.set()
    assert done.result(60)
    assert not caplog.records


@pytest.mark.parametrize("error", [OSError(errno.ENAMETOOLONG, "too long"), ValueError("a mistake")])
def test_an_error_that_no_retry_fixes_is_raised_at_once(error: Exception) -> None:
    def attempt() -> None:
        raise error

    with pytest.raises(type(error)):
        StorageRetry("Videos wait").call(attempt)


# Reading photos.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def job(folder: Path, tmp_path: Path) -> Job:
    """A job whose photo is stored."""
    path = tmp_path / "photo.png"
    Image.new("RGB", (80, 80)).save(path)
    key = Storage(str(folder)).put_input(path.read_bytes(), "png")
    return SvdJob(image=key, name="photo", seed=1, width=64, height=64)


class Locked(Storage):
    """A storage that is there, but does not give one file out: as an object store that is out of breath does."""

    is_locked = True

    def read(self, key: str) -> bytes:
        if self.is_locked and key.startswith("inputs/"):
            raise UnavailableError("The storage cannot be used (SlowDown).") from OSError(errno.EIO, "SlowDown")
        return super().read(key)


class Silent(Storage):
    """A storage that hangs until it is opened."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened = threading.Event()

    def answers(self) -> bool:
        return self.opened.wait(60)

    def exists(self, key: str) -> bool:
        self.opened.wait(60)
        return super().exists(key)


class Mounted(Storage):
    """A storage whose disk is mounted while a photo is read."""

    is_mounted = False

    def read(self, key: str) -> bytes:
        if not self.is_mounted and key.startswith("inputs/"):
            self.is_mounted = True
            raise UnavailableError("The storage cannot be used.") from FileNotFoundError(errno.ENOENT, "", key)
        return super().read(key)


def open_prefetcher(
    storage: Storage, complete: Callable[[VideoParameters], VideoParameters] = with_frames
) -> Prefetcher:
    memory = MemoryPlan([RankInfo(capacity=None, weights=0, device="cpu")], "float32")
    return Prefetcher(storage, MODEL, IntakeOptions(memory=memory, max_pixels=10**6, complete=complete), None)


def find(prefetcher: Prefetcher, job: Job, *, once: bool = False) -> Request | JobResult:
    return prefetcher.prepare("a-job", JobArguments(job=job), once=once)


def prepare(pool: ThreadPoolExecutor, prefetcher: Prefetcher, job: Job) -> "Future[Request | JobResult]":
    return pool.submit(find, prefetcher, job)


def test_a_photo_is_waited_for_while_the_storage_is_away(
    folder: Path, job: Job, pool, until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "FILE_TIMEOUT_S", 0.0)
    prefetcher = open_prefetcher(Storage(str(folder)))
    shutil.move(folder, folder.with_name("away"))
    done = prepare(pool, prefetcher, job)
    condition = until(lambda: (found := prefetcher.condition) and found.attempts >= 3 and found)
    assert (condition.effect, condition.job_ids) == ("No video is begun", ("a-job",))
    shutil.move(folder.with_name("away"), folder)
    assert done.result(60).photo.size == (64, 64)
    assert prefetcher.condition is None


def test_a_link_waits_for_its_storage_and_else_fails_with_the_link_before(folder: Path, job: Job, pool, until) -> None:
    def refuse(parameters: VideoParameters) -> VideoParameters:
        raise InputError("No model makes this.")

    link = job.model_copy(update={"image": last_frame_key("1" * 20)})
    prefetcher = open_prefetcher(Storage(str(folder)))
    shutil.move(folder, folder.with_name("away"))
    done = prepare(pool, prefetcher, link)
    until(lambda: prefetcher.condition)
    shutil.move(folder.with_name("away"), folder)
    for failing in (done.result, lambda _: find(open_prefetcher(Storage(str(folder)), refuse), link)):
        with pytest.raises(SvdqError, match=f"It continues the video of job {'1' * 20}, which failed") as caught:
            failing(60)
        assert not isinstance(caught.value, RefusedError)  # three of those in a row pause the intake


def test_a_photo_is_there_again_when_its_storage_is(folder: Path, job: Job) -> None:
    assert find(open_prefetcher(Mounted(str(folder))), job).photo


def test_a_photo_that_is_refused_alone_is_waited_for_and_not_for_ever(
    folder: Path, job: Job, pool, until, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Locked(str(folder))
    prefetcher = open_prefetcher(storage)
    done = prepare(pool, prefetcher, job)
    until(lambda: prefetcher.condition)
    storage.is_locked = False
    assert done.result(60).photo

    storage.is_locked = True
    monkeypatch.setattr(outages, "FILE_TIMEOUT_S", 0.0)
    with pytest.raises(SvdqError, match=r"could not be read or written for 0 minutes, though .*: SlowDown\.") as caught:
        find(open_prefetcher(storage), job)
    assert "svdq retry" in str(caught.value)


def test_the_last_photo_is_read_and_missed_like_the_first(folder: Path, job: Job) -> None:
    path = folder.with_name("last.png")
    Image.new("RGB", (90, 70), "red").save(path)
    key = Storage(str(folder)).put_input(path.read_bytes(), "png")
    size = {"width": 64, "height": 64, "frames": 5, "steps": 2, "fps": 16}
    both = WanJob(image=job.image, name="photo", seed=1, last_image=key, **size)
    found = find(open_prefetcher(Storage(str(folder))), both)
    first, last = found.photo, found.last_photo
    assert (first.size, last.size, last.getpixel((9, 9))) == ((64, 64), (64, 64), (255, 0, 0))
    (folder / key).unlink()
    with pytest.raises(SvdqError, match=rf"^Its photo {key} is not in the storage, or it was damaged"):
        find(open_prefetcher(Storage(str(folder))), both)


def test_a_color_profile_that_cannot_be_used_is_in_the_log_of_the_job(folder: Path, job: Job, caplog) -> None:
    path = folder.with_name("other.png")
    Image.new("RGB", (80, 80)).save(path, icc_profile=b"no profile")
    key = Storage(str(folder)).put_input(path.read_bytes(), "png")
    assert find(open_prefetcher(Storage(str(folder))), job.model_copy(update={"image": key})).photo
    assert any("Job a-job: The photo's color profile is ignored" in message for message in caplog.messages)


def test_a_folder_in_the_place_of_a_sidecar_fails_its_job(folder: Path, job: Job) -> None:
    (folder / "outputs/photo-a-job.json").mkdir(parents=True)
    with pytest.raises(SvdqError, match="Its output 'outputs/photo-a-job' cannot be read or written: Is a directory"):
        find(open_prefetcher(Storage(str(folder))), job)


def test_a_job_that_does_not_fit_the_defaults_of_the_model_fails(folder: Path, job: Job) -> None:
    wan = WanJob(image=job.image, name="photo", seed=1, interpolate=20)
    fill_in = {"frames": 5, "steps": 2, "width": 64, "height": 64, "fps": 24}
    prefetcher = open_prefetcher(Storage(str(folder)), lambda found: found.model_copy(update=fill_in))
    with pytest.raises(SvdqError, match="of the model fake: interpolate 20 is not more than fps 24; choose others"):
        find(prefetcher, wan)


def test_looking_ahead_waits_for_nothing(folder: Path, job: Job) -> None:
    prefetcher = open_prefetcher(Locked(str(folder)))
    with pytest.raises(UnavailableError):
        find(prefetcher, job, once=True)
    assert prefetcher.condition is None


@pytest.mark.usefixtures("quickly_said")
def test_a_storage_that_hangs_is_said_while_looking_ahead(folder: Path, job: Job, pool, until, caplog) -> None:
    caplog.set_level(logging.INFO)
    storage = Silent(str(folder))
    prefetcher = open_prefetcher(storage)
    done = pool.submit(find, prefetcher, job, once=True)
    condition = until(lambda: prefetcher.condition)
    assert "has not answered for" in condition.reason
    assert condition.job_ids == ("a-job",)
    storage.opened.set()
    assert done.result(60).photo
    assert prefetcher.condition is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_job_that_is_abandoned_is_waited_for_no_longer(folder: Path, job: Job, pool, until) -> None:
    storage = Locked(str(folder))
    prefetcher = open_prefetcher(storage)
    done = prepare(pool, prefetcher, job)
    until(lambda: prefetcher.condition)
    prefetcher.abandon("another")
    until(lambda: prefetcher.condition.attempts >= 4)
    prefetcher.abandon("a-job")
    with pytest.raises(NoLongerWantedError):
        done.result(60)
    storage.is_locked = False
    assert find(prefetcher, job).photo


def test_a_name_that_no_file_system_takes_fails_its_job(folder: Path, job: Job) -> None:
    (folder / "outputs").mkdir()
    too_long = job.model_copy(update={"name": "ä" * 190})
    with pytest.raises(SvdqError, match="File name too long") as caught:
        find(open_prefetcher(Storage(str(folder))), too_long)
    assert not isinstance(caught.value, UnavailableError), "which would be waited for"
