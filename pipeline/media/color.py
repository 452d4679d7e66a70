"""Converts photos from their embedded color profile to sRGB, which models and players expect."""

from collections.abc import Callable
from functools import cache
from io import BytesIO

from PIL import Image, ImageChops, ImageCms

#: Largest profile that is read, in bytes; profiles of printers have up to about 2 MB.
MAX_PROFILE_BYTES = 1 << 23
#: Largest difference of a channel, out of 255, by which a profile counts as sRGB: there are several roundings of it.
SRGB_TOLERANCE = 2

#: Modes of images that a profile of each color space describes, as Little CMS names the spaces.
_MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
_GRAY_MODES = ("1", "L", "LA", "La", "I", "F")


def to_srgb(image: Image.Image, note: Callable[[str], object]) -> Image.Image | None:
    """Convert an image of 8 bits a channel to RGB in sRGB, without its transparency.

    Colors that sRGB lacks become the nearest ones that it has: relative colorimetric with black point compensation.

    Returns None if there is no profile or it is sRGB itself; calls `note` with a sentence and returns None if it cannot
    be used.
    """
    data = image.info.get("icc_profile")
    if not data:
        return None
    try:
        if len(data) > MAX_PROFILE_BYTES:
            raise ValueError(f"it has {len(data):,} bytes")
        return _convert(image, bytes(data))
    except Exception as error:  # noqa: BLE001 - a photo with wrong colors is better than none
        note(f"The photo's color profile is ignored, because it cannot be used ({error}).")
        return None


def _convert(image: Image.Image, data: bytes) -> Image.Image | None:
    profile = ImageCms.ImageCmsProfile(BytesIO(data))
    space = profile.profile.xcolor_space
    mode = _MODES.get(space)
    is_gray = image.mode in _GRAY_MODES
    if mode is None or (mode == "CMYK") != (image.mode == "CMYK") or (mode == "L" and not is_gray):
        raise ValueError(f"it is for {space.strip()} and the photo is {image.mode}")
    transform = ImageCms.buildTransform(
        profile,
        _srgb(),
        mode,
        "RGB",
        ImageCms.Intent.RELATIVE_COLORIMETRIC,
        ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )
    if mode == "RGB" and _is_identity(transform):
        return None
    return ImageCms.applyTransform(image.convert(mode), transform)


@cache
def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def _is_identity(transform: ImageCms.ImageCmsTransform) -> bool:
    cube = _cube()
    converted = ImageCms.applyTransform(cube, transform)
    assert converted is not None, "it is None only in place"
    return max(ImageChops.difference(cube, converted).tobytes()) <= SRGB_TOLERANCE


@cache
def _cube() -> Image.Image:
    """Return an image of colors from all of RGB: 16 levels of each channel."""
    levels = range(0, 256, 17)
    return Image.frombytes(
        "RGB", (256, 16), bytes(v for r in levels for g in levels for b in levels for v in (r, g, b))
    )
