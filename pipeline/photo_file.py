"""Opens the files of photos: the one list of formats that are read, and the one limit on pixels. Needs Pillow only."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from io import BytesIO

from PIL import Image, UnidentifiedImageError

#: Formats of photos by Pillow's name, and the extension they are stored with. Left out are documents and formats whose
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
#: Those that Pillow reads without loading more plugins.
_COMMON = ("JPEG", "PNG")

_lock = threading.Lock()
#: How many blocks of `pillow_without_limits` are open, and Pillow's limit from before the first.
_open_blocks = 0
_pillow_limit: int | None = None


def open_photo(data: bytes) -> Image.Image:
    """Read the header of a photo, and nothing else of it.

    Raises:
        UnidentifiedImageError: it has none of the formats in `EXTENSIONS`.
        Exception: it is damaged; Pillow's plugins raise OSError, SyntaxError, ValueError, struct.error and more.
    """
    with pillow_without_limits():
        try:
            return Image.open(BytesIO(data), formats=_COMMON)
        except UnidentifiedImageError:
            Image.init()  # loads all of Pillow's plugins, which takes longer than most photos
            return Image.open(BytesIO(data), formats=[name for name in EXTENSIONS if name in Image.OPEN])


@contextlib.contextmanager
def pillow_without_limits() -> Iterator[None]:
    """Set aside Pillow's own limit on pixels, which knows no setting, and its warnings; callers check `max_pixels`."""
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
