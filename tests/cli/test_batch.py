"""`svdq batch` as a user runs it, in a process of its own."""

import json
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.producer.queue import SvdqQueue, fetch, read_job
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import view
from svdq.producer.storage.storage import Storage
from tests.conftest import Cli
from tests.finished import add_video


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three tiny photos."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (16, 9), (number, 0, 0)).save(folder / f"{number}.png")
    return folder


def test_rows_of_a_list_are_submitted_with_their_parameters(svdq: Cli, connection: redis.Redis, folder: Path) -> None:
    rows = "photo,fps,priority,at,name,output\n0.png,8,,,,\n1.png,9,high,,one,x\n2.png,,low,2099-01-31,,\n0.png,8,,,,\n"
    (folder / "list.csv").write_text(rows)
    done = svdq("batch", folder / "list.csv", "--json", "--family", "svd")
    assert (done.returncode, done.stderr) == (0, "")
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert [job["status"] for job in made] == ["queued", "queued", "scheduled", "queued"]
    assert made[3] == made[0]
    assert SvdqQueue("svdq-high", connection=connection).get_job_ids() == [made[1]["id"]]
    job = read_job(fetch(connection, made[1]["id"]))
    assert job is not None
    assert (job.fps, job.name, job.folder) == (9, "one", "x")
    again = svdq("batch", folder / "list.csv")
    assert again.stdout.count("exists already") == 4


def test_nothing_is_done_when_rows_are_bad(svdq: Cli, home: Path, folder: Path) -> None:
    (folder / "list.jsonl").write_text('{"photo": "0.png"}\n{"photo": "1.png", "fps": 0}\n{"photo": \n')
    done = svdq("batch", folder / "list.jsonl")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert [line[:20] for line in lines[:2]] == ["list.jsonl, line 2: ", "list.jsonl, line 3: "]
    assert lines[2].startswith("Error: 2 of 3 photos cannot be used")
    assert len(lines) == 3
    assert not home.exists()


def test_bad_rows_and_bad_photos_are_reported_and_skipped_together(
    svdq: Cli, connection: redis.Redis, folder: Path
) -> None:
    (folder / "1.png").write_text("no photo")
    (folder / "list.csv").write_text("photo,fps\n0.png,many\n1.png,8\n2.png,8\nmissing.png,8\n")
    done = svdq("batch", folder / "list.csv")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("list.csv, line 2: fps 'many'")
    assert lines[1].startswith("list.csv, line 3: The file ")
    assert lines[2].startswith("list.csv, line 5: There is no file ")
    assert lines[3].startswith("Error: 3 of 4 photos cannot be used")
    assert SvdqQueue("svdq-default", connection=connection).count == 0
    done = svdq("batch", folder / "list.csv", "--skip-bad")
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1)
    assert "line 2: fps 'many'" in done.stderr
    assert "line 3: The file " in done.stderr
    assert SvdqQueue("svdq-default", connection=connection).count == 1


def test_a_row_with_an_unknown_lora_is_bad(svdq: Cli, connection: redis.Redis, folder: Path) -> None:
    (folder / "list.csv").write_text("photo,lora\n0.png,\n1.png,nothing\n")
    done = svdq("batch", folder / "list.csv")
    assert done.returncode == 2
    assert "list.csv, line 3: There is no LoRA 'nothing'" in done.stderr
    done = svdq("batch", folder / "list.csv", "--skip-bad")
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1), done.stderr
    (folder / "0.txt").write_text("A wave <lora:nothing>")
    done = svdq("submit", folder, "--family", "wan", "--skip-bad")
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 2), done.stderr
    done = svdq("submit", folder, "--family", "wan", "--lora", "nothing", "--skip-bad")
    assert (done.returncode, done.stderr.count("nothing")) == (2, 1), done.stderr


def test_options_are_for_the_rows_that_leave_them_open(svdq: Cli, connection: redis.Redis, folder: Path) -> None:
    (folder / "list.csv").write_text("photo,frames,prompt\n0.png,,\n1.png,21,A dog.\n")
    done = svdq("batch", folder / "list.csv", "--frames", 18, "--prompt", "A cat.")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: --frames 18 is not allowed: it must be 1 more than a multiple of 4")
    done = svdq("batch", folder / "list.csv", "--frames", 17, "--prompt", "A cat.", "--size", "128x64", "--json")
    ids = [json.loads(line)["id"] for line in done.stdout.splitlines()]
    jobs = [read_job(fetch(connection, each)) for each in ids]
    assert [(job.frames, job.prompt, job.width) for job in jobs if job] == [(17, "A cat.", 128), (21, "A dog.", 128)]


def test_all_options_of_jobs_are_defaults_of_rows(
    svdq: Cli, connection: redis.Redis, folder: Path, settings: Settings
) -> None:
    (folder / "list.csv").write_text("photo,fps,priority,output,motion_bucket_id\n0.png,,,,\n1.png,9,high,own,5\n")
    add_video(Storage(settings.storage), 1, name="like")
    [sidecar] = Path(settings.storage).glob("outputs/like-*.json")
    done = svdq(
        *("batch", folder / "list.csv", "--json", "--at", "2099-01-01", "--priority", "low", "--output", "trip"),
        *("--name", "{stem}-{seed}", "--variations", 2, "--sweep", "motion_bucket_id=60,127", "--like", sidecar),
    )
    assert done.returncode == 0, done.stderr
    made = [json.loads(line) for line in done.stdout.splitlines()]
    jobs = [view(connection, each["id"]) for each in made]
    assert [job.queue for job in jobs] == ["svdq-low"] * 4 + ["svdq-high"] * 2
    assert [job.parameters["folder"] for job in jobs] == ["trip"] * 4 + ["own"] * 2
    assert [job.parameters["motion_bucket_id"] for job in jobs] == [60, 60, 127, 127, 5, 5]
    assert {job.status for job in jobs} == {"scheduled"}
    assert jobs[0].name == f"0-{jobs[0].parameters['seed']}"
    again = svdq("batch", folder / "list.csv", "--depends-on", made[0]["id"][:6], "--json")
    assert [json.loads(line)["status"] for line in again.stdout.splitlines()] == ["deferred"] * 2
