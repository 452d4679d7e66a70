"""The prompt in a text file beside a submitted photo."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.producer.queue import fetch, read_job
from svdq.producer.settings import Settings
from svdq.producer.submitting.checking import BadPhotosError, Observer
from svdq.producer.submitting.draft import Draft, sweep
from svdq.producer.submitting.entries import Submission
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.model_choice import expect
from svdq.producer.submitting.photos import check_data
from svdq.producer.submitting.sources import PhotoRequest, find_photos, read_prompt
from svdq.producer.submitting.submission import submit, submit_all

WAN = Draft(family="wan", seed=1)


class Notes(Observer):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.left_out: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def leave_out(self, reason: str) -> None:
        self.left_out.append(reason)


def prompt_of(connection: redis.Redis, submission: Submission) -> str | None:
    job = read_job(fetch(connection, submission.id))
    return None if job is None else job.model_dump().get("prompt")


@pytest.mark.parametrize(
    ("data", "prompt"),
    [
        (b"A cat jumps.", "A cat jumps."),
        (b"\xef\xbb\xbfA cat\r\njumps.\r\n", "A cat jumps."),
        ("  Ein Käse,\n\n\tスーパー  \n".encode(), "Ein Käse, スーパー"),
        (b"", ""),
        (b"\n", ""),
    ],
)
def test_text_files(tmp_path: Path, data: bytes, prompt: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    assert read_prompt(path) == prompt


def test_files_that_are_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    os.mkfifo(tmp_path / "fifo.txt")
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1"))
    (tmp_path / "utf-16.txt").write_bytes("a cat".encode("utf-16"))
    (tmp_path / "long.txt").write_bytes(b"x" * 100_000)
    for name in ("folder.txt", "none.txt", "latin.txt/a.txt"):
        assert read_prompt(tmp_path / name) is None
    for name, says in (
        ("latin.txt", "not UTF-8"),
        ("utf-16.txt", "not UTF-8"),
        ("long.txt", "65,536 bytes"),
        ("fifo.txt", "not a regular file"),
    ):
        with pytest.raises(InputError, match=f"{name}.*{says}"):
            read_prompt(tmp_path / name)


def test_the_file_beside_a_photo_is_its_prompt(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    (plain,) = submit(settings, [photo], WAN)
    assert prompt_of(connection, plain) == ""
    photo.with_suffix(".txt").write_text("A wave breaks.\n")
    (submission,) = submit(settings, [photo], WAN)
    assert prompt_of(connection, submission) == "A wave breaks."
    (again,) = submit(settings, [photo], Draft(prompt="A wave breaks.", seed=1))
    assert (again.id, again.is_new) == (submission.id, False)
    (given,) = submit(settings, [photo], Draft(prompt="Another.", seed=1))
    assert prompt_of(connection, given) == "Another."
    (none,) = submit(settings, [photo], Draft(prompt="", seed=1))
    assert none.id == plain.id


@pytest.mark.parametrize("options", [WAN, Draft(family="svd")])
def test_a_photo_whose_name_has_no_room_for_a_suffix(
    connection: redis.Redis, settings: Settings, photo: Path, options: Draft
) -> None:
    (submission,) = submit(settings, [photo.rename(photo.with_name("x" * 255))], options)
    assert prompt_of(connection, submission) == ("" if options is WAN else None)


def test_a_family_without_prompts_ignores_them(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    (before,) = submit(settings, [photo], Draft(seed=1))
    photo.with_suffix(".txt").write_bytes(b"\xff not even text")
    observer = Notes()
    request = PhotoRequest(path=photo, spec=JobSpec(drafts=(Draft(seed=1),), expected=expect(settings)))
    (submission,) = submit_all(settings, [request], observer=observer)
    assert submission.id == before.id
    ignored, default = observer.notes
    assert "takes none: 1; give --family wan" in ignored
    assert "for Stable Video Diffusion, the default: no worker is running" in default


def test_a_bad_prompt_is_a_bad_photo(connection: redis.Redis, settings: Settings, tmp_path: Path) -> None:
    requests = []
    for number, data in enumerate((b"good", b"bad \x07", b"x" * 6000, b"\xff", None)):
        photo = tmp_path / f"{number}.jpg"
        Image.new("RGB", (8, 8), (number, 0, 0)).save(photo)
        if data is not None:
            photo.with_suffix(".txt").write_bytes(data)
        requests.append(PhotoRequest(path=photo, spec=JobSpec(drafts=(WAN,)), where=f"line {number}: "))
    with pytest.raises(BadPhotosError) as error:
        list(submit_all(settings, requests))
    assert len(error.value.reasons) == 3
    observer = Notes()
    good, without = submit_all(settings, requests, skip_bad=True, observer=observer)
    assert (prompt_of(connection, good), prompt_of(connection, without)) == ("good", "")
    control, long, latin = observer.left_out
    assert control.startswith(f"line 1: The prompt in '{tmp_path}/1.txt': bad")
    assert "1.txt" in control
    assert "without control characters" in control
    assert "at most 5,000 characters" in long
    assert "3.txt' is not UTF-8" in latin


def test_a_sweep_over_prompts_has_its_own(connection: redis.Redis, settings: Settings, photo: Path) -> None:
    photo.with_suffix(".txt").write_text("beside")
    spec = JobSpec(drafts=sweep(WAN, ["prompt=a,b"]))
    found = list(submit_all(settings, [PhotoRequest(path=photo, spec=spec)]))
    assert [prompt_of(connection, each) for each in found] == ["a", "b"]
    spec = JobSpec(drafts=sweep(WAN, ["guidance_scale=1,2"]))
    found = list(submit_all(settings, [PhotoRequest(path=photo, spec=spec)]))
    assert [prompt_of(connection, each) for each in found] == ["beside", "beside"]


def test_an_upload_has_no_file_beside_it(
    connection: redis.Redis, settings: Settings, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = photo.read_bytes()
    photo.with_suffix(".txt").write_text("of somebody else")
    monkeypatch.chdir(photo.parent)
    checked = replace(check_data(data, Path(photo.name), settings.max_pixels), data=data)
    request = PhotoRequest(path=checked.path, spec=JobSpec(drafts=(WAN,)), photo=checked)
    (submission,) = submit_all(settings, [request])
    assert prompt_of(connection, submission) == ""


@pytest.mark.parametrize(
    ("photo_name", "prompt_name"),
    [
        ("UP.PNG", "UP.TXT"),
        ("UP.PNG", "up.txt"),
        ("UP.PNG", "Up.txt"),
        ("c\u00fcp.jpg", "cu\u0308p.txt"),
        ("cu\u0308p.jpg", "c\u00fcp.TXT"),
    ],
)
def test_a_prompt_has_the_name_of_its_photo_as_people_read_it(
    connection: redis.Redis, settings: Settings, tmp_path: Path, photo_name: str, prompt_name: str
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / photo_name)
    (tmp_path / prompt_name).write_text("A wave.")
    assert find_photos([str(tmp_path)]).num_others == 0
    observer = Notes()
    request = PhotoRequest(path=tmp_path / photo_name, spec=JobSpec(drafts=(WAN,)))
    (submission,) = submit_all(settings, [request], observer=observer)
    assert prompt_of(connection, submission) == "A wave."
    assert not any("no prompt" in note for note in observer.notes)


def test_photos_without_a_prompt_are_counted(settings: Settings, photo: Path, tmp_path: Path) -> None:
    observer = Notes()
    Image.new("RGB", (8, 8)).save(tmp_path / "other.png")
    (tmp_path / "other.txt").write_text("A wave.")
    photos = [PhotoRequest(path=path, spec=JobSpec(drafts=(WAN,))) for path in (photo, tmp_path / "other.png")]
    list(submit_all(settings, photos, observer=observer))
    assert any(note.startswith("1 of 2 photos have no prompt") for note in observer.notes)


def test_prompts_are_no_other_files(photo: Path) -> None:
    photo.with_suffix(".txt").write_text("x")
    photo.with_name("notes.txt").write_text("x")
    photo.with_name("a.pdf").write_text("x")
    assert find_photos([str(photo.parent)]).num_others == 2
