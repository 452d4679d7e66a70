"""Embedded color profiles: photos become sRGB, and those that are sRGB already keep their bits."""

import itertools
import struct
import zlib
from io import BytesIO

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageCms

from svdq.pipeline.media.image import MAX_PROFILE_BYTES, prepare_photo
from tests import icc

COLORS = np.array([(200, 100, 50), (10, 200, 30), (30, 60, 220), (128, 128, 128), (255, 255, 255), (0, 0, 0)], np.uint8)
PROFILES = {"Display P3": (icc.DISPLAY_P3, None), "Adobe RGB": (icc.ADOBE_RGB, 563 / 256)}


def stripes(colors) -> Image.Image:
    """One row of 64 pixels in 64 for each color; sharp, so that lossy formats keep the middle of each."""
    return Image.fromarray(np.repeat(np.repeat(np.asarray(colors, np.uint8)[:, None], 64, axis=0), 64, axis=1))


def colors_of(image: Image.Image) -> np.ndarray:
    return np.asarray(image, int)[32::64, 32]


def prepared(data: bytes, notes: list[str] | None = None) -> np.ndarray:
    notes = [] if notes is None else notes
    image = prepare_photo(data, 64, 64 * len(COLORS), note=notes.append)
    assert "icc_profile" not in image.info, "it would be applied twice"
    return colors_of(image)


def saved(image: Image.Image, kind: str, profile: bytes, **options) -> bytes:
    buffer = BytesIO()
    if kind == "HEIF":
        pillow_heif.from_pillow(image).save(buffer, icc_profile=profile, quality=100, chroma=444)
    else:
        image.save(buffer, kind, icc_profile=profile, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "AVIF", "HEIF"])
def test_colors_become_those_of_srgb(kind, name):
    primaries, gamma = PROFILES[name]
    values = COLORS / 255
    light = icc.linear(values) if gamma is None else values**gamma
    expected = 255 * icc.encoded(light @ primaries.T @ np.linalg.inv(icc.SRGB).T)
    options = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True}, "AVIF": {"quality": 100}}
    data = saved(stripes(COLORS), kind, icc.rgb_profile(primaries, gamma), **options.get(kind, {}))
    assert np.abs(prepared(data) - expected).max() <= (8 if kind in ("AVIF", "HEIF") else 3)
    assert np.abs(COLORS - expected).max() > 20, "the profile changes something"


@pytest.mark.parametrize(
    "profile",
    [ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), icc.rgb_profile(icc.SRGB, None)],
    ids=["little-cms", "ours"],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA"])
def test_photos_in_srgb_keep_their_bits(profile, mode):
    photo = Image.effect_noise((96, 64), 80).convert("RGB")
    photo = Image.merge("RGB", [photo.getchannel(0), *(photo.rotate(180).split()[:2])]).convert(mode)
    with_profile, without = (prepare_photo(saved(photo, "PNG", data), 64, 64, "stretch") for data in (profile, b""))
    assert np.array_equal(with_profile, without)


def test_gray_with_a_profile():
    levels = np.array([[20], [128], [230]], np.uint8)
    for image in (stripes(levels[:, 0]), stripes(levels[:, 0]).convert("LA")):
        notes: list[str] = []
        result = prepare_photo(saved(image, "PNG", icc.gray_profile(1.0)), 64, 192, note=notes.append)
        expected = 255 * icc.encoded(levels / 255)
        assert np.abs(colors_of(result) - expected).max() <= 2
        assert not notes


def test_16_bit_gray_with_a_profile():
    image = Image.fromarray(np.full((64, 64), 128 * 257, np.uint16))
    result = prepare_photo(saved(image, "PNG", icc.gray_profile(1.0)), 64, 64)
    assert abs(result.getpixel((5, 5))[0] - 188) <= 1


def test_16_bits_a_channel_with_a_profile():
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    pixels = np.full((64, 64, 3), np.array(COLORS[0], int) * 257, ">u2")
    profile = zlib.compress(icc.rgb_profile(icc.ADOBE_RGB, 563 / 256))
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 16, 2, 0, 0, 0))
    data += chunk(b"iCCP", b"Adobe RGB\0\0" + profile)
    data += chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row.tobytes() for row in pixels))) + chunk(b"IEND", b"")
    light = (COLORS[0] / 255) ** (563 / 256)
    expected = 255 * icc.encoded(icc.ADOBE_RGB @ light @ np.linalg.inv(icc.SRGB).T)
    assert np.abs(np.array(prepare_photo(data, 64, 64).getpixel((5, 5))) - expected).max() <= 3


def test_cmyk_with_a_profile():
    inks = {
        corner: (100.0 * (1 - max(corner[:3])) * (1 - corner[3]), 0.0, 0.0)
        for corner in itertools.product((0, 1), repeat=4)
    }
    inks[1, 0, 0, 0] = (55.0, -37.0, -50.0)  # cyan as printed is not that of a screen
    image = Image.new("CMYK", (64, 64), (255, 0, 0, 0))
    profile = icc.cmyk_profile(inks)
    naive = prepare_photo(saved(image, "TIFF", b""), 64, 64).getpixel((5, 5))
    assert naive == (0, 255, 255)
    for kind in ("TIFF", "JPEG"):
        red, green, blue = prepare_photo(saved(image, kind, profile), 64, 64).getpixel((5, 5))
        assert red < 20
        assert green == pytest.approx(149, abs=6)
        assert blue == pytest.approx(217, abs=8)


def test_transparency_stays_with_a_profile():
    photo = Image.new("RGBA", (64, 64), (200, 100, 50, 0))
    photo.paste((200, 100, 50, 255), (0, 0, 32, 64))
    result = prepare_photo(saved(photo, "PNG", icc.rgb_profile(icc.DISPLAY_P3, None)), 64, 64)
    assert result.getpixel((63, 0)) == (0, 0, 0)
    assert result.getpixel((0, 0)) != (200, 100, 50)
    assert result.getpixel((0, 0))[0] > 200


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        (b"no profile", "cannot be used"),
        (icc.rgb_profile(icc.DISPLAY_P3, None)[:200], "cannot be used"),
        (icc.gray_profile(1.8), "for GRAY and the photo is RGB"),
        (icc.cmyk_profile(dict.fromkeys(itertools.product((0, 1), repeat=4), (50, 0, 0))), "for CMYK"),
        (bytes(MAX_PROFILE_BYTES + 1), "8,388,609 bytes"),
    ],
    ids=["text", "cut", "gray", "cmyk", "large"],
)
def test_a_profile_that_cannot_be_used_is_ignored_with_a_note(profile, says):
    notes: list[str] = []
    assert np.array_equal(prepared(saved(stripes(COLORS), "TIFF", profile), notes), COLORS)
    (note,) = notes
    assert says in note
    assert "color profile is ignored" in note
