"""The prompts beside the photos of a watched folder."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from svdq.producer.job import Job
from svdq.producer.queue import SvdqQueue, read_job, session
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.job_spec import JobSpec
from svdq.producer.submitting.parameters import SubmitOptions
from svdq.producer.watching.directory import signature
from svdq.producer.watching.folder_config import FolderConfig, PostSubmit, Selection, WatchOptions
from svdq.producer.watching.processor import Processor
from svdq.producer.watching.scanner import Debounce
from svdq.producer.watching.state import Event, State

WAN = SubmitOptions(family="wan", seed=1)


class Bench:
    """A watched folder, and its processor after a restart."""

    def __init__(self, settings: Settings, root: Path, state: State, connection: redis.Redis) -> None:
        self.settings, self.root, self.state, self.connection = settings, root, state, connection
        self.events: list[Event] = []
        self.stable_for_s = 0.0
        self.start(WAN)

    def start(self, options: SubmitOptions, on_success: str = "keep") -> None:
        self.waiting = Debounce(0)
        self.processor = Processor(
            options=WatchOptions(selection=Selection(recursive=True), stable_for_s=self.stable_for_s),
            storage=Storage(self.settings.storage),
            max_pixels=self.settings.max_pixels,
            state=self.state,
            config=FolderConfig(self.root, JobSpec(options=(options,))),
            post_submit=PostSubmit.parse(on_success, self.root),
            waiting=self.waiting,
            report=self.events.append,
        )

    def process(self, path: str, times: int = 2) -> None:
        """Process a file that has stopped growing; by default once more after its prompt was seen."""
        version = signature(self.root, path)
        assert version is not None
        self.waiting.update(path, version, time.monotonic())
        for _ in range(times):
            for file in self.waiting.due(time.monotonic()):
                self.processor.process(file, self.connection)

    @property
    def jobs(self) -> list[Job]:
        found = map(read_job, SvdqQueue(connection=self.connection).jobs)
        return [job for job in found if job is not None]

    @property
    def prompts(self) -> list[str | None]:
        return [job.model_dump().get("prompt") for job in self.jobs]


@pytest.fixture
def bench(settings: Settings, connection: redis.Redis, photo: Path, tmp_path: Path) -> Iterator[Bench]:
    root = tmp_path / "inbox"
    (root / "day").mkdir(parents=True)
    photo.rename(root / "day" / "a.jpg")
    with State(settings.home, root) as state, session(settings) as connected:
        yield Bench(settings, root, state, connected)


@pytest.fixture
def text(bench: Bench) -> Path:
    return bench.root / "day" / "a.txt"


def test_the_file_beside_a_photo_is_its_prompt(bench: Bench, text: Path) -> None:
    text.write_bytes(b"\xef\xbb\xbfA wave\r\nbreaks.\r\n")
    bench.process("day/a.jpg")
    assert bench.prompts == ["A wave breaks."]


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
    bench.start(SubmitOptions(family="wan", seed=1, prompt="of the command"))
    os.utime(text.with_suffix(".jpg"))
    bench.process("day/a.jpg")
    bench.start(WAN)
    text.write_text("\n")  # none
    os.utime(text.with_suffix(".jpg"))
    bench.process("day/a.jpg")
    assert bench.prompts == ["of the folder", "of the photo", "of the command", ""]
    assert {job.model_dump()["negative_prompt"] for job in bench.jobs} == {"blur"}


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


def test_a_photo_whose_name_ends_in_txt_is_not_its_own_prompt(bench: Bench, text: Path) -> None:
    text.with_suffix(".jpg").rename(text)
    bench.processor.options = WatchOptions(selection=Selection(recursive=True, globs=("*",)), stable_for_s=0)
    bench.process("day/a.txt")
    assert [event.kind for event in bench.events] == ["submitted"]
    assert bench.prompts == [""]


@pytest.mark.parametrize("on_success", ["move:done", "delete"])
def test_a_prompt_goes_with_its_photo(bench: Bench, text: Path, on_success: str) -> None:
    done = bench.root / "done" / "day"
    if on_success != "delete":
        done.mkdir(parents=True)
        (done / "a.jpg").write_text("another photo of that name")
        (done / "a.txt").write_text("its prompt")
    bench.start(WAN, on_success)
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
    bench.start(WAN, "move:done")
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
    bench.start(SubmitOptions(seed=1, family="svd"))
    bench.process("day/a.txt")
    assert bench.events[-1].text == "day/a.txt is ignored: this family of models takes no prompts."
    bench.process("day/a.jpg")
    assert bench.prompts == [None]
