from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.producer.queue import SvdqQueue, fetch, read_job
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import load_settings
from svdq.producer.status.job_view import view
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import SubmitOptions
from svdq.producer.submitting.photo_requests import PhotoRequest
from svdq.producer.submitting.submission import BadPhotosError, Observer, Submission, submit, submit_all


def test_the_same_again_is_the_same_job(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    options = SubmitOptions(frames=8, formats=("mp4", "gif"))
    (first,) = submit(settings, [photo], options)
    (again,) = submit(settings, [photo], options, priority="high")
    assert first.is_new
    assert not again.is_new
    assert (again.id, again.seed, again.status) == (first.id, first.seed, "queued")
    (forced,) = submit(settings, [photo], options, force=True)
    assert forced.id != first.id
    assert forced.image == first.image
    (seeded,) = submit(settings, [photo], SubmitOptions(frames=8, formats=("mp4", "gif"), seed=first.seed))
    assert seeded.id != first.id
    job = read_job(fetch(connection, first.id))
    assert job is not None
    assert (job.seed, job.frames, job.formats, job.name) == (first.seed, 8, ("mp4", "gif"), "a photo")
    assert len(list(Path(settings.storage, "inputs").iterdir())) == 1


def test_everything_is_checked_before_anything_is_stored(
    home: Path, settings: Settings, photo: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError):
        submit(settings, [photo, tmp_path / "none.jpg"], SubmitOptions())
    with pytest.raises(InputError, match="frames 0"):
        submit(settings, [photo], SubmitOptions(frames=0))
    with pytest.raises(InputError, match="priority"):
        submit(settings, [photo], SubmitOptions(), priority="highest")
    assert not home.exists()


def test_nothing_is_stored_when_redis_is_away(home: Path, photo: Path) -> None:
    with pytest.raises(UnavailableError):
        submit(load_settings(redis_url="redis://127.0.0.1:1"), [photo], SubmitOptions())
    assert not home.exists()


def test_like(settings: Settings) -> None:
    recorded = {"image": "x", "name": "y", "frames": 9, "seed": 5, "formats": ["gif"], "decode_chunk_size": None}
    options = SubmitOptions(frames=3).with_defaults_from(recorded)
    assert (options.frames, options.seed, options.formats) == (3, 5, ("gif",))
    with pytest.raises(InputError, match="sparkle"):
        SubmitOptions().with_defaults_from({"sparkle": 1})


class Log(Observer):
    """Records the calls of an observer."""

    def __init__(self) -> None:
        self.work: list[tuple[str, int]] = []
        self.done: list[int] = []
        self.left_out: list[str] = []

    def begin(self, work: str, total: int) -> None:
        self.work.append((work, total))
        self.done.append(0)

    def advance(self) -> None:
        self.done[-1] += 1

    def leave_out(self, reason: str) -> None:
        self.left_out.append(reason)


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Three good ones and two bad ones."""
    paths = [tmp_path / f"{number}.png" for number in range(5)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    paths[1].write_text("no photo")
    paths[3].unlink()
    return paths


def test_many_photos(connection: redis.Redis, settings: Settings, photos: list[Path]) -> None:
    spec = JobSpec(options=(SubmitOptions(fps=7), SubmitOptions(fps=8)), variations=2)
    log = Log()
    requests = [PhotoRequest(path=path, spec=spec) for path in photos[::2]]
    first = list(submit_all(settings, requests, observer=log))
    assert log.work == [("checking", 3), ("storing", 3), ("enqueueing", 12)]
    assert log.done == [3, 3, 12]
    assert all(submission.is_new for submission in first)
    assert [submission.name for submission in first] == ["0"] * 4 + ["2"] * 4 + ["4"] * 4
    assert SvdqQueue("svdq-default", connection=connection).get_job_ids() == [submission.id for submission in first]
    again = list(submit_all(settings, requests))
    assert [(s.id, s.seed, s.is_new) for s in again] == [(s.id, s.seed, False) for s in first]


def test_bad_photos_refuse_all(home: Path, settings: Settings, photos: list[Path]) -> None:
    requests = [PhotoRequest(path=path, spec=JobSpec(), where=f"row {row}: ") for row, path in enumerate(photos)]
    with pytest.raises(BadPhotosError, match=r"^2 of 5 photos .*--skip-bad") as caught:
        list(submit_all(settings, requests))
    assert [reason[:7] for reason in caught.value.reasons] == ["row 1: ", "row 3: "]
    with pytest.raises(BadPhotosError, match=r"^row 1: .*--skip-bad") as caught:
        list(submit_all(settings, requests[:2]))
    assert caught.value.reasons == ()
    with pytest.raises(InputError):
        list(submit_all(settings, [requests[1], requests[3]], skip_bad=True))
    assert not home.exists()


def test_bad_photos_are_left_out(connection: redis.Redis, settings: Settings, photos: list[Path]) -> None:
    log = Log()
    requests = [PhotoRequest(path=path, spec=JobSpec()) for path in photos]
    assert [s.name for s in submit_all(settings, requests, skip_bad=True, observer=log)] == ["0", "2", "4"]
    assert [str(path) in reason for path, reason in zip(photos[1::2], log.left_out, strict=True)] == [True, True]


def test_a_photo_that_changes_meanwhile(connection: redis.Redis, settings: Settings, photos: list[Path]) -> None:
    class Change(Observer):
        def begin(self, work: str, total: int) -> None:
            if work == "storing":
                photos[4].write_bytes(photos[0].read_bytes())

    requests = [PhotoRequest(path=path, spec=JobSpec()) for path in photos[::2]]
    with pytest.raises(InputError, match="changed while"):
        list(submit_all(settings, requests, observer=Change()))
    assert SvdqQueue("svdq-default", connection=connection).count == 0


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: bytes([data[0] ^ 1]) + data[1:]])
def test_a_photo_that_was_damaged_in_the_storage_is_stored_again(
    connection: redis.Redis, settings: Settings, photo: Path, damage: Callable[[bytes], bytes]
) -> None:
    (submission,) = submit(settings, [photo], SubmitOptions())
    stored = Path(settings.storage, submission.image)
    stored.write_bytes(damage(photo.read_bytes()))
    (again,) = submit(settings, [photo], SubmitOptions())
    assert again.id == submission.id
    assert stored.read_bytes() == photo.read_bytes()


def upload(settings: Settings, data: bytes, name: str = "a.jpg", **spec: object) -> list[Submission]:
    request = PhotoRequest(path=Path(name), spec=JobSpec(**spec), data=data)  # type: ignore[arg-type]
    return list(submit_all(settings, [request]))


def test_an_upload_is_the_same_job_as_its_file(settings: Settings, photo: Path, connection: redis.Redis) -> None:
    [sent] = upload(settings, photo.read_bytes(), "beach/ä.png")
    assert sent.is_new
    [from_file] = submit_all(settings, [PhotoRequest(path=photo, spec=JobSpec())], connection=connection)
    assert (from_file.id, from_file.is_new, from_file.seed) == (sent.id, False, sent.seed)
    found = view(connection, sent.id)
    assert (found.name, found.photo) == ("ä", "beach/ä.png")  # no path of this machine
    assert Storage(settings.storage).read_input(sent.image) == photo.read_bytes()


def test_notes_are_recorded_and_do_not_change_the_id(settings: Settings, photo: Path, connection: redis.Redis) -> None:
    [first] = upload(settings, photo.read_bytes(), notes=(("prompt", "a dog"),))
    [second] = upload(settings, photo.read_bytes())
    assert first.id == second.id
    assert view(connection, first.id).notes == {"prompt": "a dog"}
    assert "notes" not in view(connection, first.id).as_json()


@pytest.mark.parametrize(("data", "reason"), [(b"", "0 bytes"), (b"hello", "is not a photo")])
def test_a_bad_upload_leaves_nothing_behind(settings: Settings, data: bytes, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        upload(settings, data)
    assert not Path(settings.storage).exists()
