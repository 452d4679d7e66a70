"""Prepares a photo for the model: upright, RGB, of exactly the video's size.

The steps, so that a comparison can prepare the photo for diffusers in the same way:

 1. the first frame of the file is decoded;
 2. it is turned upright by its EXIF orientation;
 3. it is converted to 8-bit RGB: 16-bit gray is divided by 257, transparency becomes black, everything else is Pillow's
    `convert("RGB")`; embedded color profiles are not applied (diffusers' `load_image` does not either);
 4. it is fitted:
    `crop`     the largest centred part with the video's shape is resized (Pillow's `ImageOps.fit`);
    `pad`      the whole photo is resized to fit inside and centred on black;
    `stretch`  the whole photo is resized, whatever its shape.

Resizing is Pillow's LANCZOS. A photo that already has the video's size keeps its pixels.
"""

import numpy as np
from PIL import Image, ImageOps

from svdq.pipeline.errors import SampleError, reason_of
from svdq.pipeline.parameters import Fit
from svdq.pipeline.photo_file import open_photo, pillow_without_limits

#: Largest number of pixels of a photo, checked before decoding: 3 bytes each, so half a gigabyte of memory.
MAX_PIXELS = 178_000_000


def load(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the first frame of an image file.

    Args:
        data: the bytes of the file, in one of the formats of `photo_file`.
        max_pixels: the largest width times height; checked before anything is decoded.

    Raises:
        SampleError: the bytes are not a complete image, or it has too many pixels.
    """
    try:
        image = open_photo(data)
        width, height = image.size
        if width * height > max_pixels:
            raise SampleError(
                f"The photo has {width} x {height} pixels, more than the {max_pixels:,} that are allowed; "
                "make it smaller."
            )
        with pillow_without_limits():
            image.load()
    except SampleError:
        raise
    except Exception as error:
        # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, RuntimeError (AVIF) and more.
        raise SampleError(f"The photo cannot be decoded ({reason_of(error)}); give a whole image file.") from error
    return image


def prepare(photo: bytes | Image.Image, width: int, height: int, fit: Fit = "crop") -> Image.Image:
    """Fit a photo to exactly `width` x `height` pixels in RGB; see the module's docstring for the steps.

    Args:
        photo: the bytes of an image file, or an opened image, which is not changed.
        width: pixels.
        height: pixels.
        fit: how a photo of another aspect ratio is fitted.

    Raises:
        SampleError: the bytes are not a complete image.
    """
    image = load(photo) if isinstance(photo, bytes) else photo
    image = _rgb(_upright(image))
    size = (width, height)
    match fit:
        case "crop":
            return ImageOps.fit(image, size, Image.Resampling.LANCZOS)
        case "pad":
            return _pad(image, size)
        case "stretch":
            return image.resize(size, Image.Resampling.LANCZOS)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - as above
        # The pixels are whole and only the EXIF block is broken: no reason to lose the video.
        return image


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255 instead of scaling 16 bits.
        gray = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(gray.round().clip(0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        black = Image.new("RGBA", image.size, (0, 0, 0, 255))
        image = Image.alpha_composite(black, image)
    return image.convert("RGB")


def _pad(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    scale = min(size[0] / image.width, size[1] / image.height)
    # Keep at least one pixel across of a very long and thin photo.
    inside = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(inside, Image.Resampling.LANCZOS)
    canvas = Image.new("RGB", size, (0, 0, 0))
    canvas.paste(image, ((size[0] - inside[0]) // 2, (size[1] - inside[1]) // 2))
    return canvas
