"""Photos that are no files: uploads."""

from pathlib import Path

import pytest
import redis

from svdq.pipeline.errors import InputError
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.submission import Request, Submission, submit_all


def upload(settings: Settings, data: bytes, name: str = "a.jpg", **spec: object) -> list[Submission]:
    request = Request(path=Path(name), spec=JobSpec(**spec), data=data)  # type: ignore[arg-type]
    return list(submit_all(settings, [request]))


def test_an_upload_is_the_same_job_as_its_file(settings: Settings, photo: Path, connection: redis.Redis) -> None:
    [sent] = upload(settings, photo.read_bytes(), "beach/ä.png")
    assert sent.is_new
    [from_file] = submit_all(settings, [Request(path=photo, spec=JobSpec())], connection=connection)
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
