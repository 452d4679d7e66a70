"""Checks submitted photos, which are stored byte for byte, and finds sizes of videos for their shapes."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import BinaryIO

from PIL import UnidentifiedImageError

from svdq.pipeline.errors import InputError, reason_of
from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.image import EXTENSIONS, draft, has_unknown_white, is_turned, open_photo, pillow_without_limits
from svdq.pipeline.video_parameters import MAX_SIDE
from svdq.producer.files import open_regular
from svdq.producer.job import Job
from svdq.producer.name_templates import safe_name
from svdq.producer.threads import DECODED, MAX_DECODED_BYTES, NUM_CORES, Budget, Reserve, ordered_map

ACCEPTED = "JPEG, HEIC, PNG, WebP, AVIF, TIFF, GIF, BMP, JPEG 2000 or PPM"

MAX_BYTES_PER_PIXEL = 16  # of any photo file: four channels of 32-bit floats
MAX_FOREIGN_BYTES = 1 << 28  # largest size in bytes of a photo that was uploaded or dropped
_BYTES = Budget(1 << 25)  # bytes of files held in memory at a time, independent of the number of threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Photo:
    """A checked photo. It holds no pixels, so that ten thousand of them fit in memory."""

    path: Path  # the user's path; of an upload, only the name of the file
    sha256: str
    extension: str  # extension of its real format, without the dot, independent of the file's name
    name: str  # stem of the file's name, sanitized for `Job.name`
    num_bytes: int
    size: tuple[int, int] | None = None  # width and height in pixels, upright; None if they are not known
    #: Where it was, from the submitted folder on, such as `holiday/day 1/cup.jpg`; "" if that is not known.
    source: str = ""
    capture: Capture = field(default_factory=Capture)
    data: bytes | None = field(default=None, repr=False)  # the bytes of an upload; None: they are in the file
    last: "Photo | None" = None  # the photo of the last frame

    @property
    def key(self) -> str:
        """The storage key."""
        return f"inputs/{self.sha256}.{self.extension}"

    def read(self) -> bytes:
        """Read the checked bytes; raises InputError if the file has changed since the check."""
        if self.data is not None:
            return self.data
        with _plain_errors(self.path), open_regular(self.path) as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise InputError(f"The photo {str(self.path)!r} changed while it was being submitted; submit it again.")
        return data


def check_photos(
    paths: Iterable[Path], max_pixels: int, on_checked: Callable[[], None] = lambda: None
) -> list[Photo | InputError]:
    """Read photos in parallel; return each in order, or why it is bad."""

    def check(path: Path) -> Photo | InputError:
        try:
            with _plain_errors(path), open_regular(path) as file, _BYTES.take(os.fstat(file.fileno()).st_size):
                data = read_file(file, path, max(max_pixels * MAX_BYTES_PER_PIXEL, 1 << 20))
                return _decode(data, path, max_pixels)
        except InputError as error:
            return InputError(str(error))  # without the traceback, which would keep the photo's bytes

    checked = []
    with pillow_without_limits():
        for result in ordered_map(check, paths, num_threads=NUM_CORES + 1):
            checked.append(result)
            on_checked()
    return checked


def check_data(data: bytes, path: Path, max_pixels: int, reserve: Reserve = DECODED.take) -> Photo:
    """Decode the first frame of an upload; raises InputError if it cannot be used; `path` is for messages.

    `reserve` is entered with the bytes of memory that it takes.
    """
    with pillow_without_limits():
        return _decode(data, path, max_pixels, MAX_DECODED_BYTES, reserve)


def read_file(file: BinaryIO, path: Path, max_bytes: int) -> bytes:
    """Read an open file; raises InputError if it is too large."""
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes > max_bytes:
        raise InputError(
            f"The file {str(path)!r} has {num_bytes:,} bytes, and a photo may have {max_bytes:,}; give a smaller photo."
        )
    return file.read(num_bytes)


def read_photo(path: Path, max_pixels: int) -> bytes:
    """Read a photo's bytes; raises InputError if it cannot be read or is too large for so many pixels."""
    with _plain_errors(path), open_regular(path) as file:
        return read_file(file, path, max(max_pixels * MAX_BYTES_PER_PIXEL, 1 << 20))


def _decode(
    data: bytes, path: Path, max_pixels: int, max_decoded_bytes: int | None = None, reserve: Reserve = DECODED.take
) -> Photo:
    if not data:
        raise InputError(f"The photo {str(path)!r} is empty (0 bytes); give a whole copy of it.")
    try:
        image = open_photo(data)  # only its header
        width, height = image.size
        if width * height > max_pixels:
            raise InputError(
                f"The photo {str(path)!r} has {width}x{height} pixels, more than the {max_pixels:,} that are allowed; "
                "make it smaller or raise SVDQ_MAX_PIXELS."
            )
        if has_unknown_white(image):
            raise InputError(
                f"The photo {str(path)!r} has 32 bits or floats a channel; save it with 8 or 16 bits a channel."
            )
        # A JPEG is decoded at an eighth of its size: this reads every byte and saves most of the arithmetic.
        num_bytes = draft(image, data, (max(width // 8, 1), max(height // 8, 1)))
        if max_decoded_bytes is not None and num_bytes > max_decoded_bytes:
            raise InputError(
                f"The photo {str(path)!r} takes {num_bytes >> 20:,} MiB of memory to decode, and here it may take "
                f"{max_decoded_bytes >> 20:,}; make it smaller, or give it as a JPEG."
            )
        with reserve(num_bytes):
            image.load()
            capture = Capture.of_photo(image)
            if is_turned(image):
                width, height = height, width
            image.close()
    except InputError:
        raise
    except UnidentifiedImageError as error:
        wanted = "submit a list with `svdq batch`" if path.suffix.lower() in (".csv", ".jsonl") else f"give {ACCEPTED}"
        raise InputError(f"The file {str(path)!r} is not a photo that can be read; {wanted}.") from error
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error, EOFError and more of Pillow's decoders
        raise InputError(
            f"The photo {str(path)!r} is damaged or cut short and cannot be decoded ({reason_of(error)}); "
            "give a whole copy of it."
        ) from error
    return Photo(
        path=path,
        sha256=hashlib.sha256(data).hexdigest(),
        num_bytes=len(data),
        extension=EXTENSIONS[image.format or ""],
        name=safe_name(path.stem),
        size=(width, height),
        capture=capture,
    )


def source_path(*parts: str) -> str:
    """Join the names of folders and a photo to a path that all programs can show."""
    return "/".join(safe_name(part) for part in parts if part)


@contextlib.contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"There is no file {str(path)!r}; check its path.") from error
    except IsADirectoryError as error:
        photos = str(path / "*.jpg")
        raise InputError(f"{str(path)!r} is a folder; give the photos in it, such as {photos!r}.") from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"The file {str(path)!r} cannot be read ({reason}); check its path and rights.") from error


def nearest_side(pixels: int, multiple: int) -> int:
    """Return the allowed side of a video that is nearest to `pixels`."""
    return round(min(max(pixels, multiple), MAX_SIDE) / multiple) * multiple


def nearest_size(photo: tuple[int, int], area: int, multiple: int) -> tuple[int, int]:
    """Return the allowed size that is nearest to a photo's shape and to an area, which it does not exceed.

    A wrong shape counts twice as much as a smaller area. A larger area could need more memory.
    """
    sizes = []
    for width in range(multiple, min(MAX_SIDE, area // multiple) + 1, multiple):
        most = min(MAX_SIDE, area // width) // multiple
        below = min(max(1, int(width * photo[1] / photo[0] // multiple)), most)
        sizes += [(width, below * multiple), (width, min(below + 1, most) * multiple)]

    def badness(size: tuple[int, int]) -> float:
        width, height = size
        return 2 * abs(log(width * photo[1] / (height * photo[0]))) + log(area / (width * height))

    return min(sizes, key=badness)


def crop_warning(photo: tuple[int, int] | None, job: Job, size: tuple[int, int]) -> str:
    """Say how much a crop removes, such as `crop removes 54% of the photo's height`; "" if at most a fifth.

    `size` is the video's if the job leaves it open.
    """
    if photo is None or job.fit != "crop":
        return ""
    width, height = job.width or size[0], job.height or size[1]
    scale = max(width / photo[0], height / photo[1])
    removed = {"width": 1 - width / (photo[0] * scale), "height": 1 - height / (photo[1] * scale)}
    side = max(removed, key=removed.__getitem__)
    return f"crop removes {removed[side]:.0%} of the photo's {side}" if removed[side] > 0.2 else ""
