"""Writes frames as mp4, gif, webp or png into a local folder, and sound as wav. Does not use torch.

It runs in a thread in parallel with the GPU, so heavy work happens in ffmpeg or inside Pillow, without the GIL, and on
one thread, which leaves the cores to the other ranks. The same frames give the same bytes.
"""

from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, PngImagePlugin

from svdq.pipeline.errors import SampleError
from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.mp4 import ChainSoFar, encode_frames, write_mp4
from svdq.pipeline.media.sound import Sound
from svdq.pipeline.media.xmp import Mark, gif_extension, packet, riff_chunk
from svdq.pipeline.video_parameters import Format

GIF_MAX_FPS = 50  # browsers show frames of less than two hundredths of a second for a tenth


def write_video(
    frames: NDArray[np.uint8],
    path: Path,
    format: Format,  # noqa: A002
    fps: int,
    comment: str,
    *,
    sound: Sound | None = None,
    capture: Capture = Capture(),  # noqa: B008 - frozen
    mark: Mark | None = None,
    chain: ChainSoFar | None = None,
) -> None:
    """Write a video to `path`, replacing an existing one; a failure may leave a partial file.

    mp4: H.264 in yuv420p, BT.709, the index first (faststart); `comment` in the comment tag; `sound` in AAC. gif,
    webp and png are silent.
    gif: 256 colors chosen for this video, endless; `comment` in a comment block. Delays are whole hundredths of a
    second, so of more than 50 frames a second it has 50, which last as long.
    webp: lossy, endless; `comment` in EXIF's ImageDescription, as UTF-8.
    png: `path` is a folder of frame_0001.png and so on, lossless; `comment` in an iTXt chunk of that name in each.
    wav: `sound` alone, in 16 bits, without `comment`.

    The time and the place of `capture` are the creation time and the location of an mp4, EXIF in a webp and in pngs,
    and XMP in a gif. The `mark` is XMP in all: in a box at the end of an mp4, in a chunk of the others.

    Frames are (F, H, W, 3), uint8, RGB; H and W even. The comment is any text without NUL; mp4 takes up to 100 kB.
    Raises SampleError if the frames cannot be a video, a wav has no sound, or ffmpeg refuses the frames or cannot be
    started, and OSError for a condition such as a full disk; the same call may succeed later.
    """
    if frames.ndim != 4 or not len(frames) or frames.shape[3] != 3 or frames.dtype != np.uint8:
        raise SampleError(
            f"Frames of shape {frames.shape} and type {frames.dtype} cannot be a video; "
            "they must be (F, H, W, 3) of uint8 with at least one frame."
        )
    match format:
        case "mp4":
            write_mp4(frames, path, fps, comment, sound, capture, mark, chain)
        case "gif":
            _write_gif(frames, path, fps, comment, packet(mark, capture))
        case "webp":
            _write_webp(frames, path, fps, comment, capture, packet(mark))
        case "png":
            _write_png(frames, path, comment, capture, packet(mark))
        case "wav":
            if sound is None:
                raise SampleError("This model makes no sound, so there is no wav to write; leave out the format wav.")
            path.write_bytes(_with_wav_xmp(sound.wav, packet(mark)))


def _with_wav_xmp(data: bytes, xmp: bytes) -> bytes:
    return riff_chunk(b"RIFF", data[8:] + riff_chunk(b"_PMX", xmp)) if xmp else data


def _write_gif(frames: NDArray[np.uint8], path: Path, fps: int, comment: str, xmp: bytes) -> None:
    # Ordered dither is the same in all frames, whereas error diffusion would flicker.
    palette = (
        "split[a][b];[a]palettegen=stats_mode=full[p];[b][p]paletteuse=dither=bayer:bayer_scale=4:diff_mode=rectangle"
    )
    arguments = ["-filter_complex", palette, "-fflags", "+bitexact", "-loop", "0", "-f", "gif", "pipe:1"]
    if fps > GIF_MAX_FPS:
        shown = np.arange(max(1, round(len(frames) * GIF_MAX_FPS / fps))) * fps // GIF_MAX_FPS
        frames, fps = frames[np.minimum(shown, len(frames) - 1)], GIF_MAX_FPS
    data = with_gif_comment(encode_frames(frames, fps, arguments), comment)
    path.write_bytes(_with_gif_extension(data, gif_extension(xmp)))


def with_gif_comment(data: bytes, comment: str) -> bytes:
    """Put a comment, as UTF-8, before the first image of a GIF (names of GIF89a): ffmpeg writes none."""
    text = comment.encode()
    pieces = [text[start : start + 255] for start in range(0, len(text), 255)]
    return _with_gif_extension(data, b"\x21\xfe" + b"".join(bytes([len(piece)]) + piece for piece in pieces) + b"\x00")


def _with_gif_extension(data: bytes, extension: bytes) -> bytes:
    # The header has 13 bytes; its flags say whether a global color table follows, and the size of that.
    global_color_table = 3 * 2 ** ((data[10] & 0x07) + 1) if data[10] & 0x80 else 0
    first_image = data.index(b"\x21\xf9", 13 + global_color_table)  # its Graphic Control Extension
    return data[:first_image] + extension + data[first_image:]


def _write_webp(frames: NDArray[np.uint8], path: Path, fps: int, comment: str, capture: Capture, xmp: bytes) -> None:
    """Assemble an animation of opaque images, each of one VP8 or VP8L chunk.

    Pillow's own animations merge equal frames and hold all frames in memory. The names of chunks and fields are those
    of the WebP container specification.
    """
    _, height, width, _ = frames.shape
    size = _uint24(width - 1) + _uint24(height - 1)
    exif = capture.add_to(Image.Exif())
    exif[ExifTags.Base.ImageDescription] = comment.encode()
    animation, has_xmp, has_exif, do_not_blend = 0x02, 0x04, 0x08, 0x02
    flags = animation | has_exif | (has_xmp if xmp else 0)
    chunks = [riff_chunk(b"VP8X", bytes([flags, 0, 0, 0]) + size), riff_chunk(b"ANIM", bytes(6))]
    for number, frame in enumerate(frames):
        buffer = BytesIO()
        Image.fromarray(frame).save(buffer, "WEBP", quality=90, method=4)
        bitstream = buffer.getvalue()[12:]
        delay_ms = round(1000 * (number + 1) / fps) - round(1000 * number / fps)
        chunks.append(riff_chunk(b"ANMF", bytes(6) + size + _uint24(delay_ms) + bytes([do_not_blend]) + bitstream))
    chunks.append(riff_chunk(b"EXIF", exif.tobytes().removeprefix(b"Exif\x00\x00")))
    if xmp:
        chunks.append(riff_chunk(b"XMP ", xmp))
    path.write_bytes(riff_chunk(b"RIFF", b"WEBP" + b"".join(chunks)))


def _uint24(value: int) -> bytes:
    return value.to_bytes(3, "little")


def _write_png(frames: NDArray[np.uint8], path: Path, comment: str, capture: Capture, xmp: bytes) -> None:
    path.mkdir(exist_ok=True)
    info = PngImagePlugin.PngInfo()
    info.add_itxt("comment", comment)
    if xmp:
        info.add_itxt("XML:com.adobe.xmp", xmp.decode())
    exif = capture.add_to(Image.Exif())
    for number, frame in enumerate(frames, start=1):
        target = path / f"frame_{number:04}.png"
        Image.fromarray(frame).save(target, pnginfo=info, exif=exif if len(exif) else None, compress_level=4)


def png_of(frame: NDArray[np.uint8]) -> bytes:
    """Encode a frame (H, W, 3) as a PNG, without loss."""
    buffer = BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()


NUM_AHEAD = 4  # frames after the end that minterpolate needs for the last frames of a video

#: minterpolate follows the motion of blocks; there are no cuts to detect. It refuses sides below 32 pixels, which are
#: padded. Full range keeps the colors of given frames within 2 of 255.
_FILTERS = (
    "scale=out_color_matrix=bt709:out_range=pc:flags=lanczos+accurate_rnd+full_chroma_int",
    "format=yuv444p",
    r"pad=max(iw\,32):max(ih\,32)",
    "minterpolate=fps={fps}:mi_mode=mci:scd=none",
    "crop={width}:{height}:0:0",
    "scale=in_color_matrix=bt709:in_range=pc:flags=lanczos+accurate_rnd+full_chroma_int",
    "format=rgb24",
)


def change_motion(
    frames: NDArray[np.uint8], fps: int, folder: Path, *, boomerang: bool, interpolate: int | None, loop: bool = False
) -> NDArray[np.uint8]:
    """Return the frames (F, H, W, 3) of a video as they are to be shown, interpolated ones in a file of `folder`.

    A boomerang shows them forward and back; first and last are not repeated, so that a loop does not halt. The last
    frame of a `loop`, which is the first again, is left out for the same reason. `interpolate` is the new rate, above
    `fps`. Raises as `write_video`.
    """
    last = len(frames) - 1
    order = list(range(last if loop else len(frames)))
    if boomerang:
        order += range(last - 1, 0, -1)
    goes_on = boomerang or loop
    if interpolate is None:
        return frames[order] if goes_on else frames
    # A loop goes on with its first frames; otherwise the last frame stays.
    ahead = [order[index % len(order)] if goes_on else last for index in range(NUM_AHEAD)]
    num_frames = (2 * len(order) * interpolate + fps) // (2 * fps)  # of the same duration, rounded
    path = folder / "frames.rgb"
    _, height, width, _ = frames.shape
    filters = ",".join(_FILTERS).format(fps=interpolate, width=width, height=height)
    try:
        encode_frames(
            frames[order + ahead], fps, ["-vf", filters, "-frames:v", str(num_frames), "-f", "rawvideo", f"file:{path}"]
        )
        return np.memmap(path, np.uint8, "r", shape=(num_frames, *frames.shape[1:]))
    finally:
        path.unlink(missing_ok=True)
