import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from svdq.pipeline.errors import InputError
from svdq.pipeline.media import video
from svdq.producer.results.finished_videos import EXIF_IMAGE_DESCRIPTION, read_provenance

RECORD = {"svdq": "0.1.0", "job": {"seed": 1, "name": "é" * 400}, "job_id": "0" * 20}
TEXT = json.dumps(RECORD)


def frames() -> list[Image.Image]:
    return [Image.new("RGB", (64, 64), (level, 0, 0)) for level in (0, 80, 160)]


def write(path: Path) -> Path:
    first, *rest = frames()
    match path.suffix:
        case ".gif":
            first.save(path, save_all=True, append_images=rest, comment=TEXT)
        case ".webp":
            exif = Image.Exif()
            exif[EXIF_IMAGE_DESCRIPTION] = TEXT
            first.save(path, save_all=True, append_images=rest, exif=exif)
        case ".png":
            info = PngImagePlugin.PngInfo()
            info.add_text("comment", TEXT)
            first.save(path, pnginfo=info)
        case ".json":
            path.write_text(TEXT)
        case ".mp4":
            ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
            source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "64x64", "-i", "-"]
            command = [ffmpeg, "-v", "error", *source, "-metadata", f"comment={TEXT}", str(path)]
            subprocess.run(command, input=b"".join(frame.tobytes() for frame in frames()), check=True)
        case _:
            path.mkdir()
            write(path / "0000.png")
    return path


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.json", "a.mp4", "frames"])
def test_read(tmp_path: Path, name: str) -> None:
    assert read_provenance(write(tmp_path / name)).as_json() == RECORD


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"svdq": 1}', b"\0\0\0\x18ftypisom", b"GIF89a", b"\xff\xfe"])
@pytest.mark.parametrize("suffix", [".json", ".mp4", ".gif"])
def test_not_ours(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match="does not say how it was made"):
        read_provenance(path)


def test_not_there(tmp_path: Path, photo: Path) -> None:
    for path in (tmp_path / "none.mp4", photo, tmp_path):
        with pytest.raises(InputError):
            read_provenance(path)


def test_a_file_that_cannot_be_read_is_not_called_foreign(tmp_path: Path) -> None:
    loop = tmp_path / "loop.mp4"
    loop.symlink_to(loop)
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    long = tmp_path / f"{'x' * 300}.mp4"
    for path, reason in ((loop, "symbolic links"), (long, "name too long"), (pipe, "not a regular file")):
        with pytest.raises(InputError, match=rf"cannot be read \(.*{reason}"):
            read_provenance(path)


@pytest.mark.parametrize("kind", ["mp4", "gif", "webp", "png"])
def test_names_in_any_script_come_back_from_the_files_that_we_write(tmp_path: Path, kind: str) -> None:
    document = {"svdq": "1", "job": {"name": "Jürgen 写真"}}
    path = tmp_path / f"video.{kind}"
    frames = np.random.default_rng(0).integers(0, 255, (3, 64, 64, 3), dtype=np.uint8)
    video.write_video(frames, path, kind, 7, json.dumps(document, ensure_ascii=False))
    assert read_provenance(path).as_json() == document
