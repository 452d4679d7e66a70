import errno
import stat
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from svdq.pipeline.errors import SampleError
from svdq.pipeline.media.mp4 import read_mp4, read_sound
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.video import with_gif_comment, write_video

COMMENT = '{"seed": 7, "name": "Käfer ☕", "text": "a=b; \\"c\\"\\nd"}' * 20
FORMATS = ["mp4", "gif", "webp", "png"]


def moving(num_frames=9, height=64, width=128):
    """Colourful stripes that move to the right."""
    x = np.arange(width)[None, None, :] - 4 * np.arange(num_frames)[:, None, None]
    y = np.arange(height)[None, :, None]
    frames = [128 + 100 * np.sin(x / 20 + 0 * y), 128 + 90 * np.sin(y / 15 + x / 40), 0 * x + 3 * y]
    return np.stack(frames, axis=-1).astype(np.uint8)


def still(num_frames=6, colour=(200, 60, 30)):
    return np.broadcast_to(np.array(colour, np.uint8), (num_frames, 64, 64, 3))


def gray(num_frames=6):
    """Frames that are one byte in memory, as those of the simulated model."""
    return np.broadcast_to(np.uint8(90), (num_frames, 64, 64, 3))


def read(path):
    """Frames, their durations in ms and the comment, of a gif or webp file, by Pillow."""
    frames, delays = [], []
    with Image.open(path) as image:
        assert image.info["loop"] == 0
        text = image.info.get("comment") or image.getexif()[ExifTags.Base.ImageDescription].encode("latin-1")
        for index in range(image.n_frames):
            image.seek(index)
            image.load()
            delays.append(image.info["duration"])
            frames.append(np.asarray(image.convert("RGB")))
    return np.stack(frames), delays, text.decode()


def error(ours, theirs):
    return np.abs(ours.astype(int) - theirs).mean()


@pytest.mark.parametrize(("num_frames", "fps"), [(1, 7), (2, 25), (9, 7), (25, 30), (6, 120)])
@pytest.mark.parametrize("make", [moving, still, gray])
def test_mp4(tmp_path, make, num_frames, fps):
    frames, path = make(num_frames), tmp_path / "-a %d:b.mp4"
    write_video(frames, path, "mp4", fps, COMMENT)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert len(container.streams) == 1
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.frames == num_frames
        assert stream.average_rate == fps
        assert stream.duration * stream.time_base == pytest.approx(num_frames / fps)
        assert container.metadata["comment"] == COMMENT
        context = stream.codec_context
        assert (context.colorspace, context.color_primaries, context.color_trc, context.color_range) == (1, 1, 1, 1)
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    assert decoded.shape == frames.shape
    assert error(decoded, frames) < 4


def test_an_mp4_is_read_as_it_was_written(tmp_path):
    frames, time_s = moving(), np.arange(8000) / 8000
    tone = np.stack([np.sin(2 * np.pi * 440 * time_s), np.zeros(8000)]).astype(np.float32) / 2
    write_video(frames, tmp_path / "a.mp4", "mp4", 9, "", sound=Sound.of(tone, 8000))
    found = read_mp4(tmp_path / "a.mp4", (128, 64))
    assert found.shape == frames.shape
    assert error(found, frames) < 3
    sound = read_sound(tmp_path / "a.mp4", 8000)
    assert len(sound) == 2
    middle = slice(2000, 6000)
    assert np.abs(sound[:, middle] - tone[:, middle]).max() < 0.1


def test_mp4_is_ready_to_stream(tmp_path):
    write_video(moving(), tmp_path / "a.mp4", "mp4", 7, COMMENT)
    data = (tmp_path / "a.mp4").read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


@pytest.mark.parametrize(("num_frames", "fps"), [(1, 7), (2, 3), (25, 7), (14, 24), (5, 50)])
@pytest.mark.parametrize("make", [moving, still, gray])
def test_gif(tmp_path, make, num_frames, fps):
    frames = make(num_frames)
    write_video(frames, tmp_path / "a.gif", "gif", fps, COMMENT)
    if num_frames == 1:
        with Image.open(tmp_path / "a.gif") as image:
            assert image.n_frames == 1
            assert image.info["comment"].decode() == COMMENT
        return
    decoded, delays, comment = read(tmp_path / "a.gif")
    assert len(decoded) == num_frames
    assert sum(delays) == pytest.approx(1000 * num_frames / fps, abs=10)
    assert max(delays) - min(delays) <= 10
    assert comment == COMMENT
    assert error(decoded, frames) < 9


@pytest.mark.parametrize(("num_frames", "fps"), [(154, 120), (6, 120), (5, 51), (1, 120)])
def test_a_gif_of_more_frames_than_browsers_show_lasts_as_long(tmp_path, num_frames, fps):
    write_video(moving(num_frames), tmp_path / "a.gif", "gif", fps, "")
    decoded, delays, _ = read_without_comment(tmp_path / "a.gif")
    assert len(decoded) == max(1, round(50 * num_frames / fps))
    if num_frames > 1:
        assert delays == [20] * len(decoded)


def read_without_comment(path):
    with Image.open(path) as image:
        delays = []
        for index in range(image.n_frames):
            image.seek(index)
            delays.append(image.info["duration"])
        return range(image.n_frames), delays, image.info.get("comment")


@pytest.mark.parametrize(("num_frames", "fps"), [(1, 7), (2, 3), (25, 7), (14, 24), (5, 120)])
@pytest.mark.parametrize("make", [moving, still, gray])
def test_webp(tmp_path, make, num_frames, fps):
    frames = make(num_frames)
    write_video(frames, tmp_path / "a.webp", "webp", fps, COMMENT)
    decoded, delays, comment = read(tmp_path / "a.webp")
    assert len(decoded) == num_frames
    assert sum(delays) == pytest.approx(1000 * num_frames / fps, abs=0.5)
    assert max(delays) - min(delays) <= 1
    assert comment == COMMENT
    assert error(decoded, frames) < 5


@pytest.mark.parametrize("make", [moving, still, gray])
def test_png(tmp_path, make):
    frames = make()
    for _ in range(2):  # replaces what is there
        write_video(frames, tmp_path / "a", "png", 7, COMMENT)
    paths = sorted((tmp_path / "a").iterdir())
    assert [path.name for path in paths] == [f"frame_{number:04}.png" for number in range(1, len(frames) + 1)]
    for path, frame in zip(paths, frames, strict=True):
        with Image.open(path) as image:
            assert image.mode == "RGB"
            assert np.array_equal(np.asarray(image), frame)
            assert image.text["comment"] == COMMENT


@pytest.mark.parametrize("kind", FORMATS)
def test_same_frames_same_bytes(tmp_path, kind):
    contents = []
    for name in ("a", "b"):
        path = tmp_path / name
        write_video(moving(3), path, kind, 7, COMMENT)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=600))
def test_any_comment_fits_in_a_gif(tmp_path_factory, comment):
    buffer = BytesIO()
    Image.new("P", (8, 8)).save(buffer, "GIF", duration=140)
    with Image.open(BytesIO(with_gif_comment(buffer.getvalue(), comment))) as image:
        assert image.info.get("comment", b"").decode() == comment
        assert image.info["duration"] == 140


@pytest.mark.parametrize(
    "frames",
    [np.zeros((0, 64, 64, 3), np.uint8), np.zeros((64, 64, 3), np.uint8), np.zeros((1, 64, 64, 3), np.float32)],
)
def test_frames_that_are_no_video(tmp_path, frames):
    with pytest.raises(SampleError, match="cannot be a video"):
        write_video(frames, tmp_path / "a.mp4", "mp4", 7, "")


def test_ffmpegs_refusal_is_the_videos_failure(tmp_path):
    with pytest.raises(SampleError, match="ffmpeg could not encode the video"):
        write_video(np.zeros((1, 63, 65, 3), np.uint8), tmp_path / "a.mp4", "mp4", 7, "")


@pytest.mark.parametrize("kind", FORMATS)
def test_a_missing_folder_is_an_os_error(tmp_path, kind):
    with pytest.raises(OSError, match="No such file or directory"):
        write_video(still(), tmp_path / "none" / "a", kind, 7, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("kind", ["mp4", "gif", "webp"])
def test_a_full_disk_is_an_os_error(tmp_path, kind):
    with pytest.raises(OSError) as caught:  # noqa: PT011
        write_video(still(), Path("/dev/full"), kind, 7, "")
    assert caught.value.errno in {errno.ENOSPC, errno.EINVAL}


def fake_ffmpeg(monkeypatch, folder, script):
    program = folder / "ffmpeg"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(program))


def test_no_command_line_shows_the_comment(monkeypatch, tmp_path):
    fake_ffmpeg(monkeypatch, tmp_path, f'echo "$*" > {tmp_path}/arguments; cat > /dev/null')
    write_video(still(), tmp_path / "a.mp4", "mp4", 7, "a secret prompt")
    assert "secret" not in (tmp_path / "arguments").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"arguments", "ffmpeg"}


@pytest.mark.parametrize("comment", ["a=b; #c \\\n\r\td", " x ", "", "é" * 40_000, "\\"])
def test_any_comment_fits_in_an_mp4(tmp_path, comment):
    write_video(still(1), tmp_path / "a.mp4", "mp4", 7, comment)
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.metadata.get("comment", "") == comment


def test_a_killed_ffmpeg_is_an_os_error(monkeypatch, tmp_path):
    fake_ffmpeg(monkeypatch, tmp_path, "kill -9 $$")
    with pytest.raises(OSError, match="signal 9"):
        write_video(still(50), tmp_path / "a.mp4", "mp4", 7, "")


def test_ffmpegs_complaint_about_space_is_an_os_error(monkeypatch, tmp_path):
    fake_ffmpeg(monkeypatch, tmp_path, "echo 'av_interleaved_write_frame(): No space left on device' >&2; exit 1")
    with pytest.raises(OSError, match="No space left") as caught:
        write_video(still(50), tmp_path / "a.mp4", "mp4", 7, "")
    assert caught.value.errno == errno.ENOSPC


def test_no_ffmpeg(monkeypatch, tmp_path):
    import imageio_ffmpeg

    def fail():
        raise RuntimeError("none")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", fail)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SampleError, match="no ffmpeg"):
        write_video(still(), tmp_path / "a.mp4", "mp4", 7, "")


def test_ffmpeg_that_cannot_be_started_fails_the_video(monkeypatch, tmp_path):
    """It is no trouble of the storage, which a group waits out."""
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    for path in (tmp_path / "missing", tmp_path, tmp_path / "text"):
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(path))
        with pytest.raises(SampleError, match=r"cannot be started .* set IMAGEIO_FFMPEG_EXE to an ffmpeg"):
            write_video(still(), tmp_path / "a.mp4", "mp4", 7, "")
