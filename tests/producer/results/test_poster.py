"""Small pictures of photos and videos."""

import io

import pytest
from PIL import Image

from svdq.producer.results.poster import poster_of_photo, poster_of_picture

LEFT, RIGHT = (200, 30, 40), (20, 60, 180)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def halves(size: tuple[int, int], mode: str) -> Image.Image:
    image = Image.new("RGB", size, LEFT)
    image.paste(RIGHT, (size[0] // 2, 0, *size))
    return image.convert(mode)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "P"), ("TIFF", "LAB"), ("GIF", "P")],
)
@pytest.mark.parametrize("size", [(2400, 1350), (320, 180)])
def test_colors(kind: str, mode: str, size: tuple[int, int]) -> None:
    data = encoded(halves(size, mode), kind)
    for poster in (poster_of_photo(data, (1024, 576), "crop", 10**8), poster_of_picture(data)):
        with Image.open(io.BytesIO(poster)) as image:
            assert max(image.size) == min(512, max(size)) or image.size == (512, 288)
            for x, color in [(0.25, LEFT), (0.75, RIGHT)]:
                assert image.getpixel((int(image.width * x), image.height // 2)) == pytest.approx(color, abs=40)


def test_sixteen_bits() -> None:
    data = encoded(Image.new("I;16", (2400, 1350), 200 * 257), "PNG")
    with Image.open(io.BytesIO(poster_of_photo(data, (1024, 576), "crop", 10**8))) as image:
        assert image.getpixel((100, 100)) == pytest.approx((200,) * 3, abs=2)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_a_large_photo_that_is_stored_on_its_side(kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 8  # stored turned clockwise: its left is its bottom
    data = encoded(halves((2400, 1350), "RGB"), kind, exif=exif)
    with Image.open(io.BytesIO(poster_of_picture(data))) as image:
        assert image.size == (288, 512)
        assert image.getpixel((144, 400)) == pytest.approx(LEFT, abs=20)
        assert image.getpixel((144, 100)) == pytest.approx(RIGHT, abs=20)


@pytest.mark.parametrize("size", [(60_000, 3), (2, 40_000)])
def test_a_very_long_picture(size: tuple[int, int]) -> None:
    for fit in ("crop", "pad", "stretch"):
        with Image.open(
            io.BytesIO(poster_of_photo(encoded(halves(size, "RGB"), "PNG"), (64, 64), fit, 10**8))
        ) as image:
            assert image.size == (64, 64)
