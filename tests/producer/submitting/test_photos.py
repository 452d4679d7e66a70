import io
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pillow_heif
import pytest
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.producer.submitting.photos import Photo, check_data, check_photos

MAX_PIXELS = 100_000_000


@pytest.mark.parametrize(
    ("mode", "kind", "is_used"),
    [("F", "TIFF", False), ("I", "TIFF", False), ("I;16", "TIFF", True), ("I;16", "PNG", True), ("I", "PPM", True)],
)
def test_a_photo_that_does_not_say_which_value_is_white_is_refused(mode: str, kind: str, is_used: bool) -> None:
    buffer = io.BytesIO()
    Image.new(mode, (64, 48)).save(buffer, kind)
    if is_used:
        assert check_data(buffer.getvalue(), Path("a.tif"), MAX_PIXELS).size == (64, 48)
    else:
        with pytest.raises(InputError, match="has 32 bits or floats a channel"):
            check_data(buffer.getvalue(), Path("a.tif"), MAX_PIXELS)


def png_that_claims(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def encoded(kind: str, size: tuple[int, int] = (64, 48)) -> bytes:
    buffer = io.BytesIO()
    image = Image.effect_noise(size, 60).convert("RGB")
    if kind == "HEIF":
        pillow_heif.from_pillow(image).save(buffer)
    else:
        image.save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "extension"),
    [
        ("JPEG", "jpg"),
        ("PNG", "png"),
        ("WEBP", "webp"),
        ("TIFF", "tif"),
        ("GIF", "gif"),
        ("BMP", "bmp"),
        ("PPM", "ppm"),
        ("AVIF", "avif"),
        ("HEIF", "heic"),
    ],
)
def test_extension_is_that_of_the_content(tmp_path: Path, kind: str, extension: str) -> None:
    path = tmp_path / "photo.dat"
    path.write_bytes(encoded(kind))
    photo = check_photo(path, MAX_PIXELS)
    assert photo.extension == extension
    assert photo.key == f"inputs/{photo.sha256}.{extension}"
    assert photo.read() == path.read_bytes()


def check_photo(path: Path, max_pixels: int) -> Photo:
    """Check one photo; raise why it is bad."""
    (found,) = check_photos([path], max_pixels)
    if isinstance(found, InputError):
        raise found
    return found


@pytest.mark.parametrize("kind", ["JPEG", "HEIF", "AVIF", "PNG", "WEBP", "TIFF", "GIF", "BMP"])
def test_truncated(tmp_path: Path, kind: str) -> None:
    data = encoded(kind)
    for length in range(1, len(data) * 9 // 10, max(len(data) // 40, 1)):
        path = tmp_path / "photo.jpg"
        path.write_bytes(data[:length])
        with pytest.raises(InputError):
            check_photo(path, MAX_PIXELS)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"hello, I am a text", "not a photo"),
        (b"%PDF-1.4", "not a photo"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "not a photo"),
        (b"\0\0\0\x18ftyphevx\0\0\0\0", "not a photo"),
        (png_that_claims(60_000, 60_000), "60000x60000"),
        (png_that_claims(11_000, 11_000), "11000x11000"),
        (png_that_claims(100, 100), "cut short"),
    ],
)
def test_bad_content(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    begin = time.thread_time()
    with pytest.raises(InputError, match=says) as caught:
        check_photo(path, MAX_PIXELS)
    assert str(path) in str(caught.value)
    assert time.thread_time() - begin < 2


def test_a_list_that_is_given_as_a_photo_is_for_batch(tmp_path: Path) -> None:
    path = tmp_path / "tonight.csv"
    path.write_text("photo\ncup.jpg\n")
    with pytest.raises(InputError, match="is not a photo that can be read; submit a list with `svdq batch`"):
        check_photo(path, MAX_PIXELS)


def test_a_heic_that_is_larger_than_its_header_says_is_refused(tmp_path: Path) -> None:
    data = encoded("HEIF", (1024, 512))
    claim = b"ispe" + bytes(4)
    assert data.count(claim + struct.pack(">II", 1024, 512)) == 1
    path = tmp_path / "bomb.heic"
    path.write_bytes(data.replace(claim + struct.pack(">II", 1024, 512), claim + struct.pack(">II", 64, 64)))
    with pytest.raises(InputError, match="cannot be decoded"):
        check_photo(path, 64 * 64)
    path.write_bytes(data)
    with pytest.raises(InputError, match="1024x512 pixels, more than"):
        check_photo(path, 64 * 64)


def jpeg_that_claims(width: int, height: int, *, progressive: bool = False, one_channel: bool = False) -> bytes:
    """A JPEG of three channels without subsampling; with `one_channel` its first scan has only one of them."""
    image = Image.effect_noise((64, 48), 60).convert("RGB")
    image.save(buffer := io.BytesIO(), "JPEG", progressive=progressive, subsampling=0)
    frame = (b"\xff\xc2" if progressive else b"\xff\xc0") + b"\x00\x11\x08"
    data = buffer.getvalue().replace(frame + struct.pack(">HH", 48, 64), frame + struct.pack(">HH", height, width))
    if one_channel:
        start = data.index(b"\xff\xda\x00\x0c\x03")
        data = data[:start] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + data[start + 14 :]
    return data


def tiff_that_claims(tile: int) -> bytes:
    """A compressed TIFF of 64 x 64 pixels with one tile of `tile` x `tile`."""
    tags = {256: 64, 257: 64, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: 99}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(100)


@pytest.mark.parametrize(
    ("data", "is_refused"),
    [
        (jpeg_that_claims(10_000, 9_000), False),
        (jpeg_that_claims(10_000, 9_000, progressive=True), True),
        (jpeg_that_claims(10_000, 9_000, one_channel=True), True),
        (jpeg_that_claims(9_000, 8_000, progressive=True), False),
        (png_that_claims(10_000, 9_999), False),
        (tiff_that_claims(tile=256), False),
        (tiff_that_claims(tile=10_000), True),
    ],
)
def test_photos_that_take_much_memory_to_decode_are_refused(data: bytes, is_refused: bool) -> None:
    reason = ""
    try:
        check_data(data, Path("photo"), MAX_PIXELS)  # there are not enough data for the pixels, which libjpeg forgives
    except InputError as error:
        reason = str(error)
    assert ("MiB of memory to decode" in reason) == is_refused, reason


def test_bad_paths(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jpg", tmp_path, Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(InputError):
            check_photo(path, MAX_PIXELS)


def test_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(InputError, match="bytes"):
        check_photo(path, MAX_PIXELS)


def test_a_heic_photo_without_its_decoder_names_the_extra(tmp_path: Path) -> None:
    photos = [tmp_path / "photo.heic", tmp_path / "photo.tif"]
    for photo, kind in zip(photos, ("HEIF", "TIFF"), strict=True):
        photo.write_bytes(encoded(kind))
    program = (
        "import sys; sys.modules['pillow_heif'] = None\n"
        "from pathlib import Path; from svdq.producer.submitting.photos import check_photos\n"
        "for found in check_photos(list(map(Path, sys.argv[1:])), 10**8, lambda: None): print(found)"
    )
    command = [sys.executable, "-c", program, *map(str, photos)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    heic, tiff = done.stdout.splitlines()
    assert heic.startswith("HEIC photos need a decoder that is not installed: run `pip install ")
    assert tiff.startswith("Photo(")
