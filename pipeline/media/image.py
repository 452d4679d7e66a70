"""Reads photos, and prepares them for the model: upright, RGB, of exactly the video's size.

 1. the first frame of the file is decoded; of a HEIC or AVIF file with several images, the primary one;
 2. it is turned upright by its EXIF orientation; HEIC has its own rotation, and its EXIF orientation is ignored;
 3. it is converted to 8-bit RGB: 16-bit gray is divided by 257, an embedded color profile other than sRGB is converted
    to sRGB, transparency becomes black, everything else is Pillow's `convert("RGB")`;
 4. it is fitted:
    `crop`     the largest centered part with the video's shape is resized (Pillow's `ImageOps.fit`);
    `pad`      the whole photo is resized to fit inside and centered on black;
    `stretch`  the whole photo is resized, whatever its shape.

Resizing is Pillow's LANCZOS. A photo that already has the video's size keeps its pixels.
"""

import contextlib
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from io import BytesIO
from itertools import chain, product

from PIL import ExifTags, Image, ImageChops, ImageCms, ImageOps, PngImagePlugin, UnidentifiedImageError

from svdq.pipeline.errors import InputError, SampleError, how_to_install, reason_of
from svdq.pipeline.video_parameters import Fit

logger = logging.getLogger(__name__)

#: What files of iPhones and Android phones begin with, after their first eight bytes.
_HEIC_BRANDS = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}

MAX_PIXELS = 178_000_000  # of a photo, before decoding: 3 bytes each, so half a gigabyte of memory

#: Largest compressed color profile or text of a PNG in bytes; Pillow allows 1 MiB, and profiles of printers are larger.
MAX_PNG_CHUNK_BYTES = 1 << 26
MAX_PROFILE_BYTES = 1 << 23  # largest profile that is read, in bytes; profiles of printers have up to about 2 MB
SRGB_TOLERANCE = 2  # of a channel, out of 255, within which a profile counts as sRGB: roundings differ
#: Accepted formats by Pillow's name, and the extension they are stored with. Documents are left out, and formats whose
#: decoder starts another program, such as EPS.
EXTENSIONS = {
    "JPEG": "jpg",
    "MPO": "jpg",
    "PNG": "png",
    "WEBP": "webp",
    "AVIF": "avif",
    "HEIF": "heic",
    "TIFF": "tif",
    "GIF": "gif",
    "BMP": "bmp",
    "JPEG2000": "jp2",
    "PPM": "ppm",
}
#: Bytes of memory that decoding takes for each pixel, by Pillow's name of the format, at most for 8 bits a channel.
#: Measured with Pillow 13 and pillow-heif 1.8; a HEIC of 12 bits takes 15.
_DECODING_BYTES = {"WEBP": 16, "AVIF": 16, "HEIF": 10, "JPEG2000": 24}
#: The same of all other formats; of a tile of a TIFF; and of a JPEG's coefficients for each channel.
_PIXEL_BYTES, _TILE_BYTES, _COEFFICIENT_BYTES = 4, 8, 2
#: Limits of a JPEG; a segment of a color profile or XMP has up to 64 KiB, and progressive files have about ten scans.
MAX_SEGMENTS, MAX_SCANS = 5000, 100
MAX_PPM_HEADER = 1 << 16  # bytes of a PPM before its pixels, with comments
MAX_PLAIN_PPM = 1 << 24  # bytes of a PPM whose pixels are decimal numbers
_JPEG_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_PLAIN_MARKERS = (0xC8, *range(0xF0, 0xFE))  # without a length; Pillow goes on behind them
_PPM_COMMENT = re.compile(rb"#[^\r\n]*")
_COMMON = ("JPEG", "PNG")  # formats that Pillow reads without loading more plugins

_lock = threading.Lock()
#: Number of open blocks of `pillow_without_limits`, and Pillow's limits before the first.
_open_blocks = 0
_pillow_limits: tuple[int | None, int] = (None, 0)


def open_photo(data: bytes) -> Image.Image:
    """Read only the header of a photo; raises UnidentifiedImageError, or any Exception if it is damaged."""
    _check_headers(data)
    with pillow_without_limits():
        try:
            return Image.open(BytesIO(data), formats=_COMMON)
        except UnidentifiedImageError:
            _load_plugins(data)
            return Image.open(BytesIO(data), formats=[name for name in EXTENSIONS if name in Image.OPEN])


def _check_headers(data: bytes) -> None:
    """Raise ValueError for a JPEG or PPM with headers that Pillow takes gigabytes or minutes to read."""
    if data[:2] == b"\xff\xd8":
        num_segments = num_scans = place = 0
        while (found := _JPEG_MARKER.search(data, place)) and (kind := data[found.end() - 1]) != _END_OF_IMAGE:
            num_segments, num_scans = num_segments + 1, num_scans + (kind == _SCAN)
            if num_segments > MAX_SEGMENTS or num_scans > MAX_SCANS:
                raise ValueError(f"it has more than {MAX_SCANS} scans or {MAX_SEGMENTS:,} segments")
            place = found.end()
            if kind not in _PLAIN_MARKERS:
                place += int.from_bytes(data[place : place + 2])
    elif data[:1] == b"P" and len(data) > MAX_PPM_HEADER:
        words = _PPM_COMMENT.sub(b" ", data[:MAX_PPM_HEADER]).split(maxsplit=4)
        if len(words) < len(("format", "width", "height", "white or pixels")):
            raise ValueError(f"its header has more than {MAX_PPM_HEADER:,} bytes")
        if data[1:2] in b"123" and len(data) > MAX_PLAIN_PPM:
            raise ValueError(f"its pixels are text of more than {MAX_PLAIN_PPM:,} bytes; save it as a JPEG")


def has_unknown_white(image: Image.Image) -> bool:
    """Return whether an opened photo has 32 bits or floats a channel, which do not say which value is white."""
    return image.mode == "F" or (image.mode == "I" and image.format == "TIFF")  # a PPM's 16 bits are I, too


def draft(image: Image.Image, data: bytes, size: tuple[int, int]) -> int:
    """Have an opened JPEG decoded at a smaller size, at least `size`; return the bytes that decoding takes, about."""
    buffer = 0
    if image.format in ("JPEG", "MPO") and _has_several_scans(image, data):
        buffer = image.width * image.height * getattr(image, "layers", 4) * _COEFFICIENT_BYTES
    elif image.format == "TIFF":
        buffer = _tile_pixels(image) * _TILE_BYTES
    image.draft("RGB", size)
    return image.width * image.height * _DECODING_BYTES.get(image.format or "", _PIXEL_BYTES) + buffer


def _tile_pixels(image: Image.Image) -> int:
    """Return the pixels of a tile or strip of a compressed TIFF, which may be larger than the image."""
    tags: Mapping[int, int] = image.tag_v2  # type: ignore[attr-defined]
    if tags.get(ExifTags.Base.Compression, 1) == 1:
        return 0
    if ExifTags.Base.TileWidth in tags:
        return tags[ExifTags.Base.TileWidth] * tags[ExifTags.Base.TileLength]
    return min(tags.get(ExifTags.Base.RowsPerStrip, image.height), image.height) * image.width


def _has_several_scans(image: Image.Image, data: bytes) -> bool:
    """Return whether libjpeg keeps the coefficients of a whole JPEG in memory."""
    layers = getattr(image, "layers", 4)
    # Pillow has read up to the end of the first scan's header, which has two bytes for each of its channels.
    end = image.fp.tell()  # type: ignore[attr-defined]
    header = b"\xff\xda\0" + bytes([6 + 2 * layers, layers])
    return "progressive" in image.info or layers > 3 or data[: max(end - 2 * layers - 3, 0)][-5:] != header


def _load_plugins(data: bytes) -> None:
    """Load all of Pillow's plugins and the one for HEIC, which takes longer than reading most photos."""
    Image.init()
    try:
        import pillow_heif
    except ImportError as error:  # an extra: its wheels contain x265, which is GPL-2.0
        if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS:
            raise InputError(f"HEIC photos need a decoder that is not installed: {how_to_install('heic')}.") from error
        return
    # Without thumbnails: `draft` would decode one instead of the photo, and miss damage in the photo. One thread:
    # photos are read in parallel already, or beside ranks that need the cores. libheif refuses a photo that is larger
    # than its header says, before it decodes it.
    pillow_heif.register_heif_opener(thumbnails=False, depth_images=False, aux_images=False, decode_threads=1)


@contextlib.contextmanager
def pillow_without_limits() -> Iterator[None]:
    """Disable Pillow's limit on pixels and its warnings, and raise its limit for PNGs; callers check `max_pixels`."""
    global _open_blocks, _pillow_limits
    with _lock:
        if not _open_blocks:
            _pillow_limits = Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK
            Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK = None, MAX_PNG_CHUNK_BYTES
        _open_blocks += 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        with _lock:
            _open_blocks -= 1
            if not _open_blocks:
                Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK = _pillow_limits


def load_photo(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the first frame of an image file; raises SampleError if it is damaged, of another format or too large."""
    try:
        image = open_photo(data)
        width, height = image.size
        if width * height > max_pixels:
            raise SampleError(
                f"The photo has {width} x {height} pixels, more than the {max_pixels:,} that are allowed; "
                "make it smaller."
            )
        if has_unknown_white(image):
            raise SampleError("The photo has 32 bits or floats a channel; save it with 8 or 16 bits a channel.")
        with pillow_without_limits():
            image.load()
    except SampleError:
        raise
    except Exception as error:
        raise SampleError(f"The photo cannot be decoded ({reason_of(error)}); give a whole image file.") from error
    return image


def prepare_photo(
    photo: bytes | Image.Image,
    width: int,
    height: int,
    fit: Fit = "crop",
    max_pixels: int = MAX_PIXELS,
    note: Callable[[str], object] = logger.warning,
) -> Image.Image:
    """Fit a photo to `width` x `height` in RGB by the steps above; `note` gets a sentence for what cannot be used."""
    image = load_photo(photo, max_pixels) if isinstance(photo, bytes) else photo
    image = upright_srgb(image, note)
    size = (width, height)
    match fit:
        case "crop":
            return ImageOps.fit(image, size, Image.Resampling.LANCZOS)
        case "pad":
            return _pad(image, size)
        case "stretch":
            return image.resize(size, Image.Resampling.LANCZOS)


def upright_srgb(image: Image.Image, note: Callable[[str], object] = logger.warning) -> Image.Image:
    """Turn an image upright and convert it to 8-bit RGB in sRGB, on black; `note` as in `prepare_photo`."""
    converted = _rgb(_upright(image), note)
    converted.info.pop("icc_profile", None)
    return converted


def is_turned(image: Image.Image) -> bool:
    """Return whether a loaded photo is stored on its side: turned upright, its width becomes its height."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # noqa: BLE001 - as below
        return False


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # noqa: BLE001 - Pillow raises many types
        # The pixels are whole and only the EXIF block is broken: no reason to lose the video.
        return image


def _rgb(image: Image.Image, note: Callable[[str], object]) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255 instead of scaling 16 bits; `point` truncates, hence the half.
        image = image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    converted = _to_srgb(image, note)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        if converted is not None:
            converted.putalpha(layer.getchannel("A"))
            layer = converted
        converted = Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), layer)
    return (image if converted is None else converted).convert("RGB")


def _pad(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    scale = min(size[0] / image.width, size[1] / image.height)
    # Keep at least one pixel across of a very long and thin photo.
    inside = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(inside, Image.Resampling.LANCZOS)
    canvas = Image.new("RGB", size, (0, 0, 0))
    canvas.paste(image, ((size[0] - inside[0]) // 2, (size[1] - inside[1]) // 2))
    return canvas


#: Modes of images that a profile of each color space describes, as Little CMS names the spaces.
_MODES = {"RGB ": "RGB", "GRAY": "L", "CMYK": "CMYK"}
_GRAY_MODES = ("1", "L", "LA", "La", "I", "F")


def _to_srgb(image: Image.Image, note: Callable[[str], object]) -> Image.Image | None:
    """Convert an image of 8 bits a channel to RGB in sRGB, without its transparency.

    Colors that sRGB lacks become the nearest ones that it has: relative colorimetric with black point compensation.
    None: there is no profile, it is sRGB itself, or it cannot be used, of which `note` is told.
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
        profile, _srgb(), mode, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
    )
    if mode == "RGB" and _is_identity(transform):
        return None
    return ImageCms.applyTransform(image.convert(mode), transform)


@cache
def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))


def _is_identity(transform: ImageCms.ImageCmsTransform) -> bool:
    # Colors from all of RGB: 16 levels of each channel.
    cube = Image.frombytes("RGB", (256, 16), bytes(chain.from_iterable(product(range(0, 256, 17), repeat=3))))
    converted = ImageCms.applyTransform(cube, transform)
    assert converted is not None, "it is None only in place"
    return max(ImageChops.difference(cube, converted).tobytes()) <= SRGB_TOLERANCE
