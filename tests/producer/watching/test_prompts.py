"""The prompts beside the photos of a watched folder."""

import os
import re
from pathlib import Path

import pytest
import redis

from svdq.producer.settings import Settings
from svdq.producer.submitting.draft import Draft
from tests.producer.watching import bench as shared

WAN = Draft(family="wan", seed=1)


class Bench(shared.Bench):
    """Keeps the files that wait between two calls."""

    connection: redis.Redis

    @property
    def prompts(self) -> list[str | None]:
        return [job.model_dump().get("prompt") for job in shared.jobs(self.connection)]


@pytest.fixture
def bench(settings: Settings, connection: redis.Redis, photo: Path, tmp_path: Path) -> Bench:
    root = tmp_path / "inbox"
    (root / "day").mkdir(parents=True)
    photo.rename(root / "day" / "a.jpg")
    bench = Bench(settings, root, WAN)
    bench.connection = connection
    return bench


@pytest.fixture
def text(bench: Bench) -> Path:
    return bench.root / "day" / "a.txt"


def test_the_file_beside_a_photo_is_its_prompt(bench: Bench, text: Path) -> None:
    text.write_bytes(b"\xef\xbb\xbfA wave\r\nbreaks.\r\n")
    bench.process("day/a.jpg")
    assert bench.prompts == ["A wave breaks."]


def test_a_prompt_may_be_in_capital_letters(bench: Bench, text: Path) -> None:
    text.with_name("A.TXT").write_text("A wave.")
    bench.process("day/a.jpg")
    assert bench.prompts == ["A wave."]


def test_a_photo_waits_until_its_prompt_does_not_change(bench: Bench, text: Path) -> None:
    text.write_text("A wave")
    bench.process("day/a.jpg", times=1)
    assert bench.prompts == []
    text.write_text("A wave breaks.")
    bench.process("day/a.jpg", times=1)
    assert bench.prompts == []
    bench.process("day/a.jpg", times=1)
    assert bench.prompts == ["A wave breaks."]


def test_a_prompt_that_comes_too_late_counts_for_the_next_version(bench: Bench, text: Path) -> None:
    bench.process("day/a.jpg")
    text.write_text("late")
    bench.process("day/a.txt")
    assert bench.prompts == [""]
    assert [event.kind for event in bench.events] == ["submitted"]
    os.utime(text.with_suffix(".jpg"))
    bench.process("day/a.jpg")
    assert bench.prompts == ["", "late"]


def test_the_command_wins_over_the_file_and_the_file_over_the_folder(bench: Bench, text: Path) -> None:
    config = bench.root / "svdq.toml"
    config.write_text('prompt = "of the folder"\nnegative_prompt = "blur"\n')
    bench.process("day/a.jpg")
    text.write_text("of the photo")
    os.utime(text.with_suffix(".jpg"))
    bench.process("day/a.jpg")
    bench.options = Draft(family="wan", seed=1, prompt="of the command")
    os.utime(text.with_suffix(".jpg"))
    bench.process("day/a.jpg")
    bench.options = WAN
    text.write_text("\n")  # none
    os.utime(text.with_suffix(".jpg"))
    bench.process("day/a.jpg")
    assert bench.prompts == ["of the folder", "of the photo", "of the command", ""]
    assert {job.model_dump()["negative_prompt"] for job in shared.jobs(bench.connection)} == {"blur"}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"K\xe4se", "a.txt' is not UTF-8"),
        (b"x" * 100_000, "a.txt' has more than 65,536 bytes"),
        (b"x" * 6000, "a.txt': x+… .* at most 5,000 characters"),
        (b"a\x07", "a.txt': .* without control characters"),
    ],
)
def test_a_photo_waits_while_its_prompt_is_bad(bench: Bench, text: Path, data: bytes, says: str) -> None:
    text.write_bytes(data)
    bench.process("day/a.jpg")
    (event,) = bench.events
    assert event.kind == "problem"
    assert re.search(says, event.text)
    assert event.text.endswith("Its photos wait until this is corrected.")
    assert bench.prompts == []
    text.write_text("good")
    for file in bench.waiting.files.values():
        file.due_s = 0.0
    bench.process("day/a.jpg")
    assert bench.prompts == ["good"]


def test_links_are_not_followed_and_folders_are_no_prompts(bench: Bench, text: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    text.symlink_to(secret)
    bench.process("day/a.jpg")
    assert "symbolic link" in bench.events[0].text
    assert bench.prompts == []
    text.unlink()
    text.mkdir()
    for file in bench.waiting.files.values():
        file.due_s = 0.0
    bench.process("day/a.jpg")
    assert bench.prompts == [""]


@pytest.mark.parametrize("on_success", ["move:done", "delete"])
def test_a_prompt_goes_with_its_photo(bench: Bench, text: Path, on_success: str) -> None:
    done = bench.root / "done" / "day"
    if on_success != "delete":
        done.mkdir(parents=True)
        (done / "a.jpg").write_text("another photo of that name")
        (done / "a.txt").write_text("its prompt")
    bench.on_success = on_success
    text.write_text("A wave breaks.")
    bench.process("day/a.jpg")
    assert bench.prompts == ["A wave breaks."]
    assert list(text.parent.iterdir()) == []
    if on_success != "delete":
        assert (done / "a-2.txt").read_text() == "A wave breaks."
        assert sorted(path.name for path in done.iterdir()) == ["a-2.jpg", "a-2.txt", "a.jpg", "a.txt"]


def test_a_prompt_of_two_photos_stays_for_the_second(bench: Bench, text: Path) -> None:
    text.with_suffix(".JPG").write_bytes(text.with_suffix(".jpg").read_bytes() + b"another")
    text.write_text("of both")
    bench.on_success = "move:done"
    bench.process("day/a.jpg")
    assert text.exists()
    bench.process("day/a.JPG")
    assert not text.exists()
    assert bench.prompts == ["of both", "of both"]


def test_text_files_are_reported_where_they_are_no_prompts(bench: Bench, text: Path) -> None:
    text.write_text("x")
    (bench.root / "day" / "b.txt").write_text("x")
    bench.process("day/a.txt")
    assert bench.events == []
    bench.process("day/b.txt")
    assert bench.events[-1].text == "day/b.txt is ignored: there is no photo beside it whose prompt it can be."
    bench.options = Draft(seed=1, family="svd")
    bench.process("day/a.txt")
    assert bench.events[-1].text == "day/a.txt is ignored: this family of models takes no prompts."
    bench.process("day/a.jpg")
    assert bench.prompts == [None]
