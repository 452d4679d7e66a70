"""Submit, render and fetch with homes that share only Redis and a bucket."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.producer.storage.storage import PROBE, Storage
from tests.conftest import S3_SECRET
from tests.worker.own_redis import OwnRedis

pytestmark = pytest.mark.long


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis server of the network's, as far as one machine can have it."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = OwnRedis(folder)
    yield server.url()
    server.stop()


def all_of(connection: redis.Redis) -> bytes:
    """Everything that Redis keeps."""
    dumps = [connection.dump(key) or b"" for key in connection.scan_iter()]
    hashes = [
        value
        for key in connection.scan_iter(match="rq:job:*", _type="HASH")
        for value in connection.hgetall(key).values()
    ]
    return b"".join([*dumps, *hashes])


def test_submit_render_and_fetch_through_redis_and_a_bucket(
    site, redis_url: str, s3: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = {"SVDQ_REDIS_URL": redis_url, "SVDQ_STORAGE": s3}
    laptop = {**shared, "SVDQ_HOME": str(tmp_path / "laptop")}
    box = {**shared, "SVDQ_HOME": str(tmp_path / "box"), "SVDQ_MODEL": "preview"}
    said = []

    def run(program: str, *arguments: object, **environment: str) -> str:
        done = site.run(program, *arguments, **environment)
        said.append(done.stdout + done.stderr)
        assert done.returncode == 0, done
        return done.stdout

    Image.effect_noise((160, 100), 60).convert("RGB").save(tmp_path / "träumerei & co.jpg")
    flags = ("--frames", 3, "--steps", 4, "--size", "64x64", "--format", "mp4", "--format", "png", "--json")
    submitted = json.loads(run("svdq", "submit", tmp_path / "träumerei & co.jpg", *flags, **laptop))
    job_id = submitted["id"]
    storage = Storage(s3)
    assert storage.read(submitted["image"]) == (tmp_path / "träumerei & co.jpg").read_bytes()

    caplog.set_level(logging.INFO, "werkzeug")
    run("svdq", "worker", "--ranks", 2, "--device", "cpu", "--burst", "--checkpoints", "storage", **box)
    stem = f"outputs/träumerei & co-{job_id}"
    frames = [f"{stem}/frame_{number:04d}.png" for number in (1, 2, 3)]
    assert {entry.key for entry in storage.entries("outputs")} == {*frames, f"{stem}.json", f"{stem}.mp4"}
    assert list(storage.entries("checkpoints")) == []
    # As the server saw it: one test of whether the storage is writable, then every file in one request, the sidecar
    # after all others, and nothing under another name.
    put = [
        record.getMessage()
        for record in caplog.records
        if '"PUT ' in record.getMessage() or '"POST ' in record.getMessage()
    ]
    written = [line for line in put if "/outputs/" in line]
    assert [PROBE in line for line in written] == [True, False, False, False, False, False]
    assert ".json" in written[-1]
    assert not [line for line in put if "/tmp/" in line]

    shown = json.loads(run("svdq", "status", job_id, "--json", **laptop))
    assert shown["outputs"] == [f"{s3}/{stem}.mp4", f"{s3}/{stem}"]
    assert f"{s3}/{stem}.mp4" in run("svdq", "status", job_id, **laptop)

    videos = tmp_path / "videos"
    run("svdq", "fetch", job_id, "--output", videos, **laptop)
    for entry in storage.entries("outputs"):
        assert (videos / entry.key.removeprefix("outputs/")).read_bytes() == storage.read(entry.key)
    assert "exists already" in run("svdq", "fetch", job_id, "--output", videos, **laptop)
    assert "1 video" in run("svdq", "gallery", videos, "--output", videos / "index.html", **laptop)
    assert run("svdq", "report", "--since", "1h", **laptop).startswith("1 finished, 0 failed, 0 stopped, 0 canceled")

    # Nothing but Redis and the storage was needed, and the secret went nowhere.
    assert not (tmp_path / "laptop").exists()
    with redis.Redis.from_url(redis_url) as connection:
        kept = all_of(connection)
    files = [
        path.read_bytes() for folder in ("videos", "box") for path in (tmp_path / folder).rglob("*") if path.is_file()
    ]
    everything = b"\n".join([kept, *files, *map(str.encode, said)])
    assert job_id.encode() in everything
    assert S3_SECRET.encode() not in everything


def test_a_page_cannot_link_into_a_bucket(site, s3: str, tmp_path: Path) -> None:
    done = site.run("svdq", "gallery", "--output", tmp_path / "all.html", SVDQ_STORAGE=s3)
    assert done.returncode == 2
    assert "svdq fetch --all" in done.stderr
    assert not (tmp_path / "all.html").exists()
