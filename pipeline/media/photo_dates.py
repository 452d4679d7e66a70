"""Finds when a photo was taken, also where cameras and programs have written the date in a form of their own."""

import contextlib
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime

from PIL import ExifTags, Image, ImageFile
from PIL.IptcImagePlugin import getiptcinfo

#: Years that all containers can hold, and that a set clock may show.
YEARS = range(1970, 2100)
_MAX_TEXT = 64  # characters of a date that are read
_MAX_XMP = 1 << 20  # bytes of an XMP packet that are searched
_XMP_NAMES = ("exif:DateTimeOriginal", "photoshop:DateCreated", "exif:DateTimeDigitized", "xmp:CreateDate")
_IPTC_DATE, _IPTC_TIME = (2, 55), (2, 60)

#: 2015:08:22 12:08:19, with the separators of ISO 8601 or slashes, without seconds or a time, and with what follows.
_DATE = re.compile(
    r"(\d{4})([:/.-])(\d\d?)\2(\d\d?)(?:[ T:_,]+(\d\d?)[:.](\d\d)(?:[:.](\d\d)(?:[.,]\d*)?)?\s*([ap]\.?m\b\.?)?(.*))?",
    re.ASCII | re.IGNORECASE | re.DOTALL,
)
_ZONE = re.compile(r"\s*(?:(?:Z|UTC|GMT)?\s*([+-]\d\d?):?(\d\d)?|Z|UTC|GMT)(?![\d:])", re.ASCII | re.IGNORECASE)


def time_of(image: Image.Image) -> datetime | None:
    """Return when an opened photo was taken, without a zone where none was recorded; None if it does not say it."""
    for text, zone in _candidates(image):
        if (time := parse_date(text)) is not None:
            return time if time.tzinfo else time.replace(tzinfo=_zone(zone))
    return None


def parse_date(text: str) -> datetime | None:
    """Parse a date of EXIF, XMP or a PNG to whole seconds; None for anything else, and of a clock that is not set."""
    text = text[:_MAX_TEXT].strip()
    match = _DATE.match(text)
    with contextlib.suppress(ValueError, TypeError, OverflowError, IndexError):
        # PNGs may have the dates of mail: Sat, 22 Aug 2015 12:08:19 +0200.
        time = _time(match) if match else parsedate_to_datetime(text)
        return time if time.year in YEARS else None
    return None


def _time(match: re.Match[str]) -> datetime:
    year, _, month, day, hours, minutes, seconds, half, rest = match.groups()
    day_begins = datetime(int(year), int(month), int(day))
    if hours is None:
        return day_begins
    hour = int(hours)
    if half and 1 <= hour <= 12:
        hour = hour % 12 + (12 if half[0] in "pP" else 0)
    if hour == 24:  # as old Androids count the hour after midnight, with the date of the new day
        hour = 0
    # A second of 60 is a leap second, or rounded up.
    second = int(seconds or 0)
    time = day_begins.replace(hour=hour, minute=int(minutes), second=min(second, 59) if second == 60 else second)
    return (time + timedelta(seconds=second == 60)).replace(tzinfo=_zone(rest))


def _zone(text: str) -> timezone | None:
    """Return the zone that a text begins with: Z, +02:00, +0200 or +2; None for anything else."""
    match = _ZONE.match(text)
    if match is None:
        return None
    hours, minutes = int(match[1] or 0), int(match[2] or 0)
    offset = timedelta(hours=hours, minutes=-minutes if (match[1] or "").startswith("-") else minutes)
    return timezone(offset) if minutes < 60 and abs(offset) <= timedelta(hours=14) else None


def text_of(value: object) -> str:
    """Return the text of a tag up to a NUL, without spaces around it; "" of a tag of another type."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return text.lstrip("\0 ").partition("\0")[0].strip() if isinstance(text, str) else ""


def _candidates(image: Image.Image) -> Iterator[tuple[str, str]]:
    """Yield texts that may be the date, the best ones first, each with a text that may be its zone."""
    for source in (_of_exif, _of_xmp, _of_iptc, _of_png, _of_last_change):
        with contextlib.suppress(Exception):  # Pillow raises many types
            yield from source(image)


def _of_exif(image: Image.Image) -> Iterator[tuple[str, str]]:
    tags = image.getexif().get_ifd(ExifTags.IFD.Exif)
    for name, zone in (
        (ExifTags.Base.DateTimeOriginal, ExifTags.Base.OffsetTimeOriginal),
        (ExifTags.Base.DateTimeDigitized, ExifTags.Base.OffsetTimeDigitized),
    ):
        yield text_of(tags.get(name, "")), text_of(tags.get(zone) or tags.get(ExifTags.Base.OffsetTime, ""))


def _of_xmp(image: Image.Image) -> Iterator[tuple[str, str]]:
    packet = image.info.get("xmp", b"")
    text = (packet if isinstance(packet, bytes) else packet.encode())[:_MAX_XMP].decode("utf-8", "replace")
    for name in _XMP_NAMES:
        for match in re.finditer(rf"<?{name}\s*(?:=\s*[\"']|>)([^\"'<]{{1,{_MAX_TEXT}}})", text):
            yield match[1], ""


def _of_iptc(image: Image.Image) -> Iterator[tuple[str, str]]:
    tags = (getiptcinfo(image) if isinstance(image, ImageFile.ImageFile) else None) or {}
    day, time = (text_of(tags.get(name, b"")) for name in (_IPTC_DATE, _IPTC_TIME))  # 20150822, 120819+0200
    clock = f" {time[:2]}:{time[2:4]}:{time[4:6]}{time[6:]}" if re.match(r"\d{6}", time) else ""
    yield f"{day[:4]}-{day[4:6]}-{day[6:8]}{clock}", ""


def _of_png(image: Image.Image) -> Iterator[tuple[str, str]]:
    for name in ("exif:DateTimeOriginal", "exif:DateTimeDigitized", "Creation Time"):
        yield text_of(image.info.get(name, "")), ""


def _of_last_change(image: Image.Image) -> Iterator[tuple[str, str]]:
    exif = image.getexif()
    zone = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.OffsetTime, "")
    yield text_of(exif.get(ExifTags.Base.DateTime, "")), text_of(zone)
