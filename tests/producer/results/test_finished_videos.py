import json
import os
from pathlib import Path

import numpy as np
import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.media import video
from svdq.producer.results.finished_videos import read_provenance

RECORD = {"svdq": "0.1.0", "job": {"seed": 1, "name": f"Jürgen 写真 {'é' * 400}"}, "job_id": "0" * 20}


@pytest.mark.parametrize("kind", ["mp4", "gif", "webp", "png", "json"])
def test_the_files_that_we_write_say_how_they_were_made_in_any_script(tmp_path: Path, kind: str) -> None:
    path, text = tmp_path / f"video.{kind}", json.dumps(RECORD, ensure_ascii=False)
    if kind == "json":
        path.write_text(text)
    else:
        frames = np.random.default_rng(0).integers(0, 255, (3, 64, 64, 3), dtype=np.uint8)
        video.write_video(frames, path, kind, 7, text)
    for file in [path, *path.glob("*1.png")]:
        assert read_provenance(file).as_json() == RECORD


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
