from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.producer.queue import SvdqQueue
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from svdq.producer.submitting.checking import BadPhotosError, Observer
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.sources import PhotoRequest
from svdq.producer.submitting.submission import submit, submit_all


def test_like(settings: Settings) -> None:
    recorded = {"image": "x", "name": "y", "frames": 9, "seed": 5, "formats": ["gif"], "decode_chunk_size": None}
    options = Draft(frames=3).with_defaults_from(recorded)
    assert (options.frames, options.seed, options.formats) == (3, 5, ("gif",))
    with pytest.raises(InputError, match="sparkle"):
        Draft().with_defaults_from({"sparkle": 1})


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
    spec = JobSpec(drafts=(Draft(fps=7), Draft(fps=8)), variations=2)
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


def test_a_photo_that_changes_meanwhile(connection: redis.Redis, settings: Settings, photos: list[Path]) -> None:
    class Change(Observer):
        def begin(self, work: str, total: int) -> None:
            if work == "storing":
                photos[4].write_bytes(photos[0].read_bytes())

    requests = [PhotoRequest(path=path, spec=JobSpec()) for path in photos[::2]]
    with pytest.raises(InputError, match="changed while"):
        list(submit_all(settings, requests, observer=Change()))
    assert SvdqQueue("svdq-default", connection=connection).count == 0


def test_notes_are_recorded_and_do_not_change_the_id(settings: Settings, photo: Path, connection: redis.Redis) -> None:
    [first] = submit_all(settings, [PhotoRequest(path=photo, spec=JobSpec(notes=(("prompt", "a dog"),)))])
    [second] = submit(settings, [photo])
    assert first.id == second.id
    assert view(connection, first.id).notes == {"prompt": "a dog"}
    assert "notes" not in view(connection, first.id).as_json()
