"""The mark of files that a model has made, as other programs read it."""

import json
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.mp4 import ChainSoFar, read_mp4
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.video import write_video
from svdq.pipeline.media.xmp import Mark

MARK = Mark(source_type="trainedAlgorithmicMedia", tool="svdq 1.2", model='wan <2.2> & "lora"')
FORMATS = ("mp4", "gif", "webp", "png", "wav")
FRAMES = np.random.default_rng(0).integers(0, 256, (3, 64, 96, 3), np.uint8)
SOUND = Sound(pcm=np.arange(8001, dtype=np.int16)[:, None].repeat(2, 1), rate=8000)


def written(folder: Path, mark: Mark | None, capture: Capture = Capture()) -> dict[str, Path]:  # noqa: B008 - frozen
    folder.mkdir()
    for kind in FORMATS:
        write_video(FRAMES, folder / f"a.{kind}", kind, 7, "{}", sound=SOUND, capture=capture, mark=mark)
    return {kind: folder / ("a.png/frame_0002.png" if kind == "png" else f"a.{kind}") for kind in FORMATS}


def pixels(path: Path) -> list[bytes]:
    with Image.open(path) as image:
        shown = []
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            shown.append(image.convert("RGB").tobytes())
        return shown


@pytest.mark.skipif(shutil.which("exiftool") is None, reason="exiftool is not installed")
def test_exiftool_finds_the_mark_in_each_format(tmp_path: Path) -> None:
    taken = Capture(time=datetime(2024, 5, 6, 7, 8, 9), location=(48.0, -11.5))
    for name, mark in (("marked", MARK), ("plain", None)):
        for kind, path in written(tmp_path / name, mark, taken).items():
            command = ["exiftool", "-json", "-a", "-G1", str(path)]
            [shown] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            assert not any("Warning" in key or "Error" in key for key in shown), (kind, shown)
            found = [shown.get(f"XMP-{key}") for key in ("iptcExt:DigitalSourceType", "xmp:CreatorTool")]
            if mark is None:
                assert found == [None, None], kind
            else:
                address = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
                assert found == [address, "svdq 1.2"], (kind, shown)
                assert MARK.model in shown.values(), (kind, shown)


def test_frames_and_sound_are_the_same_with_and_without(tmp_path: Path) -> None:
    marked, plain = written(tmp_path / "marked", MARK), written(tmp_path / "plain", None)
    assert (read_mp4(marked["mp4"], (96, 64)) == read_mp4(plain["mp4"], (96, 64))).all()
    for kind in ("gif", "webp", "png"):
        assert pixels(marked[kind]) == pixels(plain[kind]), kind
    sounds = [Sound.parse(paths["wav"].read_bytes()) for paths in (marked, plain)]
    assert (sounds[0].pcm == sounds[1].pcm).all()
    for kind, path in marked.items():
        if kind in ("mp4", "gif", "wav"):  # ffmpeg does not decode animated webp
            with av.open(str(path)) as container:
                assert sum(1 for _ in container.decode()) > 0, kind


def test_a_chain_has_one_mark(tmp_path: Path) -> None:
    marked = written(tmp_path / "marked", MARK)
    chain = ChainSoFar(path=marked["mp4"], num_frames=3)
    write_video(FRAMES, tmp_path / "b.mp4", "mp4", 7, "{}", sound=SOUND, mark=MARK, chain=chain)
    assert (tmp_path / "b.mp4").read_bytes().count(b"DigitalSourceType=") == 1
    assert len(read_mp4(tmp_path / "b.mp4", (96, 64))) == 6
