"""`svdq open`, `fetch` and `prune`, with real files and a real Redis."""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import redis
from rq.job import JobStatus

from svdq.producer.job import Job
from svdq.producer.queue import SvdqQueue
from svdq.producer.results.prune import find_removals, remove_all
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from tests.finished import add_video
from tests.queued import enqueue

Cli = Callable[..., "subprocess.CompletedProcess[str]"]
DAY_S = 24 * 60 * 60


@pytest.fixture
def storage(settings: Settings) -> Storage:
    return Storage(settings.storage)


@pytest.fixture
def root(settings: Settings) -> Path:
    return Path(settings.storage)


def under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in under(folder)}


def image_of(photo: bytes) -> str:
    return f"inputs/{hashlib.sha256(photo).hexdigest()}.jpg"


def age(days: float, *paths: Path) -> None:
    """Have files been written so long ago."""
    at = time.time() - days * DAY_S
    for path in paths:
        for file in [path, *path.rglob("*")]:
            os.utime(file, (at, at))


def add(connection: redis.Redis, job_id: str, image: str, status: JobStatus | None = None) -> None:
    job = enqueue(connection, Job(image=image, name="photo", seed=1, steps=4), job_id)
    if status is not None:
        queue = SvdqQueue(job.origin, connection=connection)
        queue.remove(job)
        job.set_status(status)
        if status is JobStatus.FINISHED:
            queue.finished_job_registry.add(job, 1000)


# fetch


def test_fetch(svdq: Cli, storage: Storage, root: Path, tmp_path: Path) -> None:
    one = add_video(storage, 1, name="ü & x", formats=("mp4", "png"))
    two = add_video(storage, 2, folder="holiday/day 1", formats=("gif",))
    target = tmp_path / "deep/videos"
    done = svdq("fetch", two, one, "-o", target, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["paths"] == [str(target / f"holiday/day 1/photo-{two}.gif")]
    assert second["paths"] == [str(target / f"ü & x-{one}.mp4"), str(target / f"ü & x-{one}")]
    assert contents(target) == contents(root / "outputs")
    assert first["copied"] > 0

    # What is there is not copied again; what is damaged, missing or rendered anew is.
    before = {name: (target / name).stat().st_mtime_ns for name in under(target)}
    assert svdq("fetch", "--all", "-o", target).stdout.count("was there already") == 2
    assert {name: (target / name).stat().st_mtime_ns for name in under(target)} == before
    (target / f"holiday/day 1/photo-{two}.gif").write_bytes(b"cut")
    (target / f"ü & x-{one}/frame_0002.png").unlink()
    assert "was there already" not in svdq("fetch", "--since", "1h", "-o", target).stdout
    assert contents(target) == contents(root / "outputs")
    add_video(storage, 2, folder="holiday/day 1", formats=("gif",))
    assert svdq("fetch", "--all", "-o", target).stdout.count("was there already") == 1
    assert contents(target) == contents(root / "outputs")
    assert [path.name for path in target.iterdir() if path.name.startswith(".")] == []


def test_fetch_tells_why_there_is_no_video(
    svdq: Cli, connection: redis.Redis, storage: Storage, tmp_path: Path
) -> None:
    image = f"inputs/{'0' * 64}.jpg"
    done_id = add_video(storage, 9)
    add(connection, f"{1:020x}", image)
    add(connection, f"{2:020x}", image, JobStatus.FINISHED)
    for number, words in ((1, "it is queued"), (2, "its files are not in the storage"), (3, "There is no job")):
        done = svdq("fetch", done_id, f"{number:020x}", "-o", tmp_path / "videos")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert words in done.stderr
    assert not (tmp_path / "videos").exists(), "nothing is fetched when one of them cannot be"


def test_fetch_wants_to_know_what_and_where_to(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    job_id = add_video(storage, 1)
    assert svdq("fetch", "-o", tmp_path / "videos").returncode == 2
    assert svdq("fetch", job_id, "--all", "-o", tmp_path / "videos").returncode == 2
    assert svdq("fetch", job_id).returncode == 2
    (tmp_path / "file").touch()
    done = svdq("fetch", job_id, "-o", tmp_path / "file/videos")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_files_of_others_and_broken_sidecars_are_passed_over(svdq: Cli, storage: Storage, tmp_path: Path) -> None:
    good = add_video(storage, 1)
    name = f"outputs/photo-{2:020x}"
    for number, text in enumerate(("", "[]", "{}", '{"job_id": 3}', "\udcff".encode("utf-8", "surrogateescape"))):
        storage.write_bytes(f"outputs/x-{number + 10:020x}.json", text if isinstance(text, bytes) else text.encode())
    # One that leads elsewhere, one whose video is gone, and one under another job's name.
    document = json.loads(storage.read(f"outputs/photo-{good}.json"))
    storage.write_text("secret.mp4", "secret")
    storage.write_text(
        f"{name}.json", json.dumps(document | {"job_id": f"{2:020x}", "outputs": ["/x/../../secret.mp4"]})
    )
    storage.write_text(f"outputs/y-{3:020x}.json", json.dumps(document | {"job_id": f"{3:020x}"}))
    storage.write_text(f"outputs/z-{4:020x}.json", json.dumps(document))
    done = svdq("fetch", "--all", "-o", tmp_path / "videos")
    assert (done.returncode, done.stderr) == (0, "")
    assert under(tmp_path / "videos") == [f"photo-{good}.json", f"photo-{good}.mp4"]


# open


def desktop(tmp_path: Path, script: str) -> dict[str, str]:
    """Give a terminal on a desktop whose opener is a program of the test's."""
    (tmp_path / "bin").mkdir()
    opener = tmp_path / "bin" / "xdg-open"
    opener.write_text(f"#!/bin/sh\n{script}\n")
    opener.chmod(0o755)
    return {"DISPLAY": ":9", "PATH": f"{opener.parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.skipif(sys.platform == "darwin", reason="the desktop there is always there")
def test_open(svdq: Cli, storage: Storage, root: Path, tmp_path: Path) -> None:
    job_id = add_video(storage, 1, formats=("gif", "mp4"))
    path = f"{root}/outputs/photo-{job_id}.gif"
    done = svdq("open", job_id, DISPLAY="", WAYLAND_DISPLAY="")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")
    environment = desktop(tmp_path, f'echo "$1" > "{tmp_path}/opened"; exit $CODE')
    done = svdq("open", job_id, **environment, CODE="0")
    assert (done.returncode, done.stdout) == (0, f"{path}\n")
    assert (tmp_path / "opened").read_text() == f"{path}\n"
    done = svdq("open", job_id, **environment, CODE="3")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, f"{path}\n", 1)
    assert svdq("open", "f" * 20).returncode == 2


# prune


def test_prune(svdq: Cli, connection: redis.Redis, settings: Settings, storage: Storage, root: Path) -> None:
    old = add_video(storage, 1, formats=("mp4", "png"), photo=b"of the old one alone")
    add_video(storage, 2, folder="holiday", photo=b"of an old and a new one")
    new = add_video(storage, 3, photo=b"of an old and a new one")
    again = add_video(storage, 4, photo=b"rendered again")
    failed = storage.put_input(b"of a failed job", "jpg")
    waiting = storage.put_input(b"of a job that waits", "jpg")
    orphan = storage.put_input(b"of nobody", "jpg")
    submitted_again = storage.put_input(b"submitted again just now", "jpg")
    image = image_of(b"rendered again")
    add(connection, old, image, JobStatus.FINISHED)
    add(connection, again, image)
    add(connection, f"{5:020x}", failed, JobStatus.FAILED)
    add(connection, f"{6:020x}", waiting)
    # Half done: one that waits to go on, one that nobody knows, and what is left of a kill before the sidecar.
    for number in (6, 7):
        (settings.home / f"checkpoints/{number:020x}").mkdir(parents=True)
        (settings.home / f"checkpoints/{number:020x}/3.safetensors").write_bytes(b"x" * 1000)
        storage.write_bytes(f"checkpoints/{number:020x}/3.safetensors", b"x" * 1000)
        storage.write_bytes(f"outputs/photo-{number:020x}.mp4", b"half")
    storage.write_bytes("outputs/by hand.txt", b"not ours")
    age(40, root, settings.home / "checkpoints")
    age(10, *(root / "outputs").glob(f"*{new}*"))
    assert storage.has_input(submitted_again)
    before = under(settings.home)

    done = svdq("prune", "--older-than", "30d")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "--yes" in done.stderr
    shown = svdq("prune", "--older-than", "30d", "--dry-run")
    assert shown.returncode == 0
    assert "Would remove 3 videos, 2 photos, 2 checkpoints (" in shown.stdout
    assert shown.stdout.count("\n") == 8
    assert under(settings.home) == before

    done = svdq("prune", "--older-than", "30d", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == shown.stdout.splitlines()[-1].replace("Would remove", "Removed") + "\n"
    gone = set(before) - set(under(settings.home))
    assert {path for path in gone if "redis" not in path} == {
        *(f"storage/outputs/photo-{old}{end}" for end in (".json", ".mp4", "/frame_0001.png", "/frame_0002.png")),
        *(f"storage/outputs/holiday/photo-{2:020x}{end}" for end in (".json", ".mp4")),
        f"storage/outputs/photo-{7:020x}.mp4",
        f"storage/{orphan}",
        f"storage/{image_of(b'of the old one alone')}",
        f"checkpoints/{7:020x}/3.safetensors",
        f"storage/checkpoints/{7:020x}/3.safetensors",
    }
    # What is forgotten with its files can be submitted again; the others are as they were.
    assert not connection.exists(f"rq:job:{old}")
    assert connection.zscore("rq:finished:svdq-default", old) is None
    assert connection.llen("rq:queue:svdq-default") == 2
    assert svdq("prune", "--older-than", "30d", "--yes").stdout == "There is nothing to remove.\n"


def test_prune_asks_on_a_terminal(home: Path, storage: Storage, root: Path) -> None:
    add_video(storage, 1)
    age(3, root)
    for answer, is_left in ((b"n\n", True), (b"y\n", False)):
        terminal, ours = os.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "svdq.cli", "prune", "--older-than", "1d"],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        os.write(ours, answer)
        output, _ = process.communicate(timeout=60)
        os.close(terminal)
        os.close(ours)
        assert b"Remove 1 video, 1 photo (3 files, " in output
        assert (process.returncode, (root / "outputs").exists() and bool(under(root / "outputs"))) == (
            (130, True) if is_left else (0, False)
        )


def test_what_came_into_use_since_it_was_found_is_kept(connection: redis.Redis, storage: Storage, root: Path) -> None:
    """The user takes a while to answer, and the world goes on."""
    queued_again, rendered_again = add_video(storage, 1, photo=b"1"), add_video(storage, 2, photo=b"2")
    add_video(storage, 3, photo=b"3")
    photo = storage.put_input(b"of nobody", "jpg")
    age(40, root)
    found = find_removals(connection, storage, Storage(str(root / "home")), timedelta(days=30), datetime.now(UTC))
    assert [removal.kind for removal in found] == ["video"] * 3 + ["photo"] * 4
    add(connection, queued_again, image_of(b"1"))
    storage.remove(f"outputs/photo-{queued_again}.json")  # as `svdq retry --force` does
    add_video(storage, 2, photo=b"2")
    assert storage.has_input(photo)
    removed = remove_all(connection, found)
    assert sorted(removal.job_id for removal in removed if removal.kind == "video") == [f"{3:020x}"]
    assert storage.exists(photo)
    assert storage.exists(image_of(b"1"))
    assert storage.exists(f"outputs/photo-{queued_again}.mp4")
    assert storage.exists(f"outputs/photo-{rendered_again}.json")
