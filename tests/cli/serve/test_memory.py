"""Photos of many pixels, uploaded and shown at the same time: the server stays within the memory of its pod."""

import io
import os
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pillow_heif
import pytest
import redis
from PIL import Image

from svdq.producer.storage.storage import Storage
from tests.cli.serve.ended import finish
from tests.cli.serve.servers import Answer, Server

NUM_PHOTOS = 6
SIZE = (8000, 6250)
MAX_BYTES = 700 << 20


def flat(kind: str, mode: str = "RGB", size: tuple[int, int] = SIZE, **options: object) -> bytes:
    """A large photo in a small file."""
    file = io.BytesIO()
    image = Image.new(mode, size, 130)
    if kind == "HEIF":
        pillow_heif.from_pillow(image).save(file, quality=10)
    else:
        image.save(file, kind, **options)
    return file.getvalue()


def peak_bytes(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def at_once(ask: Callable[[int], Answer], among: int = NUM_PHOTOS) -> list[Answer]:
    meeting = threading.Barrier(among)

    def wait_and_ask(number: int) -> Answer:
        meeting.wait()
        return ask(number)

    with ThreadPoolExecutor(among) as threads:
        return list(threads.map(wait_and_ask, range(among)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("PNG", {"compress_level": 1}, marks=pytest.mark.long),
        pytest.param("PNG", {"compress_level": 1, "mode": "RGBA"}, marks=pytest.mark.long),
        pytest.param("JPEG", {}, marks=pytest.mark.long),
        pytest.param("JPEG", {"progressive": True, "subsampling": 0}, marks=pytest.mark.long),
        pytest.param("HEIF", {}, marks=pytest.mark.long),
        pytest.param("WEBP", {"method": 0, "size": (5500, 5500)}, marks=pytest.mark.long),
    ],
)
def test_large_photos_at_once(server: Server, kind: str, options: dict, capsys: pytest.CaptureFixture[str]) -> None:
    photo = flat(kind, **options)
    begin = peak_bytes(server)
    uploaded = at_once(lambda number: server.create(photo + bytes([number])))  # each photo is another one
    assert [answer.status for answer in uploaded] == [200] * NUM_PHOTOS, uploaded[0].body
    uploads = peak_bytes(server)
    paths = [f"/page/picture/{answer.json['id']}" for answer in uploaded]
    for answer in at_once(lambda number: server.get(paths[number])):
        with Image.open(io.BytesIO(answer.body)) as picture:
            assert (picture.format, picture.size) == ("JPEG", (512, 288))
    pictures = peak_bytes(server)
    with capsys.disabled():
        print(f"\n{kind} {options}: {begin >> 20} MiB, uploads {uploads >> 20}, pictures {pictures >> 20}")
    assert pictures < MAX_BYTES


def test_a_zip_is_made_in_parts(server: Server, connection: redis.Redis, storage: Storage) -> None:
    video_id = finish(connection, storage, 1, formats=("mp4",))
    [video] = (Path(str(storage.folder)) / "outputs").glob(f"*{video_id}.mp4")
    os.truncate(video, 200 << 20)
    headers = {**server.bearer, "Content-Type": "application/x-www-form-urlencoded"}
    zipped = server.ask("POST", "/page/zip", f"ids={video_id}", headers).body
    with zipfile.ZipFile(io.BytesIO(zipped)) as archive:
        assert archive.testzip() is None
        assert [info.file_size for info in archive.infolist()] == [200 << 20]
    assert peak_bytes(server) < 180 << 20
