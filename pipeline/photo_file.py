"""Opens photo files: defines the accepted formats and the limit on pixels. Needs only Pillow."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from io import BytesIO

from PIL import Image, UnidentifiedImageError

#: Accepted formats by Pillow's name, and the extension they are stored with. Documents are left out, and formats whose
#: decoder starts another program, such as EPS.
EXTENSIONS = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "AVIF": "avif",
    "TIFF": "tif",
    "GIF": "gif",
    "BMP": "bmp",
    "JPEG2000": "jp2",
    "PPM": "ppm",
}
#: Formats that Pillow reads without loading more plugins.
_COMMON = ("JPEG", "PNG")

_lock = threading.Lock()
#: Number of open blocks of `pillow_without_limits`, and Pillow's limit before the first.
_open_blocks = 0
_pillow_limit: int | None = None


def open_photo(data: bytes) -> Image.Image:
    """Read only the header of a photo.

    Raises:
        UnidentifiedImageError: the format is not in `EXTENSIONS`.
        Exception: the photo is damaged; Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more.
    """
    with pillow_without_limits():
        try:
            return Image.open(BytesIO(data), formats=_COMMON)
        except UnidentifiedImageError:
            Image.init()  # loads all of Pillow's plugins, which takes longer than reading most photos
            return Image.open(BytesIO(data), formats=[name for name in EXTENSIONS if name in Image.OPEN])


@contextlib.contextmanager
def pillow_without_limits() -> Iterator[None]:
    """Disable Pillow's own limit on pixels and its warnings; callers check `max_pixels`."""
    global _open_blocks, _pillow_limit
    with _lock:
        if not _open_blocks:
            _pillow_limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        _open_blocks += 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        with _lock:
            _open_blocks -= 1
            if not _open_blocks:
                Image.MAX_IMAGE_PIXELS = _pillow_limit
