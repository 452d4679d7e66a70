"""Writes frames as mp4, gif, webp or png into a local folder. Does not use torch.

It runs in a thread in parallel with the GPU, so heavy work happens in ffmpeg or inside Pillow, without the GIL, and on
one thread, which leaves the cores to the other ranks. The same frames give the same bytes.
"""

from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from svdq.pipeline.errors import SampleError
from svdq.pipeline.media.animation import finish_gif, join_webp, spread
from svdq.pipeline.media.pipe import run_ffmpeg
from svdq.pipeline.parameters import Format


def write_video(frames: NDArray[np.uint8], path: Path, format: Format, fps: int, comment: str) -> None:  # noqa: A002
    """Write a video to `path`, replacing an existing one; a failure may leave a partial file.

    mp4: H.264 in yuv420p, BT.709, the index first (faststart); `comment` in the comment tag.
    gif: 256 colours chosen for this video, endless; `comment` in a comment block. Delays are whole hundredths of a
    second whose sum is right.
    webp: lossy, endless; `comment` in EXIF's ImageDescription, as UTF-8.
    png: `path` is a folder of frame_0001.png and so on, lossless; `comment` in an iTXt chunk of that name in each.

    Args:
        frames: (F, H, W, 3), uint8, RGB; H and W even.
        path: the file, or for png the folder, in a folder that exists.
        format: what to write.
        fps: frames a second.
        comment: any text without NUL, usually JSON; mp4 takes up to 100 kB.

    Raises:
        SampleError: the frames cannot be a video, ffmpeg refuses them, or it cannot be started.
        OSError: a condition such as a full disk; the same call may succeed later.
    """
    if frames.ndim != 4 or not len(frames) or frames.shape[3] != 3 or frames.dtype != np.uint8:
        raise SampleError(
            f"Frames of shape {frames.shape} and type {frames.dtype} cannot be a video; "
            "they must be (F, H, W, 3) of uint8 with at least one frame."
        )
    match format:
        case "mp4":
            _write_mp4(frames, path, fps, comment)
        case "gif":
            _write_gif(frames, path, fps, comment)
        case "webp":
            _write_webp(frames, path, fps, comment)
        case "png":
            _write_png(frames, path, comment)


def _write_mp4(frames: NDArray[np.uint8], path: Path, fps: int, comment: str) -> None:
    # The RGB to YUV matrix is set in the conversion and in the file: otherwise players guess it from the size.
    filters = [
        "scale=out_color_matrix=bt709:out_range=tv:flags=lanczos+accurate_rnd+full_chroma_int",
        "format=yuv420p",
        "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709",
    ]
    arguments = ["-vf", ",".join(filters), "-c:v", "libx264", "-preset", "medium", "-crf", "17"]
    # Bit-exact: no version strings, so that the same frames give the same bytes.
    arguments += ["-flags:v", "+bitexact", "-fflags", "+bitexact", "-metadata", f"comment={comment}"]
    run_ffmpeg(frames, fps, [*arguments, "-movflags", "+faststart", "-f", "mp4", f"file:{path}"])


def _write_gif(frames: NDArray[np.uint8], path: Path, fps: int, comment: str) -> None:
    # Ordered dither is the same in all frames, whereas error diffusion would flicker.
    palette = (
        "split[a][b];[a]palettegen=stats_mode=full[p];[b][p]paletteuse=dither=bayer:bayer_scale=4:diff_mode=rectangle"
    )
    arguments = ["-filter_complex", palette, "-fflags", "+bitexact", "-loop", "0", "-f", "gif", "pipe:1"]
    path.write_bytes(finish_gif(run_ffmpeg(frames, fps, arguments), fps, comment))


def _write_webp(frames: NDArray[np.uint8], path: Path, fps: int, comment: str) -> None:
    _, height, width, _ = frames.shape
    images = (_encode_webp(frame) for frame in frames)
    path.write_bytes(join_webp(images, width, height, spread(len(frames), fps, 1000), comment))


def _encode_webp(frame: NDArray[np.uint8]) -> bytes:
    buffer = BytesIO()
    Image.fromarray(frame).save(buffer, "WEBP", quality=90, method=4)
    return buffer.getvalue()


def _write_png(frames: NDArray[np.uint8], path: Path, comment: str) -> None:
    path.mkdir(exist_ok=True)
    info = PngImagePlugin.PngInfo()
    info.add_itxt("comment", comment)
    for number, frame in enumerate(frames, start=1):
        Image.fromarray(frame).save(path / f"frame_{number:04}.png", pnginfo=info, compress_level=4)
