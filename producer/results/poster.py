"""Makes small pictures of videos and photos, encoded anew: nothing of a foreign file reaches a browser."""

import io
import subprocess
from typing import IO

from PIL import Image

from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.media.ffmpeg import find_ffmpeg
from svdq.pipeline.media.image import draft, open_photo, pillow_without_limits, prepare_photo, upright_srgb
from svdq.pipeline.video_parameters import Fit
from svdq.producer.threads import DECODED, MAX_DECODED_BYTES, Reserve

MAX_SIDE = 512  # of a poster, in pixels
MAX_PIXELS = 100_000_000  # of the picture
MAX_RATIO = 8  # longest side of a reduced picture over its shortest one
TIMEOUT_S = 30  # of ffmpeg for one frame


def poster_of_video(file: IO[bytes], kind: str) -> bytes:
    """Return the first frame of an mp4, gif or webp as JPEG; raises InputError, or UnavailableError without ffmpeg."""
    if kind == "mp4":
        return _encode(_first_frame(file))
    try:
        return poster_of_picture(file.read())
    except OSError as error:
        raise InputError("The file of the video cannot be read.") from error


def poster_of_picture(data: bytes, side: int = MAX_SIDE, max_pixels: int = MAX_PIXELS) -> bytes:
    """Return the first frame of a gif, webp, png or photo, upright, as a JPEG; raises InputError."""
    try:
        return _encode(upright_srgb(_reduced(data, side, max_pixels), note=lambda sentence: None), side)
    except SampleError as error:
        raise InputError(str(error)) from error


def poster_of_photo(
    data: bytes, size: tuple[int, int], fit: Fit, max_pixels: int, reserve: Reserve = DECODED.take
) -> bytes:
    """Return a photo as its video shows it, as a JPEG; raises InputError; `reserve` as in `check_data`."""
    scale = min(1.0, MAX_SIDE / max(size))
    width, height = (max(1, round(side * scale)) for side in size)
    try:
        photo = _reduced(data, max(width, height), max_pixels, reserve)
        return _encode(prepare_photo(photo, width, height, fit, note=lambda sentence: None))
    except SampleError as error:
        raise InputError(str(error)) from error


def _reduced(data: bytes, side: int, max_pixels: int, reserve: Reserve = DECODED.take) -> Image.Image:
    """Decode the first frame of a picture, and reduce it while its sides stay at least `side`; raises SampleError."""
    try:
        image = open_photo(data)
        if image.width * image.height > max_pixels:
            raise SampleError(f"The picture has more than {max_pixels:,} pixels.")
        num_bytes = draft(image, data, (side, side))
        num_bytes = max(num_bytes, image.width * image.height * (9 if image.has_transparency_data else 5))  # to resize
        if num_bytes > MAX_DECODED_BYTES:
            raise SampleError(f"The picture takes {num_bytes >> 20:,} MiB of memory to decode.")
        with reserve(num_bytes), pillow_without_limits():
            image.load()
            factor = max(min(image.size) // side, 1)
            size = min(image.width // factor, MAX_RATIO * side), min(image.height // factor, MAX_RATIO * side)
            image.thumbnail(size, reducing_gap=None if image.mode.startswith("I;") else 2.0)  # I;16 cannot be reduced
        return image
    except SampleError:
        raise
    except Exception as error:
        # Pillow's decoders raise more types than they document.
        raise SampleError("The picture cannot be decoded.") from error


def _first_frame(file: IO[bytes]) -> Image.Image:
    # Of no other format: a playlist names other files.
    command = [find_ffmpeg(), "-v", "error", "-nostdin", "-threads", "1", "-f", "mp4", "-i", "/dev/stdin"]
    command += ["-frames:v", "1", "-f", "image2pipe", "-c:v", "png", "-"]
    try:
        done = subprocess.run(command, stdin=file, capture_output=True, timeout=TIMEOUT_S, check=True)
        with Image.open(io.BytesIO(done.stdout), formats=["PNG"]) as image:
            return image.convert("RGB")
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError("The first frame of the video cannot be decoded.") from error


def _encode(image: Image.Image, side: int = MAX_SIDE) -> bytes:
    image.thumbnail((side, side))
    image.info.clear()
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    return file.getvalue()
