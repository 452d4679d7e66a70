"""`svdq submit` as a user runs it."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import redis

from svdq.cli import parameters
from svdq.pipeline.parameters import Fit, Format
from svdq.producer.queue import PRIORITIES, SvdqQueue

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def test_choices_are_those_of_a_job() -> None:
    assert get_args(Format) == parameters.FORMATS
    assert get_args(Fit) == parameters.FITS
    assert PRIORITIES == parameters.PRIORITIES


@pytest.fixture
def bad_files(tmp_path: Path, photo: Path) -> Path:
    folder = tmp_path / "bad"
    folder.mkdir()
    whole = photo.read_bytes()
    (folder / "text.jpg").write_text("hello")
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    # A header is all that is read of it.
    (folder / "bomb.ppm").write_bytes(b"P6 60000 60000 255\n" + bytes(100))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["{bad}/missing.jpg"],
        ["{bad}/text.jpg"],
        ["{bad}/truncated.jpg"],
        ["{bad}/empty.jpg"],
        ["{bad}/bomb.ppm"],
        ["{photo}", "{bad}/text.jpg"],
        ["{bad}/*.tiff"],
        ["{photo}", "--name", "{{colour}}"],
        ["{photo}", "--output", "/tmp"],
        ["{photo}", "--at", "yesterday"],
        ["{photo}", "--sweep", "fps"],
        ["{photo}", "--variations", "0"],
        ["{photo}", "--frames", "0"],
        ["{photo}", "--frames", "many"],
        ["{photo}", "--size", "1000x500"],
        ["{photo}", "--size", "big"],
        ["{photo}", "--format", "avi"],
        ["{photo}", "--noise-aug-strength", "nan"],
        ["{photo}", "--priority", "highest"],
        ["{photo}", "--like", "{photo}"],
        ["{photo}", "--redis-url", "what://u:secret@h"],
        ["{photo}", "--nonsense"],
        [],
    ],
    ids=lambda arguments: " ".join(arguments) or "nothing",
)
def test_bad_input_is_one_sentence(svdq: Cli, home: Path, bad_files: Path, photo: Path, arguments: list[str]) -> None:
    done = svdq("submit", *(word.format(bad=bad_files, photo=photo) for word in arguments))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    assert not home.exists(), "nothing is enqueued or written, no server started"


def test_bad_settings(svdq: Cli, home: Path, photo: Path) -> None:
    done = svdq("submit", photo, SVDQ_MAX_PIXELS="many")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "SVDQ_MAX_PIXELS" in done.stderr
    done = svdq("submit", photo, SVDQ_MAX_PIXELS="100")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "320x200" in done.stderr
    assert not home.exists()


def test_json(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    done = svdq(
        "submit", photo, photo, "--json", "--format", "gif", "--format", "mp4", "--seed", 7, "--priority", "low"
    )
    assert done.stderr == ""
    first, second = map(json.loads, done.stdout.splitlines())
    assert first == second
    assert list(first) == ["id", "photo", "image", "seed", "status", "name"]
    assert (first["seed"], first["status"], first["photo"]) == (7, "queued", str(photo))
    assert first["image"].startswith("inputs/")
    assert SvdqQueue("svdq-low", connection=connection).get_job_ids() == [first["id"]]
    status = json.loads(svdq("status", first["id"], "--json").stdout)
    assert (status["seed"], status["formats"], status["status"]) == (7, ["gif", "mp4"], "queued")
    assert status["photo"] == str(photo)


def test_again_and_force(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    first = svdq("submit", photo)
    job_id = first.stdout.split()[0]
    assert f"svdq wait {job_id}" in first.stdout
    again = svdq("submit", photo)
    assert again.stdout.split()[0] == job_id
    assert "--force" in again.stdout
    assert svdq("submit", photo, "--force").stdout.split()[0] != job_id
    assert SvdqQueue("svdq-default", connection=connection).count == 2


def test_like(svdq: Cli, connection: redis.Redis, photo: Path, tmp_path: Path) -> None:
    (job_id,) = (json.loads(svdq("submit", photo, "--json", "--frames", 9, "--fps", 5).stdout)["id"],)
    made = json.loads(svdq("status", job_id, "--json").stdout)
    fields = ("frames", "steps", "width", "height", "fps", "seed", "formats", "fit", "image", "name")
    sidecar = tmp_path / "video.json"
    sidecar.write_text(json.dumps({"svdq": "0", "job": {name: made[name] for name in fields}}))
    like = json.loads(svdq("submit", photo, "--json", "--like", sidecar, "--fps", 6).stdout)
    assert like["seed"] == made["seed"]
    status = json.loads(svdq("status", like["id"], "--json").stdout)
    assert (status["frames"], status["fps"]) == (9, 6)
