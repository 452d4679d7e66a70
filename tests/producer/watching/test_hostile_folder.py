"""A real watcher over a folder in which somebody else plants links, FIFOs and broken files."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.producer import job_control
from svdq.producer.queue import SvdqQueue, read_job
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import load_settings
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.watching.folder_config import FileFilter, WatchOptions
from svdq.producer.watching.state import Event
from svdq.producer.watching.watcher import watch

Once = Callable[..., list[Event]]


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


@pytest.fixture
def once(settings: Settings, inbox: Path) -> Once:
    """Watch the folder once; return the events."""

    def once(on_success: str = "delete", storage: Path | None = None) -> list[Event]:
        events: list[Event] = []
        options = WatchOptions(
            selection=FileFilter(recursive=True), stable_for_s=0.05, on_success=on_success, once=True
        )
        own = load_settings(storage=str(storage)) if storage else settings
        watch(own, inbox, JobSpec(), options, events.append, threading.Event().is_set)
        return events[1:-1]

    return once


def save_photo(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((64, 48), 60).convert("RGB").save(path)
    return path


def names(connection: redis.Redis) -> set[str]:
    """The names of the jobs in the default queue."""
    return {job.name for job in map(read_job, SvdqQueue(connection=connection).jobs) if job is not None}


def kinds(events: list[Event]) -> dict[str | None, str]:
    return {event.path: event.kind for event in events}


def test_reasons_overwrite_no_files_and_follow_no_links(once: Once, inbox: Path, tmp_path: Path) -> None:
    precious, own = tmp_path / "precious", inbox / "rejected" / "own.jpg.txt"
    precious.write_text("precious")
    (inbox / "rejected").mkdir()
    (inbox / "rejected" / "bad.jpg.txt").symlink_to(precious)
    (inbox / "rejected" / "dangling.jpg.txt").symlink_to(tmp_path / "made")
    own.write_text("mine")
    for name in ("bad.jpg", "dangling.jpg", "own.jpg"):
        (inbox / name).write_text("no photo")
    assert set(kinds(once()).values()) == {"rejected"}
    assert (precious.read_text(), own.read_text()) == ("precious", "mine")
    assert not (tmp_path / "made").exists()
    for name in ("bad.jpg", "dangling.jpg", "own.jpg"):
        assert (inbox / "rejected" / name).read_text() == "no photo"


@pytest.mark.parametrize("link", ["rejected", "rejected/day"])
def test_rejected_files_are_not_moved_through_links(once: Once, inbox: Path, tmp_path: Path, link: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (inbox / link).parent.mkdir(exist_ok=True)
    (inbox / link).symlink_to(elsewhere)
    (inbox / "day").mkdir()
    (inbox / "day" / "bad.jpg").write_text("no photo")
    (event,) = (event for event in once() if event.kind == "rejected")
    assert "symbolic link" in event.text
    assert (inbox / "day" / "bad.jpg").read_text() == "no photo"
    assert list(elsewhere.iterdir()) == []


def test_linked_photos_and_folders_are_reported_and_not_followed(
    once: Once, inbox: Path, tmp_path: Path, connection: redis.Redis
) -> None:
    secret = save_photo(tmp_path / "secrets" / "secret.jpg")
    save_photo(inbox / "a.jpg")
    (inbox / "link.jpg").symlink_to(secret)
    (inbox / "folder").symlink_to(secret.parent)
    os.mkfifo(inbox / "pipe.jpg")
    ignored = {"link.jpg": "ignored", "folder": "ignored", "pipe.jpg": "ignored"}
    assert kinds(once()) == {"a.jpg": "submitted", **ignored}
    assert once() == []  # each is reported once
    assert names(connection) == {"a"}
    assert secret.exists()
    assert (inbox / "link.jpg").is_symlink()


def test_photos_are_not_moved_through_links(once: Once, inbox: Path, tmp_path: Path, connection: redis.Redis) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_photo(inbox / "day" / "a.jpg")
    (inbox / "done").symlink_to(elsewhere)
    with pytest.raises(InputError, match="symbolic link"):
        once("move:done")
    assert names(connection) == set()
    (inbox / "done").unlink()
    (inbox / "done").mkdir()
    (inbox / "done" / "day").symlink_to(elsewhere)
    assert [event.kind for event in once("move:done")] == ["submitted", "problem"]
    assert (inbox / "day" / "a.jpg").exists()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("on_success", ["delete", "move:../link/done"])
def test_folders_of_svdq_are_recognized_through_links(
    once: Once, inbox: Path, tmp_path: Path, connection: redis.Redis, on_success: str
) -> None:
    (tmp_path / "link").symlink_to(inbox)
    made = save_photo(inbox / "store" / "outputs" / "made.png")
    moved = save_photo(inbox / "done" / "moved.jpg") if "done" in on_success else None
    save_photo(inbox / "a.jpg")
    for _ in range(2):
        once(on_success, tmp_path / "link" / "store")
    assert names(connection) == {"a"}
    assert made.exists()
    assert moved is None or moved.exists()


@pytest.mark.parametrize("text", ['seed = "x"', "seed = 2027-01-31", "seed = [7]", f"seed = {'[' * 9999}"])
def test_an_invalid_file_holds_back_its_photos_only(
    once: Once, inbox: Path, connection: redis.Redis, text: str
) -> None:
    for folder in ("a", "b"):
        save_photo(inbox / folder / f"{folder}.jpg")
    (inbox / "a" / "svdq.toml").write_text(text)
    assert kinds(once()) == {"a/a.jpg": "problem", "b/b.jpg": "submitted"}
    assert names(connection) == {"b"}


def test_a_linked_svdq_toml_is_not_read(once: Once, inbox: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("password = 'hunter2'")
    (inbox / "day").mkdir()
    (inbox / "day" / "svdq.toml").symlink_to(tmp_path / "secret")
    save_photo(inbox / "day" / "a.jpg")
    (problem,) = once()
    assert "symbolic link" in problem.text
    assert "password" not in problem.text


def test_a_photo_that_was_not_rendered_is_queued_again_before_it_is_moved(
    once: Once, connection: redis.Redis, inbox: Path
) -> None:
    photo = save_photo(inbox / "a.jpg")
    [event] = once("keep")
    for on_success in ("keep", "move:done"):
        job_control.cancel(connection, str(event.job_id))
        os.utime(photo, ns=(1, 1 if on_success == "keep" else 2))  # it is known by its record, and touched
        [again] = once(on_success)
        assert (again.kind, again.text) == ("submitted", f"{event.job_id}  a.jpg (queued again, canceled before)")
        assert names(connection) == {"a"}


def test_moved_photos_are_not_submitted_by_a_run_that_moves_nothing(
    once: Once, connection: redis.Redis, inbox: Path
) -> None:
    save_photo(inbox / "day" / "a.jpg")
    assert kinds(once("move:done")) == {"day/a.jpg": "submitted"}
    assert (inbox / "done" / "day" / "a.jpg").exists()
    save_photo(inbox / "b.jpg")
    for on_success in ("keep", "move:elsewhere", "keep"):
        assert set(kinds(once(on_success))) <= {"b.jpg"}
    assert len(SvdqQueue(connection=connection)) == 2
