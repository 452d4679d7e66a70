"""Writes and reads mp4: encodes frames, muxes sound, joins the links of a chain, and stamps date, comment and mark.

Does not use torch. Each frame is encoded once, and the sound of a video once, from its PCM.
"""

import contextlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.ffmpeg import run_ffmpeg
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.xmp import Mark, mp4_box, packet

#: The RGB to YUV matrix is set in the conversion and in the file: otherwise players guess it from the size.
_TO_YUV = (
    "scale=out_color_matrix=bt709:out_range=tv:flags=lanczos+accurate_rnd+full_chroma_int,format=yuv420p,"
    "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
)
#: The same in the other direction.
_TO_RGB = "scale=in_color_matrix=bt709:in_range=tv:flags=lanczos+accurate_rnd+full_chroma_int,format=rgb24"
_H264 = ("-vf", _TO_YUV, "-c:v", "libx264", "-preset", "medium", "-crf", "17", "-flags:v", "+bitexact")
_AAC = ("-c:a", "aac", "-b:a", "192k", "-flags:a", "+bitexact")
#: Bit-exact: no version strings, so that the same frames give the same bytes.
_MP4 = ("-fflags", "+bitexact", "-map_metadata", "1", "-movflags", "+faststart", "-f", "mp4")


@dataclass(frozen=True, kw_only=True)
class ChainSoFar:
    """The mp4 of a chain up to a link, of the size and the rate of the link that continues it."""

    path: Path
    num_frames: int


def write_mp4(
    frames: NDArray[np.uint8],
    path: Path,
    fps: int,
    comment: str,
    sound: Sound | None,
    capture: Capture,
    mark: Mark | None = None,
    chain: ChainSoFar | None = None,
) -> None:
    """Write frames behind those of `chain`, if any; `sound` is the sound of all. Otherwise as `write_video`."""
    with _stamps(path.parent, comment, capture) as stamps, _track(path.parent, sound) as (wav, track):
        if chain is None:
            encode_frames(frames, fps, [*_H264, *track, *_MP4, f"file:{path}"], [*stamps, *wav])
        else:
            with _pictures(path.parent, chain, frames, fps) as pictures:
                run_ffmpeg([*pictures, *stamps, *wav, "-c:v", "copy", *track, *_MP4, f"file:{path}"])
    if mark is not None:
        with path.open("ab") as file:
            file.write(mp4_box(packet(mark)))


def encode_frames(
    frames: NDArray[np.uint8], fps: int, arguments: Sequence[str], more_inputs: Sequence[str] = ()
) -> bytes:
    """Run ffmpeg on one thread with frames (F, H, W, 3), RGB, as its first input; return its output.

    Raises as `svdq.pipeline.media.video.write_video`.
    """
    _, height, width, _ = frames.shape
    options = ["-threads", "1", "-filter_threads", "1"]
    options += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-framerate", f"{fps}"]
    # As a view: a copy of all frames would hold the GIL for milliseconds.
    data = np.ascontiguousarray(frames).reshape(-1).data
    return run_ffmpeg([*options, "-i", "pipe:0", *more_inputs, "-threads", "1", *arguments], data)


@contextlib.contextmanager
def _stamps(folder: Path, comment: str, capture: Capture) -> Iterator[list[str]]:
    """Yield the arguments of an input with metadata: other users of the machine can read a command line."""
    with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", newline="\n") as metadata:
        escaped = re.sub(r"([=;#\\\n\r])", r"\\\1", comment)
        # The comment is last: ffmpeg takes a line end after any backslash for a part of the text.
        metadata.write(f";FFMETADATA1\n{capture.ffmetadata}comment={escaped}")
        metadata.flush()
        yield ["-f", "ffmetadata", "-i", f"file:{metadata.name}"]


@contextlib.contextmanager
def _track(folder: Path, sound: Sound | None) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the arguments of a third input with sound, and of the track that is encoded from it; of none, no track."""
    if sound is None:
        yield [], []
        return
    with tempfile.NamedTemporaryFile("wb", dir=folder, suffix=".wav") as file:
        file.write(sound.wav)
        file.flush()
        yield ["-f", "wav", "-i", f"file:{file.name}"], ["-map", "0:v", "-map", "2:a", *_AAC]


@contextlib.contextmanager
def _pictures(folder: Path, chain: ChainSoFar, frames: NDArray[np.uint8], fps: int) -> Iterator[list[str]]:
    """Yield the arguments of an input with the frames of a chain, as they are encoded, and then `frames`."""
    with tempfile.TemporaryDirectory(dir=folder) as parts:
        before, own, names = (Path(parts, name) for name in ("before.mp4", "own.mp4", "names.txt"))
        # Without its sound: AAC begins before the first frame, and joining would move all frames by that.
        run_ffmpeg(["-i", f"file:{chain.path}", "-map", "0:v", "-c", "copy", f"file:{before}"])
        encode_frames(frames, fps, [*_H264, f"file:{own}"])
        with names.open("w", encoding="utf-8") as file:
            for part, num_frames in ((before, chain.num_frames), (own, len(frames))):
                quoted = str(part).replace("'", r"'\''")
                # An mp4 gives its duration in milliseconds, which would move the frames after it.
                file.write(f"file 'file:{quoted}'\nduration {num_frames / fps:.6f}\n")
        yield ["-f", "concat", "-safe", "0", "-i", f"file:{names}"]


def read_mp4(path: Path, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Read the frames (F, H, W, 3), RGB, of an mp4 that `write_mp4` has written, of `size` (W, H).

    Raises SampleError if ffmpeg cannot decode it, and OSError as `write_mp4`.
    """
    arguments = ["-threads", "1", "-i", f"file:{path}", "-map", "0:v", "-vf", _TO_RGB, "-fps_mode", "passthrough"]
    data = run_ffmpeg([*arguments, "-f", "rawvideo", "pipe:1"])
    return np.frombuffer(bytearray(data), np.uint8).reshape(-1, size[1], size[0], 3)


def read_sound(path: Path, rate: int) -> NDArray[np.float32]:
    """Read the sound (channels, N), -1 to 1, of an mp4, at `rate` samples a second; raises as `read_mp4`."""
    arguments = ["-threads", "1", "-i", f"file:{path}", "-map", "0:a", "-ac", "2", "-ar", f"{rate}"]
    data = run_ffmpeg([*arguments, "-f", "f32le", "pipe:1"])
    return np.frombuffer(data, np.float32).reshape(-1, 2).T
