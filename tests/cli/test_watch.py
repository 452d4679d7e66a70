"""`svdq watch` as a user runs it: real processes, a real Redis."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from PIL import Image

from svdq.cli import watch as watch_command
from svdq.cli.main import run
from svdq.producer.embedded_redis import find_server
from svdq.producer.queue import SvdqQueue, read_job
from svdq.producer.settings import Settings
from svdq.producer.storage import storage as storage_module
from svdq.producer.storage.storage import Storage
from svdq.producer.watching import watcher
from svdq.producer.watching.processor import Processor
from svdq.producer.watching.scanner import Scanner
from tests.finished import add_video
from tests.forks import Fork
from tests.queued import write_files
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

Drop = Callable[..., bytes]


class Watch:
    """One `svdq watch --json` and its events."""

    def __init__(self, inbox: Path, *arguments: object, **environment: str) -> None:
        number = len(list(inbox.parent.glob("events *")))
        self._output, self._errors = (inbox.parent / f"{name} {number}" for name in ("events", "errors"))
        words = ["watch", str(inbox), "--json", "--stable-for", "200ms", *map(str, arguments)]
        self.process = Fork(words, self._output, self._errors, warn=False, **environment)

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = self._output.read_text().splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if event["event"] == kind]

    def wait_for(self, kind: str, number: int = 1) -> list[dict[str, Any]]:
        """Wait until so many events of a kind were reported, and return them."""

        def come() -> list[dict[str, Any]]:
            if self.process.poll() is not None and len(self.events(kind)) < number:
                pytest.fail(f"it ended with {self.process.returncode}: {self._errors.read_text()}")
            return self.events(kind) if len(self.events(kind)) >= number else []

        return wait_until(come, f"{number} x {kind}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and return the exit code; an ordered end says nothing on stderr."""
        self.process.send_signal(number)
        code = self.process.wait()
        assert self._errors.read_text() == ""
        return code


@pytest.fixture
def inbox(home: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "inbox"
    folder.mkdir()
    return folder


@pytest.fixture
def drop(inbox: Path) -> Drop:
    """Drop a photo that no other has, as rsync does."""
    numbers = iter(range(1000))

    def drop(path: str, *, into: Path = inbox) -> bytes:
        target = into / path
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.Xq3Zt1")
        Image.effect_noise((64, 48), 60).convert("RGB").save(temporary, "JPEG", comment=str(next(numbers)))
        data = temporary.read_bytes()
        temporary.rename(target)
        return data

    return drop


@pytest.fixture
def watch(inbox: Path) -> Iterator[Callable[..., Watch]]:
    watches = []

    def start(*arguments: object, **environment: str) -> Watch:
        watches.append(Watch(inbox, *arguments, **environment))
        return watches[-1]

    yield start
    for one in watches:
        one.process.kill()
        one.process.wait()


def jobs(connection: redis.Redis) -> dict[str, Any]:
    """The jobs in the default queue, by their names."""
    found = map(read_job, SvdqQueue(connection=connection).jobs)
    return {job.name: job for job in found if job is not None}


def test_all_ways_of_dropping_photos_make_jobs(
    watch: Callable[..., Watch], drop: Drop, inbox: Path, tmp_path: Path, connection: redis.Redis
) -> None:
    drop("old.jpg")
    watching = watch("--recursive", "--on-success", "move:done", "--frames", "14", "--fps", "5")
    watching.wait_for("watching")

    drop("renamed.JPG")
    drop(os.fsdecode(b"caf\xe9.jpg"))  # which is no UTF-8
    drop("trip/day 1/deep.jpg")
    (inbox / "trip" / "svdq.toml").write_text('frames = 3\nsize = "128x64"\n')
    drop("moved in/with its folder.jpg", into=tmp_path)
    (tmp_path / "moved in").rename(inbox / "moved in")
    data = drop("whole.jpg", into=tmp_path)
    rest = iter(data)
    with (inbox / "slow.jpg").open("wb") as slow:

        def grow() -> bool:
            slow.write(bytes([next(rest)]))
            slow.flush()
            return len(watching.events("submitted")) >= 4

        wait_until(grow)
        slow.write(bytes(rest))
    (inbox / "bad.jpg").write_text("no photo")
    (inbox / ".hidden.jpg").write_bytes(data)
    (inbox / "half.jpg.part").write_bytes(data)

    submitted = watching.wait_for("submitted", 5)
    (rejected,) = watching.wait_for("rejected")
    assert watching.end() == 0
    assert {event["path"] for event in submitted} == {
        "renamed.JPG",
        os.fsdecode(b"caf\xe9.jpg"),
        "trip/day 1/deep.jpg",
        "moved in/with its folder.jpg",
        "slow.jpg",
    }
    made = jobs(connection)
    assert {name: (job.folder, job.frames, job.width, job.fps) for name, job in made.items()} == {
        "renamed": ("", 14, 1024, 5),
        "caf_": ("", 14, 1024, 5),
        "slow": ("", 14, 1024, 5),
        "with its folder": ("moved in", 14, 1024, 5),
        "deep": ("trip/day 1", 3, 128, 5),
    }
    assert (rejected["path"], "not a photo" in rejected["text"]) == ("bad.jpg", True)
    assert sorted(str(path.relative_to(inbox)) for path in inbox.rglob("*") if path.is_file()) == [
        ".hidden.jpg",
        os.fsdecode(b"done/caf\xe9.jpg"),
        "done/moved in/with its folder.jpg",
        "done/renamed.JPG",
        "done/slow.jpg",
        "done/trip/day 1/deep.jpg",
        "half.jpg.part",
        "old.jpg",
        "rejected/bad.jpg",
        "rejected/bad.jpg.txt",
        "trip/svdq.toml",
    ]
    (stopped,) = watching.events("stopped")
    assert stopped["text"] == "5 submitted, 0 known already, 1 rejected."


def test_videos_go_where_the_option_says(watch: Callable[..., Watch], drop: Drop, connection: redis.Redis) -> None:
    drop("trip/day 1/deep.jpg")
    drop("flat.jpg")
    watching = watch("--recursive", "--once", "--output", "new/{folder}/{photo}-{fps}", "--fps", "5", SVDQ_OUTPUT="old")
    assert watching.process.wait() == 0
    assert {name: job.folder for name, job in jobs(connection).items()} == {
        "deep-5": "new/trip/day 1",
        "flat-5": "new/inbox",
    }


def test_a_restart_submits_only_photos_dropped_meanwhile(
    watch: Callable[..., Watch], drop: Drop, inbox: Path, connection: redis.Redis
) -> None:
    drop("old.jpg")
    drop("day/old too.jpg")
    first = watch()
    (started,) = first.wait_for("watching")
    assert "Photos that are in it already are skipped: 1;" in started["text"]
    drop("a.jpg")
    (inbox / "bad.jpg").write_text("no photo")
    first.wait_for("submitted")
    first.wait_for("rejected")
    assert first.end(signal.SIGKILL) == -9

    drop("b.jpg")
    second = watch("--recursive")
    second.wait_for("submitted")
    assert second.end() == 0
    assert {*jobs(connection)} == {"a", "b"}  # photos that were in subfolders before these were watched are old, too
    assert second.events("rejected") == []

    third = watch("--recursive", "--existing")
    third.wait_for("submitted", 2)
    assert third.end() == 0
    assert {*jobs(connection)} == {"a", "b", "old", "old too"}


Once = Callable[..., tuple[int, str]]


@pytest.fixture
def once(inbox: Path, capsys: pytest.CaptureFixture[str]) -> Once:
    """Run `svdq watch --once` here; return its exit code and its last line."""

    def once(*arguments: object) -> tuple[int, str]:
        code = run(["watch", str(inbox), "--once", "--stable-for", "100ms", *map(str, arguments)])
        captured = capsys.readouterr()
        assert captured.err == ""
        return code, captured.out.splitlines()[-1]

    return once


def test_once_submits_the_photos_and_ends(once: Once, drop: Drop, inbox: Path, connection: redis.Redis) -> None:
    drop("a.jpg")
    drop("b.jpg")
    assert once("--on-success", "move:taken") == (0, "2 submitted, 0 known already, 0 rejected.")
    assert {*jobs(connection)} == {"a", "b"}
    assert {path.name for path in (inbox / "taken").iterdir()} == {"a.jpg", "b.jpg"}

    (inbox / "bad.jpg").write_text("no photo")
    assert once() == (1, "0 submitted, 0 known already, 1 rejected.")
    assert once() == (0, "0 submitted, 0 known already, 0 rejected.")  # it was reported before


def test_photos_whose_jobs_redis_has_lost_are_submitted_again(
    once: Once, drop: Drop, connection: redis.Redis, storage: Storage
) -> None:
    drop("a.jpg")
    drop("b.jpg")
    assert once() == (0, "2 submitted, 0 known already, 0 rejected.")
    [finished] = [
        job for job in SvdqQueue(connection=connection).jobs if (found := read_job(job)) and found.name == "b"
    ]
    write_files(storage, finished)
    connection.flushdb()
    assert once() == (0, "1 submitted, 1 known already, 0 rejected.")
    assert {*jobs(connection)} == {"a"}
    assert once() == (0, "0 submitted, 0 known already, 0 rejected.")


def test_like_another_video(once: Once, drop: Drop, inbox: Path, connection: redis.Redis, settings: Settings) -> None:
    add_video(Storage(settings.storage), 7, name="like", motion_bucket_id=33)
    [sidecar] = Path(settings.storage).glob("outputs/like-*.json")
    drop("a.jpg")
    assert once("--like", sidecar, "--fps", "9")[0] == 0
    job = jobs(connection)["a"]
    assert (job.model_dump()["motion_bucket_id"], job.fps) == (33, 9)


def test_files_with_other_suffixes_are_reported_once(once: Once, drop: Drop, inbox: Path) -> None:
    drop("a.jpg")
    (inbox / "raw.NEF").write_text("a raw file")
    (inbox / "form.pdf").write_text("a form")
    assert once("--on-success", "delete") == (0, "1 submitted, 0 known already, 0 rejected, 2 ignored.")
    assert once() == (0, "0 submitted, 0 known already, 0 rejected.")
    assert {path.name for path in inbox.iterdir()} == {"raw.NEF", "form.pdf"}
    # With a pattern for them, they are opened.
    assert once("--glob", "*.nef") == (1, "0 submitted, 0 known already, 1 rejected.")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{inbox}/missing"], "There is no folder"),
        (["{inbox}/file.jpg"], "There is no folder"),
        (["{inbox}", "--on-success", "burn"], "--on-success burn"),
        (["{inbox}", "--on-success", "move:."], "--on-success move:."),
        (["{inbox}", "--on-success", "move:../done"], "DIR must be a folder in the watched one"),
        (["{inbox}", "--stable-for", "soon"], "--stable-for 'soon'"),
        (["{inbox}", "--stable-for", "0"], "--stable-for 0"),
        (["{inbox}", "--glob", "*.jpg", "--glob", ""], "--glob is empty"),
        (["{inbox}", "--size", "100x100"], "--size 100x100"),
        (["{inbox}", "--frames", "0"], "--frames 0"),
        (["{inbox}", "--storage", "{inbox}"], "svdq's own storage"),
        (["{inbox}", "--storage", "nonsense://there"], "nonsense"),
        (["{inbox}", "--redis-url", "nonsense"], "The Redis URL cannot be understood"),
    ],
)
def test_errors_are_sentences(
    inbox: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    (inbox / "file.jpg").touch()
    assert run(["watch", *(argument.format(inbox=inbox) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Error: ")
    assert captured.err.count("\n") == 1
    assert reason in captured.err


def test_a_folder_has_one_watcher_that_notifies_systemd_and_ends_at_ctrl_c(
    watch: Callable[..., Watch], inbox: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        watching = watch(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert manager.recv(100) == b"READY=1"
    assert len(watching.events("watching")) == 1
    assert run(["watch", str(inbox)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "is already watched by another process;" in captured.err
    assert watching.end(signal.SIGINT) == 130
    assert len(watching.events("stopped")) == 1


def test_it_waits_for_redis(
    watch: Callable[..., Watch], drop: Drop, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "redis.sock"
    watching = watch("--redis-url", f"unix://{address}", "--on-success", "delete")
    (problem,) = watching.wait_for("problem")
    assert "cannot be used" in problem["text"]
    drop("a.jpg")
    server = subprocess.Popen(
        [str(find_server()), "--port", "0", "--unixsocket", str(address), "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    try:
        (submitted,) = watching.wait_for("submitted")
        watching.wait_for("resolved")
        assert watching.end() == 0
        assert len(watching.events("problem")) == 1
        assert not (inbox / "a.jpg").exists()
        with redis.Redis(unix_socket_path=str(address)) as connection:
            assert SvdqQueue(connection=connection).job_ids == [submitted["id"]]
    finally:
        server.terminate()
        server.wait()


def test_a_folder_that_is_replaced_is_watched_again(
    watch: Callable[..., Watch], drop: Drop, inbox: Path, connection: redis.Redis
) -> None:
    watching = watch()
    watching.wait_for("watching")
    drop("a.jpg")
    watching.wait_for("submitted")
    inbox.rename(inbox.with_name("elsewhere"))
    (problem,) = watching.wait_for("problem")
    assert "cannot be read" in problem["text"]
    inbox.mkdir()
    watching.wait_for("resolved")
    drop("b.jpg")
    watching.wait_for("submitted", 2)
    assert watching.end() == 0
    assert {*jobs(connection)} == {"a", "b"}


def test_a_storage_that_hangs_ends_the_watcher_with_a_sentence(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(storage_module, "ANSWER_S", 0.1)
    never = threading.Event()
    monkeypatch.setattr(Storage, "exists", lambda *_: never.wait(60))
    assert run(["watch", str(tmp_path), "--once"]) == 3
    assert "has not answered for" in capsys.readouterr().err
    never.set()


@pytest.mark.parametrize(
    ("place", "said"), [((Scanner, "scan"), "A look at the folder has"), ((Processor, "process"), "A photo has")]
)
def test_a_folder_that_hangs_is_said(
    drop: Drop,
    inbox: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: tuple[type, str],
    said: str,
) -> None:
    does = getattr(*place)
    monkeypatch.setattr(watcher, "HANGS_S", 0.1)
    monkeypatch.setattr(*place, lambda *arguments: (time.sleep(0.5), does(*arguments))[1])
    drop("a.jpg")
    assert run(["watch", str(inbox), "--once", "--stable-for", "1ms"]) == 0
    assert f"{said} taken 0 s: the folder or the storage does not answer." in capsys.readouterr().err


def test_a_second_signal_ends_a_watcher_whose_system_call_hangs(inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()

    def hang(*_: object) -> Counter[str]:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # as in the kernel
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        never.wait(20)
        return Counter()

    monkeypatch.setattr(watch_command, "watch_folder", hang)
    began_s = time.monotonic()
    assert run(["watch", str(inbox)]) == 130
    assert time.monotonic() - began_s < 10
    never.set()
