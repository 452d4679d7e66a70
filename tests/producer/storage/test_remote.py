"""A storage in a bucket, against a real S3 server on this machine."""

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.job import JobStatus

from svdq.pipeline.errors import UnavailableError
from svdq.producer.job_control import retry
from svdq.producer.queue import SvdqQueue, fetch, read_arguments
from svdq.producer.records import sidecar_digest
from svdq.producer.results.prune import find_removals, remove_all
from svdq.producer.settings import Settings
from svdq.producer.storage import remote, upload
from svdq.producer.storage.storage import Storage
from tests.conftest import Cli
from tests.finished import add_video
from tests.proxy import Proxy
from tests.queued import SvdJob, enqueue

pytestmark = pytest.mark.slow


def keys(storage: Storage, folder: str = "outputs") -> list[str]:
    return sorted(entry.key for entry in storage.entries(folder))


def test_files_and_folders_are_written_and_removed(s3: str, tmp_path: Path) -> None:
    storage = Storage(f"{s3}/")
    assert (keys(storage), storage.names("outputs"), storage.exists("outputs")) == ([], [], False)
    for content in (b"one", b"two"):
        with storage.staging() as folder:
            (folder / "a ü.mp4").write_bytes(content)
            (folder / "frames").mkdir()
            (folder / "frames" / f"frame_{2 * (content == b'two')}.png").write_bytes(content)
            storage.publish(folder / "a ü.mp4", "outputs/1/a ü.mp4")
            storage.publish(folder / "frames", "outputs/1/frames")
    assert keys(storage) == ["outputs/1/a ü.mp4", "outputs/1/frames/frame_2.png"]
    assert storage.read("outputs/1/a ü.mp4") == b"two"
    storage.copy_out("outputs/1/a ü.mp4", tmp_path / "copy.mp4")
    assert (tmp_path / "copy.mp4").read_bytes() == b"two"
    assert storage.location("outputs/1/a ü.mp4") == f"{s3}/outputs/1/a ü.mp4"
    assert sorted(storage.names("outputs/1")) == ["a ü.mp4", "frames"]
    assert dict(storage.read_many(["outputs/none", "outputs/1/a ü.mp4"])) == {"outputs/1/a ü.mp4": b"two"}
    assert storage.entry("outputs/none") is None
    storage.remove("outputs/1/frames")
    storage.remove("outputs/1/frames")
    assert keys(storage) == ["outputs/1/a ü.mp4"]


def test_names_are_never_patterns(s3: str, tmp_path: Path) -> None:
    storage = Storage(s3)
    name, like = "outputs/[ab]*? x", "outputs/axx x"
    for folder in (name, like):
        for file in ("frame_1.png", "deep/frame_2.png"):
            storage.write_bytes(f"{folder}/{file}", file.encode())
        storage.write_bytes(f"{folder}.json", folder.encode())
    assert dict(storage.read_many([f"{name}.json", f"{like}.json"])) == {
        f"{name}.json": name.encode(),
        f"{like}.json": like.encode(),
    }
    assert storage.exists(f"{name}.json")
    assert storage.entry(f"{name}.json") is not None
    assert keys(storage, name) == [f"{name}/deep/frame_2.png", f"{name}/frame_1.png"]
    assert sorted(storage.names(name)) == ["deep", "frame_1.png"]
    with storage.staging() as folder:
        (folder / "frames").mkdir()
        (folder / "frames/frame_3.png").write_bytes(b"3")
        storage.publish(folder / "frames", name)
    assert keys(storage, name) == [f"{name}/deep/frame_2.png", f"{name}/frame_3.png"]  # what is deeper is not svdq's
    storage.copy_out(f"{name}/frame_3.png", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"3"
    storage.remove(f"{name}.json")
    storage.remove(name)
    storage.remove(name)
    assert keys(storage) == sorted([f"{like}.json", f"{like}/frame_1.png", f"{like}/deep/frame_2.png"])


def test_a_photo_with_brackets_in_its_name(
    svdq: Cli, s3: str, connection: redis.Redis, settings: Settings, tmp_path: Path
) -> None:
    storage = Storage(s3)
    job_id = add_video(storage, 1, name="cat [1]", formats=("mp4", "png"))
    job = enqueue(connection, SvdJob(image=f"inputs/{'0' * 64}.jpg", name="cat [1]", seed=1), job_id)
    done = svdq("fetch", job_id, "-o", tmp_path / "videos", "--storage", s3)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / f"videos/cat [1]-{job_id}/frame_0002.png").exists()

    removals = find_removals(
        connection, storage, Storage(str(settings.home)), timedelta(days=4), datetime.now(UTC) + timedelta(days=5)
    )
    assert removals == [], "its job is still to be done, and its sidecar names the photo"
    SvdqQueue(job.origin, connection=connection).remove(job)
    job.set_status(JobStatus.FINISHED)
    retry(connection, job_id, storage=storage)
    sidecar = storage.read(f"outputs/cat [1]-{job_id}.json")
    assert read_arguments(fetch(connection, job_id)).replaced == sidecar_digest(sidecar)
    assert len(keys(storage)) == 4


def test_writes_of_others_are_seen_at_once(s3: str) -> None:
    """fsspec would remember what a folder held; here the writers are other processes."""
    ours, theirs = Storage(s3), Storage(s3)
    assert ours.names("outputs") == []
    assert not ours.exists("outputs/a.json")
    theirs.write_text("outputs/a.json", "{}")
    assert ours.exists("outputs/a.json")
    assert ours.names("outputs") == ["a.json"]
    theirs.write_text("outputs/a.json", "[1]")
    assert ours.read("outputs/a.json") == b"[1]"
    assert [entry.size for entry in ours.entries("outputs")] == [3]
    theirs.remove("outputs/a.json")
    assert not ours.exists("outputs/a.json")
    assert ours.entry("outputs/a.json") is None


def test_threads_share_a_storage(s3: str) -> None:
    storage = Storage(s3)

    def write(number: int) -> None:
        for step in range(5):
            storage.write_bytes(f"checkpoints/{number}/{step}.safetensors", b"x")
            storage.exists(f"checkpoints/{number}/{step}.safetensors")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys(storage, "checkpoints")) == 20


def test_prune_in_a_bucket(s3: str, connection: redis.Redis, tmp_path: Path) -> None:
    storage = Storage(s3)
    job_id = add_video(storage, 1, formats=("mp4", "png"))
    storage.write_bytes(f"checkpoints/{2:020x}/3.safetensors", b"x")
    home = Storage(str(tmp_path / "home"))
    later = datetime.now(UTC) + timedelta(days=5)
    assert find_removals(connection, storage, home, timedelta(days=6), later) == []
    found = find_removals(connection, storage, home, timedelta(days=4), later)
    assert [(removal.kind, removal.num_files) for removal in found] == [("video", 4), ("photo", 1), ("checkpoint", 1)]
    assert found[0].keys[0] == f"outputs/photo-{job_id}.json", "where a sidecar exists, the files are complete"
    assert len(remove_all(connection, found)) == 3
    assert [*keys(storage), *keys(storage, "inputs"), *keys(storage, "checkpoints")] == []


def test_the_error_names_a_missing_bucket(s3: str) -> None:
    storage = Storage("s3://svdq-no-such-bucket/prefix")
    with pytest.raises(
        UnavailableError, match=r"'s3://svdq-no-such-bucket/prefix' cannot be used \(there is no bucket"
    ):
        list(storage.entries("outputs"))
    with pytest.raises(UnavailableError, match="does not exist"):
        storage.write_text("outputs/a.json", "{}")


def test_a_server_that_does_not_answer_is_exit_code_3(svdq: Cli, connection: redis.Redis, photo: Path, s3: str) -> None:
    commands = [
        ["submit", photo],
        ["fetch", "--all", "--output", "videos"],
        ["report"],
        ["prune", "--older-than", "30d", "--yes"],
    ]
    for command in commands:
        done = svdq(*command, "--storage", s3, AWS_ENDPOINT_URL="http://127.0.0.1:1")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
        assert done.stderr.startswith(f"Error: The storage '{s3}' cannot be used (")
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in done.stderr
    assert connection.dbsize() == 0, "nothing was enqueued"
    assert list(Path().iterdir()) in ([], [Path("videos")]), "no page, no video"


def test_a_storage_that_does_not_answer_ends_a_command_in_time(
    svdq: Cli, s3: str, s3_server: str, connection: redis.Redis, photo: Path, monkeypatch
) -> None:
    with Proxy(s3_server) as proxy, monkeypatch.context() as patch:
        patch.setattr(remote, "CONNECT_S", 1.0)
        patch.setattr(remote, "SILENT_S", 1.0)
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        patch.setenv("SVDQ_STORAGE", s3)
        assert svdq("submit", photo).returncode == 0
        proxy.silent.set()
        for command in (("submit", photo, "--force"), ("fetch", "--all", "-o", "videos"), ("doctor", "--quick")):
            started = time.monotonic()
            done = svdq(*command)
            assert time.monotonic() - started < 15, "ten times the limits, and not a hundred"
            assert (command, done.returncode) != (command, 0)
            assert "Traceback" not in done.stderr
        proxy.silent.clear()
        proxy.shutdown()


def test_an_upload_that_a_proxy_buffers_is_sent_once(s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Proxy(s3_server) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        patch.setattr(upload, "SILENT_S", 0.5)
        storage = Storage(s3)
        storage.write_text("outputs/a.json", "{}")
        before, proxy.rate_b_s = proxy.num_bytes, 200e3
        data = os.urandom(600_000)
        storage.write_bytes("outputs/a.mp4", data)
        assert proxy.num_bytes - before < 1.1 * len(data)
        proxy.rate_b_s = 0.0
        assert storage.read("outputs/a.mp4") == data
        proxy.shutdown()


def test_an_upload_that_nobody_takes_is_sent_anew(
    s3: str, s3_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    has = upload._has

    def hear_again(*arguments: Any) -> Any:
        proxy.deaf.clear()
        return has(*arguments)

    with Proxy(s3_server) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        patch.setattr(upload, "STALLED_S", 1.0)
        storage = Storage(s3)
        storage.write_text("outputs/a.json", "{}")
        data = os.urandom(48 << 20)  # more than the buffers of the kernel take
        proxy.deaf.set()
        with patch.context() as while_asked:
            while_asked.setattr(upload, "_has", hear_again)
            storage.write_bytes("outputs/a.mp4", data)
        assert "is tried again on a new connection" in caplog.text
        proxy.deaf.set()
        patch.setattr(upload, "SILENT_S", 0.4)
        with pytest.raises(UnavailableError):
            storage.write_bytes("outputs/b.mp4", data)
        proxy.deaf.clear()
        assert storage.read("outputs/a.mp4") == data
        proxy.shutdown()
