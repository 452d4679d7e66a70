"""The date and the place of a photo, from its EXIF into every kind of file, and none where there is none."""

import json
import shutil
import subprocess
from datetime import datetime
from fractions import Fraction
from io import BytesIO
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import ExifTags, Image

from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.mp4 import ChainSoFar
from svdq.pipeline.media.video import write_video

FRAMES = np.zeros((3, 64, 64, 3), np.uint8)
TAKEN = datetime.fromisoformat("2024-05-06T23:08:09-02:00")
CAPTURE = Capture(time=TAKEN, location=(-48.13715, 11.57541))


def photo_with(base: dict[int, object] | None = None, gps: dict[int, object] | None = None) -> Image.Image:
    exif, buffer = Image.Exif(), BytesIO()
    exif.get_ifd(ExifTags.IFD.Exif).update(base or {})
    exif.get_ifd(ExifTags.IFD.GPSInfo).update(gps or {})
    Image.new("RGB", (64, 64)).save(buffer, "JPEG", exif=exif)
    return Image.open(buffer)


@pytest.mark.parametrize(
    ("text", "offset", "expected"),
    [
        ("2024:05:06 23:08:09", "-02:00", TAKEN),
        ("2024:05:06 23:08:09", "", TAKEN.replace(tzinfo=None)),
        ("2024:05:06 23:08:09", "summer", TAKEN.replace(tzinfo=None)),
        ("0000:00:00 00:00:00", "+02:00", None),
        ("1904:01:01 00:00:00", "+02:00", None),
        ("yesterday", "", None),
    ],
)
def test_the_time_of_a_photo(text: str, offset: str, expected: datetime | None) -> None:
    tags = {ExifTags.Base.DateTimeOriginal: text, ExifTags.Base.OffsetTimeOriginal: offset}
    capture = Capture.of_photo(photo_with(tags))
    assert (capture.time, capture.location) == (expected, None)
    assert Capture.parse(capture.time_text, capture.location_text) == capture


def test_a_photo_without_exif_has_no_time() -> None:
    assert Capture.of_photo(Image.new("RGB", (64, 64))) == Capture()


@pytest.mark.parametrize(("longitude", "expected"), [(Fraction(30), 11.5), (Fraction(90000), None)])
def test_the_place_of_a_photo(longitude: Fraction, expected: float | None) -> None:
    gps = ExifTags.GPS
    tags = {gps.GPSLatitudeRef: "S", gps.GPSLatitude: (48.0, 15.0, 0.0)}
    tags |= {gps.GPSLongitudeRef: "E", gps.GPSLongitude: (11.0, float(longitude), 0.0)}
    found = Capture.of_photo(photo_with(gps=tags))
    assert found.location == (expected and (-48.25, expected))
    assert Capture.parse("", found.location_text) == found


@pytest.mark.parametrize("text", ["", "x", "1,2,3", "nan,1", "91,0"])
def test_texts_that_anyone_may_have_written(text: str) -> None:
    assert Capture.parse(text, text) == Capture()


def exif_of(path: Path) -> tuple[str, str, float]:
    with Image.open(path) as image:
        exif = image.getexif()
        tags, gps = exif.get_ifd(ExifTags.IFD.Exif), exif.get_ifd(ExifTags.IFD.GPSInfo)
        north = [float(value) for value in gps[ExifTags.GPS.GPSLatitude]]
        assert gps[ExifTags.GPS.GPSLatitudeRef] == "S"
        assert exif[ExifTags.Base.DateTime] == tags[ExifTags.Base.DateTimeOriginal]
        degrees = north[0] + north[1] / 60 + north[2] / 3600
        return tags[ExifTags.Base.DateTimeOriginal], tags[ExifTags.Base.OffsetTimeOriginal], degrees


def test_files_have_the_time_and_the_place(tmp_path: Path) -> None:
    for kind in ("mp4", "gif", "webp", "png"):
        write_video(FRAMES, tmp_path / f"a.{kind}", kind, 7, "text", capture=CAPTURE)
    chain = ChainSoFar(path=tmp_path / "a.mp4", num_frames=3)
    write_video(FRAMES, tmp_path / "b.mp4", "mp4", 7, "text", capture=CAPTURE, chain=chain)
    for name in ("a.mp4", "b.mp4"):
        with av.open(str(tmp_path / name)) as container:
            assert container.metadata["creation_time"] == "2024-05-07T01:08:09.000000Z"
            assert container.streams.video[0].metadata["creation_time"] == container.metadata["creation_time"]
            assert container.metadata["location"].startswith("-48.1371+011.5754")
            assert container.metadata["comment"] == "text"
    for path in (tmp_path / "a.webp", tmp_path / "a.png/frame_0003.png"):
        assert exif_of(path) == ("2024:05:06 23:08:09", "-02:00", pytest.approx(48.13715, abs=1e-5))
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.n_frames, image.info["comment"]) == (3, b"text")
    xmp = (tmp_path / "a.gif").read_bytes().partition(b"\x21\xff\x0bXMP DataXMP")[2].partition(b"\x01\xff")[0].decode()
    assert 'exif:DateTimeOriginal="2024-05-06T23:08:09-02:00"' in xmp
    assert 'exif:GPSLatitude="48,8.2290S" exif:GPSLongitude="11,34.5246E"' in xmp


@pytest.mark.skipif(shutil.which("exiftool") is None, reason="exiftool is not installed")
@pytest.mark.parametrize("time", [TAKEN, TAKEN.replace(tzinfo=None)])
def test_exiftool_shows_the_time(tmp_path: Path, time: datetime) -> None:
    for kind in ("mp4", "gif", "webp", "png"):
        write_video(FRAMES, tmp_path / f"a.{kind}", kind, 7, "text", capture=Capture(time=time))
    files = [tmp_path / "a.mp4", tmp_path / "a.gif", tmp_path / "a.webp", tmp_path / "a.png/frame_0001.png"]
    command = ["exiftool", "-json", "-CreateDate", "-GPSPosition", "-Warning", *map(str, files)]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    of_gif = "2024:05:06 23:08:09-02:00" if time.tzinfo else "2024:05:06 23:08:09"
    of_mp4 = "2024:05:07 01:08:09" if time.tzinfo else "2024:05:06 23:08:09"
    expected = [of_mp4, of_gif, "2024:05:06 23:08:09", "2024:05:06 23:08:09"]
    assert [file["CreateDate"] for file in shown] == expected
    assert not any("GPSPosition" in file or "Warning" in file for file in shown)
