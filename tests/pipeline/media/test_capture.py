"""The date and the place of a photo, from its metadata into every kind of file, and none where there is none."""

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
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image
from PIL.TiffImagePlugin import IFDRational

from svdq.pipeline.media.capture import Capture
from svdq.pipeline.media.mp4 import ChainSoFar
from svdq.pipeline.media.photo_dates import parse_date
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2015:08:22 24:08:19", "2015-08-22T00:08:19"),  # eight minutes after midnight, of old Androids
        ("2025:01:14 18:31:30+0000", "2025-01-14T18:31:30+00:00"),
        ("2023-07-21 21:06:26", "2023-07-21T21:06:26"),
        ("2023-07-21T21:06:26.863Z", "2023-07-21T21:06:26+00:00"),
        ("2023/07/21 21:06:26,5 +2", "2023-07-21T21:06:26+02:00"),
        ("2023:07:21 21:06:60", "2023-07-21T21:07:00"),
        ("2023:07:21 09:06:26 PM", "2023-07-21T21:06:26"),
        ("\0 2023:07:21 21:06:26\0 noise", "2023-07-21T21:06:26"),
        ("2023:07:21   :  :  ", "2023-07-21T00:00:00"),
        ("2023:07:21 21:06:26+99:00", "2023-07-21T21:06:26"),
        ("2023:07:21 25:06:26", None),
        ("2023:13:21 21:06:26", None),
        ("21/07/2023 21:06:26", None),  # or a day of the 21st month
        ("x" * 10_000, None),
    ],
)
def test_dates_in_other_forms_are_read_where_they_are_clear(text: str, expected: str | None) -> None:
    time = Capture.of_photo(photo_with({ExifTags.Base.DateTimeDigitized: text})).time
    assert time == (expected and datetime.fromisoformat(expected))


@pytest.mark.slow
@given(st.text(max_size=40) | st.from_regex(r"[0-9:/ .-]{8,20}[TZ+apm0-9:. -]{0,12}"))
def test_no_text_of_a_date_fails(text: str) -> None:
    time = parse_date(text)
    assert time is None or 1970 <= time.year < 2100


def test_the_last_change_counts_where_nothing_better_is_there(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.DateTime] = "2023:07:21 21:06:26"
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.OffsetTime] = "+0200"
    for kind in ("jpg", "png", "webp"):
        Image.new("RGB", (64, 64)).save(tmp_path / f"a.{kind}", exif=exif)
        with Image.open(tmp_path / f"a.{kind}") as image:
            assert Capture.of_photo(image).time_text == "2023-07-21T21:06:26+02:00"


@pytest.mark.skipif(shutil.which("exiftool") is None, reason="exiftool is not installed")
@pytest.mark.parametrize(
    ("kind", "tags"),
    [
        ("jpg", ["-XMP-exif:DateTimeOriginal=2023:07:21 21:06:26+02:00"]),
        ("png", ["-XMP-photoshop:DateCreated=2023:07:21 21:06:26+02:00"]),
        ("tif", ["-XMP-xmp:CreateDate=2023:07:21 21:06:26+02:00"]),
        ("webp", ["-XMP-exif:DateTimeOriginal=2023:07:21 21:06:26+02:00"]),
        ("jpg", ["-IPTC:DateCreated=2023:07:21", "-IPTC:TimeCreated=21:06:26+02:00"]),
        ("png", ["-PNG:CreationTime=2023:07:21 21:06:26+02:00"]),
        ("jpg", ["-EXIF:DateTimeOriginal=0000:00:00 00:00:00", "-XMP-xmp:CreateDate=2023:07:21 21:06:26+02:00"]),
    ],
)
def test_other_metadata_has_the_date(tmp_path: Path, kind: str, tags: list[str]) -> None:
    path = tmp_path / f"a.{kind}"
    Image.new("RGB", (64, 64)).save(path)
    subprocess.run(["exiftool", "-q", *tags, str(path)], check=True)
    with Image.open(path) as image:
        assert Capture.of_photo(image).time_text == "2023-07-21T21:06:26+02:00"


@pytest.mark.parametrize(
    ("north", "east", "expected"),
    [
        ("s", "w\0", (-48.25, -11.5)),
        (" S ", "West", (-48.25, -11.5)),
        ("\0N", "e", (48.25, 11.5)),
        ("", "E", None),
        ("E", "N", None),
    ],
)
def test_the_hemisphere_in_other_forms(north: str, east: str, expected: tuple[float, float] | None) -> None:
    gps = ExifTags.GPS
    nothing = IFDRational(0, 0)  # seconds of some programs, whose minutes have a fraction
    tags = {gps.GPSLatitudeRef: north, gps.GPSLatitude: (48.0, 15.0, nothing)}
    tags |= {gps.GPSLongitudeRef: east, gps.GPSLongitude: (11.5, nothing, nothing)}
    assert Capture.of_photo(photo_with(gps=tags)).location == expected


def test_a_damaged_place_does_not_hide_the_date() -> None:
    gps = ExifTags.GPS
    tags = {gps.GPSLatitudeRef: "N", gps.GPSLatitude: (), gps.GPSLongitudeRef: "E", gps.GPSLongitude: ()}
    capture = Capture.of_photo(photo_with({ExifTags.Base.DateTimeOriginal: "2024:05:06 23:08:09"}, tags))
    assert (capture.time, capture.location) == (TAKEN.replace(tzinfo=None), None)


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
