"""Files of finished videos: content, pictures, and what a deletion removes."""

import io
import zipfile
from pathlib import Path

import pytest
import redis
from PIL import Image

from svdq.producer.storage.storage import Storage
from svdq.producer.verdicts import read_verdicts, record_verdict
from tests import queued
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import Serve, Server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

FORM_HEADERS = {"Content-Type": "application/x-www-form-urlencoded"}


def test_the_files_of_a_video(server: Server, connection: redis.Redis, storage: Storage) -> None:
    video_id = finish(connection, storage, 1, name="Käse 1", formats=("gif", "mp4", "webp", "png"))
    path = f"/v1/videos/{video_id}"
    files = server.get(path).json["svdq"]["files"]
    assert [file["format"] for file in files] == ["gif", "mp4", "webp", "png"]
    begin = {"gif": b"GIF8", "mp4": b"\0\0\0", "webp": b"RIFF", "png": b"PK\3\4"}
    types = {"gif": "image/gif", "mp4": "video/mp4", "webp": "image/webp", "png": "application/zip"}
    for file in files:
        answer = server.get(file["url"])
        assert answer.body.startswith(begin[file["format"]])
        assert answer.headers["Content-Type"] == types[file["format"]]
        assert "filename*=utf-8''K%C3%A4se%201-" in answer.headers["Content-Disposition"]
        assert answer.headers["Cache-Control"] == "private, no-cache"
        if file["format"] == "png":
            continue
        same = server.get(file["url"], **{"If-None-Match": answer.headers["ETag"], "Range": "bytes=0-3"})
        assert (same.status, same.body, same.headers["ETag"]) == (304, b"", answer.headers["ETag"])
        assert server.get(file["url"], **{"If-None-Match": '"another"'}).body == answer.body
    assert server.get(f"{path}/content").body[4:8] == b"ftyp"
    with zipfile.ZipFile(io.BytesIO(server.get(f"{path}/content?format=png").body)) as frames:
        assert [Path(name).name for name in frames.namelist()] == ["frame_0001.png", "frame_0002.png"]

    part = server.get(f"{path}/content?format=mp4", Range="bytes=4-7")
    assert (part.status, part.body) == (206, b"ftyp")
    whole = len(server.get(f"{path}/content?format=mp4").body)
    assert part.headers["Content-Range"] == f"bytes 4-7/{whole}"
    assert server.get(f"{path}/content?format=mp4", Range=f"bytes={whole}-").status == 416
    assert server.get(f"{path}/content?format=mp4", Range="bytes=-4").headers["Content-Length"] == "4"
    assert server.ask("HEAD", f"{path}/content?format=mp4").headers["Content-Length"] == str(whole)
    for query, param in [("variant=spritesheet", "variant"), ("format=avi", "format")]:
        assert server.get(f"{path}/content?{query}").error["param"] == param


def gray_of_thumbnail(server: Server, video_id: str) -> int:
    """Return the gray of the middle of a thumbnail."""
    answer = server.get(f"/v1/videos/{video_id}/content?variant=thumbnail")
    assert answer.headers["Content-Type"] == "image/jpeg"
    with Image.open(io.BytesIO(answer.body)) as image:
        assert (image.format, image.size) == ("JPEG", (64, 64))
        return image.convert("L").getpixel((32, 32))


def test_every_format_has_a_thumbnail(server: Server, connection: redis.Redis, storage: Storage) -> None:
    for number, formats in enumerate((("gif",), ("mp4",), ("webp",), ("png", "mp4"))):
        video_id = finish(connection, storage, number, formats=formats, level=200)
        for _ in range(2):
            assert gray_of_thumbnail(server, video_id) == pytest.approx(200, abs=8)


def test_removed_files(server: Server, connection: redis.Redis, storage: Storage) -> None:
    video_id = finish(connection, storage, 1)
    for entry in [*storage.entries("outputs"), *storage.entries("inputs")]:
        storage.remove(entry.key)
    for query in ("", "?variant=thumbnail"):  # nor is there a photo
        answer = server.get(f"/v1/videos/{video_id}/content{query}")
        assert (answer.status, answer.error["code"]) == (404, "not_found")


def test_a_renamed_folder_is_found(server: Server, connection: redis.Redis, storage: Storage) -> None:
    assert storage.folder is not None
    known = finish(connection, storage, 1, formats=("mp4", "png"), name="a")
    forgotten = finish(connection, storage, 2, formats=("mp4", "png"), name="b")
    connection.delete(f"rq:job:{forgotten}")
    expected = {each: storage.read(f"outputs/{name}-{each}.mp4") for name, each in (("a", known), ("b", forgotten))}
    (storage.folder / "best").mkdir()
    for path in (storage.folder / "outputs").iterdir():
        path.rename(storage.folder / "best" / path.name)
    (storage.folder / "best").rename(storage.folder / "outputs/best")
    assert server.get(f"/v1/videos/{known}/content").body == expected[known]
    assert server.get(f"/v1/videos/{known}/content?format=png").body[:4] == b"PK\3\4"
    for each in expected:
        assert server.get(f"/page/results/{each}").json["is_there"]
        zipped = server.ask("POST", "/page/zip", f"ids={each}", server.bearer | FORM_HEADERS)
        with zipfile.ZipFile(io.BytesIO(zipped.body)) as archive:
            assert len(archive.namelist()) == 3
    for each in expected:
        deleted = server.ask("POST", "/page/actions", {"action": "delete", "ids": [each]})
        assert deleted.json["problems"] == {}
    assert list(storage.entries("outputs")) == []


def test_a_video_that_is_needed_is_not_deleted(server: Server, connection: redis.Redis, storage: Storage) -> None:
    kept, upscaled = (
        finish(connection, storage, 1, name="a"),
        finish(connection, storage, 2, name="b", formats=("mp4",)),
    )
    record_verdict(connection, [kept], "keep")
    queued.enqueue(connection, queued.JOB.model_copy(update={"finishes": f"b-{upscaled}", "upscale": "2"}), "f" * 20)
    before = sorted(entry.key for entry in storage.entries("outputs"))
    for video_id, words in ((kept, "to be kept"), (upscaled, "is needed by job")):
        answer = server.ask("DELETE", f"/v1/videos/{video_id}")
        assert (answer.status, words in answer.error["message"]) == (400, True)
        done = server.ask("POST", "/page/actions", {"action": "delete", "ids": [video_id]})
        assert words in done.json["problems"][video_id]
    assert sorted(entry.key for entry in storage.entries("outputs")) == before


def test_files_are_not_found_through_links(
    server: Server, connection: redis.Redis, storage: Storage, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    assert storage.folder is not None
    video_id = finish(connection, storage, 1, formats=("mp4", "gif", "png"))
    for key in (f"photo-{video_id}.mp4", f"photo-{video_id}.gif", f"photo-{video_id}/frame_0001.png"):
        path = storage.folder / "outputs" / key
        path.unlink()
        path.symlink_to(secret)
    for query in ("", "?format=gif", "?variant=thumbnail"):
        answer = server.get(f"/v1/videos/{video_id}/content{query}")
        assert b"secret" not in answer.body
        assert answer.status == (200 if "thumbnail" in query else 404)  # of its photo
    frames = server.get(f"/v1/videos/{video_id}/content?format=png")
    with zipfile.ZipFile(io.BytesIO(frames.body)) as archive:
        assert archive.namelist() == [f"photo-{video_id}/frame_0002.png"]


def test_delete_removes_only_files_of_svdq(server: Server, connection: redis.Redis, storage: Storage) -> None:
    video_id = finish(connection, storage, 1, formats=("gif", "png"))
    other = finish(connection, storage, 2, formats=("gif", "png"))
    storage.write_text(f"outputs/photo-{video_id}/notes.txt", "mine")
    storage.write_text(f"outputs/photo-{video_id}.txt", "mine")
    record_verdict(connection, [video_id, other], "reject")
    assert server.ask("DELETE", f"/v1/videos/{video_id}").json["deleted"]
    # The same photo may be rendered again.
    assert read_verdicts(connection, [video_id, other]) == [None, "reject"]
    assert server.get(f"/v1/videos/{video_id}").status == 404
    left = {entry.key for entry in storage.entries("outputs")}
    assert {key for key in left if video_id in key} == {
        f"outputs/photo-{video_id}/notes.txt",
        f"outputs/photo-{video_id}.txt",
    }
    assert {key for key in left if other in key} == {
        f"outputs/photo-{other}.gif",
        f"outputs/photo-{other}.json",
        *(f"outputs/photo-{other}/frame_000{number}.png" for number in (1, 2)),
    }
    assert server.ask("DELETE", f"/v1/videos/{other}").json["deleted"]
    assert not any(other in entry.key for entry in storage.entries("outputs"))
    assert other not in "".join(storage.names("outputs"))
    assert connection.keys("rq:job:*") == []


def test_a_remote_storage(
    serve: Serve, connection: redis.Redis, s3: str, photo_bytes: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    storage, folder = Storage(s3), tmp_path_factory.mktemp("temporary")
    server = serve("--port", "0", SVDQ_STORAGE=s3, TMPDIR=str(folder))
    video_id = finish(connection, storage, 9, formats=("gif", "png"))
    path = f"/v1/videos/{video_id}"
    assert server.get(f"{path}/content").body == storage.read(f"outputs/photo-{video_id}.gif")
    etag = server.get(f"{path}/content").headers["ETag"]
    assert server.get(f"{path}/content", **{"Range": "bytes=0-3", "If-Range": etag}).body == b"GIF8"
    wait_until(lambda: list(folder.iterdir()) == [])  # no copy is left
    assert server.get(f"{path}/content", **{"If-None-Match": etag}).status == 304
    assert server.get(f"{path}/content?format=png").body[:4] == b"PK\3\4"
    other = finish(connection, storage, 2, formats=("mp4",), level=200)
    assert gray_of_thumbnail(server, other) == pytest.approx(200, abs=8)
    assert server.ask("DELETE", f"/v1/videos/{other}").json["deleted"]
    created = server.create(photo_bytes).json["id"]
    assert len(list(storage.entries("inputs"))) == 2
    assert server.ask("DELETE", path).json["deleted"]
    assert server.ask("DELETE", f"/v1/videos/{created}").json["deleted"]
    assert list(storage.entries("outputs")) == []
