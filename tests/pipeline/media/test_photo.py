import struct
import time
import zlib
from contextlib import suppress
from io import BytesIO

import numpy as np
import pillow_heif
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps, PngImagePlugin

from svdq.pipeline.errors import SampleError
from svdq.pipeline.media.image import load_photo, pillow_without_limits, prepare_photo


def encoded(image: Image.Image, file_format: str = "PNG", **options) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, np.full_like(x, 90)], axis=-1).astype(np.uint8))


@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.sampled_from([64, 128, 192]),
    st.sampled_from([64, 128]),
    st.sampled_from(["crop", "pad", "stretch"]),
    st.sampled_from(["RGB", "L", "1", "P", "RGBA", "LA", "CMYK", "YCbCr", "I", "F", "I;16"]),
)
def test_any_photo_gets_the_size(width, height, out_width, out_height, fit, mode):
    if mode == "I;16":
        photo = Image.fromarray(np.zeros((height, width), np.uint16))
    else:
        photo = Image.new(mode, (width, height))
    prepared = prepare_photo(photo, out_width, out_height, fit)
    assert prepared.size == (out_width, out_height)
    assert prepared.mode == "RGB"


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_photo_of_the_right_size_keeps_its_pixels(fit):
    photo = gradient(128, 64)
    assert np.array_equal(prepare_photo(encoded(photo), 128, 64, fit), photo)


def test_crop_takes_the_centre():
    pixels = np.asarray(prepare_photo(gradient(400, 100), 100, 100, "crop"))
    assert pixels[50, 0, 0] == pytest.approx(255 * 0.375, abs=3)
    assert pixels[50, -1, 0] == pytest.approx(255 * 0.625, abs=3)
    assert pixels[0, 50, 1] <= 3


def test_pad_puts_black_beside_the_whole_photo():
    pixels = np.asarray(prepare_photo(gradient(100, 100), 192, 64, "pad"))
    assert (pixels[:, :64] == 0).all()
    assert (pixels[:, 128:] == 0).all()
    assert pixels[32, 127, 0] > 245
    assert pixels[32, 64, 0] < 10


def test_stretch_shows_everything():
    pixels = np.asarray(prepare_photo(gradient(400, 100), 64, 64, "stretch"))
    assert pixels[32, 0, 0] < 10
    assert pixels[32, -1, 0] > 245


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_honoured(orientation):
    upright = gradient(96, 64)
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(prepare_photo(encoded(stored, exif=exif), 96, 64), upright)


@pytest.mark.parametrize("kind", ["PNG", "HEIC"])
def test_transparency_is_laid_on_black(kind):
    photo = Image.new("RGBA", (64, 64), (200, 100, 50, 0))
    photo.paste((200, 100, 50, 255), (0, 0, 32, 64))
    pixels = np.asarray(prepare_photo(heic(photo) if kind == "HEIC" else encoded(photo), 64, 64), int)
    assert np.abs(pixels[0, 0] - (200, 100, 50)).max() <= 2
    assert tuple(pixels[0, 63]) == (0, 0, 0)


def test_palette_transparency_is_laid_on_black():
    photo = Image.new("P", (64, 64), 1)
    photo.putpalette([10, 20, 30, 200, 100, 50])
    assert tuple(np.asarray(prepare_photo(encoded(photo, transparency=1), 64, 64))[0, 0]) == (0, 0, 0)


def test_16_bit_gray_is_scaled_not_clipped():
    gray = np.full((64, 64), 128 * 257, np.uint16)
    assert (np.asarray(prepare_photo(encoded(Image.fromarray(gray)), 64, 64)) == 128).all()


def test_first_frame_of_an_animation():
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert tuple(np.asarray(prepare_photo(data, 64, 64))[0, 0]) == (255, 0, 0)


def test_the_photo_itself_is_not_changed():
    photo = gradient(64, 64)
    before = photo.copy()
    prepare_photo(photo, 128, 64, "pad")
    assert np.array_equal(photo, before)


@pytest.mark.parametrize(
    "data", [b"", b"hello, not an image", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8 "]
)
def test_bytes_that_are_no_image(data):
    with pytest.raises(SampleError, match="cannot be decoded"):
        prepare_photo(data, 64, 64)


@given(st.data())
def test_damaged_files_fail_with_a_sentence_or_decode(photo_bytes, data):
    end = data.draw(st.integers(0, len(photo_bytes)))
    place = data.draw(st.integers(0, 2000))
    damaged = photo_bytes[:place] + data.draw(st.binary(max_size=4)) + photo_bytes[place + 4 : end]
    with suppress(SampleError):  # a sentence, not whatever Pillow raises
        assert prepare_photo(damaged, 64, 64).size == (64, 64)


def test_truncated_photo(photo_bytes):
    with pytest.raises(SampleError, match="truncated"):
        load_photo(photo_bytes[:5000])


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says how large it is and has no pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def heic(*images: Image.Image, primary: int = 0, **options) -> bytes:
    """A lossless HEIC file, as a phone writes it; written without registering HEIC in Pillow."""
    buffer = BytesIO()
    file = pillow_heif.from_pillow(images[0])
    for image in images[1:]:
        file.add_from_pillow(image)
    file.save(buffer, primary_index=primary, quality=-1, chroma=444, matrix_coefficients=0, **options)
    return buffer.getvalue()


def test_heic():
    photo = gradient(128, 64)
    assert np.array_equal(prepare_photo(heic(photo), 128, 64), photo)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["HEIC", "AVIF"])
def test_a_rotated_heic_or_avif_is_upright(kind, orientation):
    photo = gradient(96, 64)
    exif = Image.Exif()
    exif[0x0112] = orientation
    exif = exif.tobytes()  # Pillow would remove the orientation from an object
    if kind == "HEIC":
        data = heic(photo, exif=exif)
    else:
        data = encoded(photo, "AVIF", exif=exif, quality=100, subsampling="4:4:4")
    upright = ImageOps.exif_transpose(Image.open(BytesIO(encoded(photo, exif=exif))))
    prepared = prepare_photo(data, *upright.size)
    assert np.abs(np.asarray(prepared, int) - np.asarray(upright, int)).max() <= 4


def test_the_primary_image_of_a_heic_is_taken():
    images = [Image.new("RGB", (64, 64), color) for color in ("red", "blue", "lime")]
    assert prepare_photo(heic(*images, primary=1), 64, 64).getpixel((5, 5)) == (0, 0, 255)


def test_an_animated_avif_gives_its_first_frame():
    images = [Image.new("RGB", (64, 64), color) for color in ("red", "blue")]
    red, _, blue = prepare_photo(encoded(images[0], "AVIF", save_all=True, append_images=images[1:]), 64, 64).getpixel(
        (5, 5)
    )
    assert red > 240
    assert blue < 15


@pytest.mark.parametrize("kind", ["HEIC", "AVIF"])
@pytest.mark.parametrize("change", [lambda data: data[: data.index(b"mdat") + 4] + bytes(300), lambda data: data[:300]])
def test_a_damaged_heic_or_avif_fails_with_a_sentence(kind, change):
    data = heic(gradient(64, 64)) if kind == "HEIC" else encoded(gradient(64, 64), "AVIF")
    assert load_photo(data).size == (64, 64)
    with pytest.raises(SampleError, match="cannot be decoded"):
        load_photo(change(data))


def test_files_that_take_minutes_to_read_are_refused_by_their_headers():
    """Each held all threads that store photos: 8,000 scans in 1.3 MB took 25 s, a comment of 50 MB 38 s."""
    image = Image.effect_noise((320, 240), 60).convert("RGB")
    image.save(file := BytesIO(), "JPEG", progressive=True)
    scans = file.getvalue()
    last = scans.rindex(b"\xff\xda")
    many = scans[:last] + scans[last:-2] * 8000 + scans[-2:]
    for data, words in (
        (many, "more than 100 scans"),
        (b"\xff\xd8" + b"\xff\xe1\x00\x02" * 15_000_000, "5,000 segments"),
        (b"P6\n#" + b"x" * 50_000_000 + b"\n4 4 255\n" + bytes(48), "header has more than"),
        (b"P2 4000 4000 255\n" + b"128 " * 16_000_000, "pixels are text"),
    ):
        begun = time.process_time()
        with pytest.raises(SampleError, match=words):
            load_photo(data)
        assert time.process_time() - begun < 2
    for plain in (scans, b"P2 4 4 255\n" + b"128 " * 16, b"P6\n# by hand\n4 4 255\n" + bytes(48)):
        load_photo(plain)


def test_too_many_pixels():
    with pytest.raises(SampleError, match="12000 x 10000 pixels, more than the 1,000,000"):
        load_photo(png_header(12000, 10000), max_pixels=1_000_000)
    with pytest.raises(SampleError, match="The photo"):
        load_photo(png_header(60000, 60000))


@pytest.mark.parametrize("kind", ["profile", "text"])
def test_a_png_with_a_large_profile_or_text(kind: str) -> None:
    """Printers have profiles above Pillow's limit of 1 MiB, and programs that make pictures write their workflow."""
    data, info = BytesIO(), PngImagePlugin.PngInfo()
    if kind == "text":
        info.add_text("workflow", "x" * 2**21, zip=True)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes() + bytes(2**21 * (kind == "profile"))
    photo = gradient(64, 64)
    photo.save(data, "PNG", pnginfo=info, icc_profile=profile)
    assert np.array_equal(prepare_photo(data.getvalue(), 64, 64), photo)


def test_only_formats_of_photos_are_opened() -> None:
    """Pillow would start Ghostscript for EPS."""
    eps = BytesIO()
    gradient(64, 64).save(eps, "EPS")
    icon = BytesIO()
    gradient(64, 64).save(icon, "ICO")
    for data in (eps.getvalue(), icon.getvalue()):
        with Image.open(BytesIO(data)) as image:
            assert image.format in ("EPS", "ICO")
        with pytest.raises(SampleError, match="cannot be decoded"):
            load_photo(data)


def test_the_limit_on_pixels_is_ours_alone(photo_bytes, monkeypatch):
    """Pillow's own, which no setting changes, refused what was accepted at submission."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    width, height = load_photo(photo_bytes).size
    with pytest.raises(SampleError, match="more than the"):
        load_photo(photo_bytes, width * height - 1)
    with pillow_without_limits(), pillow_without_limits():
        pass
    assert Image.MAX_IMAGE_PIXELS == 100
    assert PngImagePlugin.MAX_TEXT_CHUNK == 2**20
