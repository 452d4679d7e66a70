"""`svdq submit` with many photos, from wherever they come, in processes of its own."""

import json
import os
import re
import shutil
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import redis
from PIL import Image
from rq.job import JobStatus
from rq.results import Result

from svdq.producer.connection import session
from svdq.producer.queue import SvdqQueue, fetch, read_job
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting import submission
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry, Submission
from tests.conftest import Cli
from tests.finished import add_video
from tests.forks import Piped
from tests.terminal import terminal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty-two tiny photos, two of them in a folder below, and a file that is none."""
    folder = tmp_path / "holiday"
    (folder / "sub").mkdir(parents=True)
    for number in range(22):
        place = folder if number < 20 else folder / "sub"
        Image.new("RGB", (16, 9), (number, 0, 0)).save(place / f"{number:02}.png")
    (folder / "notes.txt").touch()
    return folder


def queued(connection: redis.Redis) -> list[str]:
    return SvdqQueue("svdq-default", connection=connection).get_job_ids()


def objects(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_folder_is_submitted_with_its_subfolders(svdq: Cli, connection: redis.Redis, folder: Path) -> None:
    done = svdq(
        "submit",
        folder,
        "--family",
        "svd",
        "--recursive",
        "--output",
        "trip/day 1/",
        "--name",
        "{stem}-{seed}",
        "--json",
    )
    assert (done.returncode, done.stderr) == (0, "Files left out because they have no photo suffix: 1.\n")
    made = objects(done.stdout)
    assert len(made) == 22
    assert [made[0]["name"], made[-1]["name"]] == [f"00-{made[0]['seed']}", f"21-{made[-1]['seed']}"]
    assert [job["id"] for job in made] == queued(connection)
    job = read_job(fetch(connection, str(made[0]["id"])))
    assert job is not None
    assert job.folder == "trip/day 1"

    below = read_job(fetch(connection, str(made[-1]["id"])))
    assert below is not None
    assert below.folder == "trip/day 1/sub"

    again = svdq("submit", str(folder / "*.png"), "--output", "trip/day 1", "--name", "{stem}-{seed}", "-v")
    *lines, total = again.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [job["id"] for job in made[:20]]
    assert again.stdout.count("exists already") == 20
    assert total.startswith("New jobs: 0; existing jobs: 20. ")
    assert len(queued(connection)) == 22


def test_bad_photos_in_a_folder(svdq: Cli, home: Path, folder: Path) -> None:
    for number in range(25):
        (folder / f"bad{number:02}.jpg").write_text("no photo")
    done = svdq("submit", folder)
    assert (done.returncode, done.stdout) == (2, "")
    *reasons, more, error = done.stderr.splitlines()[2:]  # after what is left out
    assert len(reasons) == 20
    assert all(f"bad{number:02}.jpg" in reason for number, reason in enumerate(reasons))
    assert more == "… and 5 more."
    assert error.startswith("Error: 25 of 45 photos cannot be used, so nothing was submitted; ")
    assert not home.exists()

    done = svdq("submit", folder, "--skip-bad")
    assert done.returncode == 1
    assert done.stdout.startswith("New jobs: 20; existing jobs: 0. ")
    assert "bad00.jpg" in done.stderr
    assert done.stderr.endswith("Bad photos left out: 25 of 45.\n")


def test_paths_on_standard_input(home: Path, connection: redis.Redis, folder: Path) -> None:
    paths = folder / "paths.txt"
    paths.write_text("\n".join(map(str, sorted(folder.glob("*.png"))[:3])))
    with Piped("submit", "-", "--family", "svd", stdin=paths) as process:
        assert [line.split()[1] for line in process.stdout] == ["00", "01", "02"]
        assert (process.stderr.read(), process.wait()) == ("", 0)
    assert len(queued(connection)) == 3


def test_jobs_wait_until_a_set_time(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    before = datetime.now().astimezone()
    done = svdq("submit", photo, "--at", "+2h", "--json")
    (made,) = objects(done.stdout)
    assert made["status"] == "scheduled"
    at = datetime.fromisoformat(str(made["at"]))
    assert timedelta(hours=2) - timedelta(seconds=1) < at - before < timedelta(hours=2, minutes=1)
    assert queued(connection) == []
    (listed,) = objects(svdq("list", "--status", "scheduled", "--json").stdout)
    assert listed["id"] == made["id"]
    assert abs(datetime.fromisoformat(str(listed["scheduled_at"])) - at) <= timedelta(seconds=1)
    later = svdq("submit", photo, "--at", "2099-01-31T22:00", "--fps", 8).stdout
    assert " (waits until Sat 2099-01-31 22:00:00 " in later
    assert "  a photo  scheduled for 2099-01-31 22:00  (photo: " in svdq("status", later.split()[0]).stdout


def test_photos_that_are_the_same_are_named(svdq: Cli, connection: redis.Redis, folder: Path) -> None:
    for name in ("copy.png", "another.png"):
        (folder / name).write_bytes((folder / "03.png").read_bytes())
    done = svdq("submit", folder)
    assert "One video of the same photo: 03.png, another.png, copy.png.\n" in done.stderr
    assert done.stderr.count("same photo") == 1


def test_a_job_waits_for_the_end_of_another(svdq: Cli, home: Path, connection: redis.Redis, photo: Path) -> None:
    done = svdq("submit", photo, "--depends-on", "nothing")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no job 'nothing'" in done.stderr
    assert not (home / "storage").exists()
    parent = svdq("submit", photo).stdout.split()[0]
    child = svdq("submit", photo, "--fps", 8, "--depends-on", parent[:5]).stdout.split()[0]
    assert queued(connection) == [parent]
    assert f"deferred until {parent} has ended" in svdq("status", child).stdout


@pytest.mark.slow
def test_a_submission_that_was_killed_can_be_repeated(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    wanted = ["submit", str(photo), "--variations", "520", "--json"]
    with Piped(*wanted) as process:
        process.stdout.readline()
        # Nobody reads on, so it waits for room in the pipe, which holds less than what it has to say.
        process.kill()
    begun = queued(connection)
    assert 0 < len(begun) < 520
    seeds = {job_id: read_job(fetch(connection, job_id)) for job_id in begun}

    made = objects(svdq(*wanted).stdout)
    assert [job["id"] for job in made] == queued(connection)
    assert len({job["id"] for job in made}) == 520
    assert queued(connection)[: len(begun)] == begun
    for job in made[: len(begun)]:
        recorded = seeds[str(job["id"])]
        assert recorded is not None
        assert job["seed"] == recorded.seed


@pytest.mark.parametrize("options", [(), ("--force",)])
@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (redis.ConnectionError("lost"), 3, "Of 22 jobs, at least 10 are queued; the same command queues the rest."),
        (KeyboardInterrupt(), 130, "Interrupted. Of 22 jobs, at least 10 are queued; the same command"),
    ],
)
def test_a_submission_that_is_cut_says_that_it_can_be_repeated(
    svdq: Cli, connection: redis.Redis, folder: Path, monkeypatch, error: BaseException, code: int, says: str, options
) -> None:
    command, calls = ("submit", folder, "--recursive", "--family", "svd", *options), list[int]()
    num_new = 22 if options else 0  # each time, once it is queued
    assert not options or svdq(*command).returncode == 0

    def enqueue(connection: redis.Redis, entries: Sequence[Entry]) -> list[Submission]:
        calls.append(len(entries))
        if len(calls) > 2:
            raise error
        return enqueue_many(connection, entries)

    monkeypatch.setattr(submission, "CHUNK", 5)
    monkeypatch.setattr(submission, "enqueue_many", enqueue)
    cut = svdq(*command)
    assert (cut.returncode, says in cut.stderr) == (code, True)
    monkeypatch.setattr(submission, "enqueue_many", enqueue_many)
    assert "New jobs: 12; existing jobs: 10." in svdq(*command).stdout
    assert len(queued(connection)) == num_new + 22
    assert f"New jobs: {num_new}; existing jobs: {22 - num_new}." in svdq(*command).stdout


def test_all_photos_are_submitted_though_nobody_reads_the_output(connection: redis.Redis, photo: Path) -> None:
    with Piped("submit", photo, "--variations", 520, "-v") as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait() == 1
    assert len(queued(connection)) == 520


def test_wait_prints_each_job_when_it_ends(connection: redis.Redis, folder: Path) -> None:
    with Piped("submit", folder / "00.png", "--variations", 3, "--wait", "--json") as process:
        while len(queued(connection)) < 3:
            assert process.poll() is None
        for number, job_id in enumerate(reversed(queued(connection))):
            job = fetch(connection, job_id)
            Result.create(job, Result.Type.SUCCESSFUL, ttl=100, return_value={"outputs": [f"/{number}.mp4"]})
            job.set_status(JobStatus.FINISHED)
            ended = json.loads(process.stdout.readline())
            assert (ended["id"], ended["status"], ended["outputs"]) == (job_id, "finished", [f"/{number}.mp4"])
        assert process.wait() == 0


def test_a_terminal_has_a_bar_and_a_summary(home: Path, connection: redis.Redis, folder: Path) -> None:
    with terminal("submit", folder, "--variations", 3, size=(24, 100)) as screen:
        assert screen.end() == 0
    text = screen.text
    assert "enqueueing" in text
    assert "svdq wait" not in text
    assert text.splitlines()[-1].endswith("New jobs: 60; existing jobs: 0. `svdq list` shows the newest.")


def test_photos_are_not_stored_below_a_disk_that_is_not_mounted(svdq: Cli, folder: Path, storage: Storage) -> None:
    place = storage.folder
    assert place is not None
    assert svdq("submit", str(folder / "00.png")).returncode == 0
    place.rename(disk := place.with_name("disk"))
    place.mkdir()  # what is left where it was mounted
    refused = svdq("submit", str(folder / "01.png"))
    assert refused.returncode == 3
    assert "has lost its file .svdq-storage, and 1 job in the queue" in refused.stderr
    assert list(place.iterdir()) == []
    place.rmdir()
    disk.rename(place)
    assert svdq("submit", str(folder / "01.png")).returncode == 0
    # Nothing needs the photos in a storage that was emptied on purpose.
    assert svdq("cancel", "--all").returncode == 0
    shutil.rmtree(place)
    assert svdq("submit", str(folder / "02.png")).returncode == 0


def test_a_dry_run_queues_nothing_and_says_what_would_be(
    svdq: Cli, folder: Path, connection: redis.Redis, home: Path
) -> None:
    some = svdq("submit", str(folder / "00.png"), str(folder / "01.png"))
    first, second = (line.split()[0] for line in some.stdout.splitlines())
    before = (set(connection.keys()), sorted(path for path in home.rglob("inputs/*")))
    dry = svdq("submit", str(folder), "--recursive", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    *_, counts, end = dry.stdout.splitlines()
    assert counts == "Nothing was queued. New jobs: 20; existing jobs: 2."
    assert end == "When they would be done is not known: No worker is running."
    tool = folder.parent / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '0, NVIDIA GeForce RTX 4090, 24564, 24000'\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    dry = svdq("submit", str(folder), "--recursive", "--dry-run", SVDQ_MODEL="wan2.2-4step", PATH=path)
    assert re.fullmatch(
        "No worker is running; with one that has loaded the model, they would take about .* by published times of this "
        "machine's GPUs.",
        dry.stdout.splitlines()[-1],
    )
    assert (set(connection.keys()), sorted(path for path in home.rglob("inputs/*"))) == before
    lines = svdq("submit", str(folder), "--recursive", "--dry-run", "--json").stdout.splitlines()
    status = {found["id"]: found["status"] for found in map(json.loads, lines)}
    assert (len(status), status[first], status[second]) == (22, "queued", "queued")
    assert sorted(status.values()) == ["new"] * 20 + ["queued"] * 2
    really = svdq("submit", str(folder), "--recursive", "--json").stdout.splitlines()
    assert {json.loads(line)["id"] for line in really} == set(status)
    assert svdq("submit", str(folder / "00.png"), "--dry-run", "--wait").returncode == 2


def test_a_dry_run_of_upscaling_says_when_it_would_be_done(svdq: Cli, settings: Settings) -> None:
    finished = add_video(Storage(settings.storage), 0)
    end = svdq("submit", "--finish", finished, "--upscale", "2", "--dry-run").stdout.splitlines()[-1]
    assert end == "When they would be done is not known: No worker is running."


def test_a_dry_run_warns_as_the_submission_does(svdq: Cli, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_bytes(b"no photo")
    Image.new("RGB", (300, 400)).save(tmp_path / "tall.png")
    assert svdq("submit", str(tmp_path), "--dry-run").returncode == 2
    warned = svdq("submit", str(tmp_path / "tall.png"), "--size", "832x448", "--dry-run")
    assert "% of the photo's height" in warned.stderr
    assert warned.stdout.splitlines()[0].endswith("  tall")


@pytest.mark.usefixtures("own_server")
def test_a_full_server_is_one_sentence_without_its_scripts(svdq: Cli, folder: Path, settings: Settings) -> None:
    svdq("submit", str(folder / "00.png"))
    with session(settings) as connection:
        connection.config_set("maxmemory", 1)
        refused = svdq("submit", str(folder))
        connection.config_set("maxmemory", 0)
    assert refused.returncode == 3
    (sentence,) = refused.stderr.splitlines()[-1:]
    assert sentence.endswith(" is full: it has reached its maxmemory. Raise that, or make room as docs/redis.md says.")
    assert "EVAL" not in refused.stderr
