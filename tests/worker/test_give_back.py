"""A host that reaches Redis and not the storage: its taken jobs go back for others, and it takes none meanwhile."""

import threading
from pathlib import Path

import pytest

from svdq.producer.storage.storage import Storage
from svdq.worker import outages
from svdq.worker.intake import dispatcher
from tests.worker.test_intake import finished, take, take_later


class HungStorage(Storage):
    """A storage whose folder does not answer until it is told to."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answers = threading.Event()

    def exists(self, key: str) -> bool:
        self.answers.wait(120)
        return super().exists(key)


@pytest.mark.parametrize("kind", ["refused", "hung"])
def test_another_host_takes_what_cannot_be_begun(
    site, open_intake, until, monkeypatch, tmp_path: Path, caplog, kind: str
) -> None:
    monkeypatch.setattr(dispatcher, "GIVE_BACK_S", 0.3)
    monkeypatch.setattr(outages, "FIRST_DELAY_S", 0.05)
    mount = tmp_path / "mount"
    mount.write_text("what is in the way of the storage")
    hung = HungStorage(site.settings.storage)
    intake = open_intake(storage=hung if kind == "hung" else Storage(str(mount / "videos")))
    first = take_later(intake)
    job_ids = [site.submit() for _ in range(2)]
    until(lambda: "back to the queue" in caplog.text)
    until(lambda: site.queued() == job_ids)
    assert intake.condition is None or intake.condition.job_ids == ()
    other = open_intake()
    requests = [take(other), take(other)]
    assert [request.job_id for request in requests] == job_ids
    for request in requests:
        other.ended(finished(request))
    other.drain()
    assert first.empty()

    later = site.submit()
    mount.unlink()
    mount.mkdir()
    (mount / "videos").symlink_to(site.settings.storage)
    hung.answers.set()
    assert first.get(timeout=60).job_id == later
    assert caplog.text.count("back to the queue") == 1
