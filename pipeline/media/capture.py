"""When and where a photo was taken: reads it from the photo, and makes EXIF of it for videos."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite, isnan

from PIL import ExifTags, Image
from PIL.TiffImagePlugin import IFDRational

from svdq.pipeline.media.photo_dates import YEARS, text_of, time_of

_EXIF_TIME = "%Y:%m:%d %H:%M:%S"


@dataclass(frozen=True, kw_only=True)
class Capture:
    """When and where a photo was taken, or a video rendered."""

    time: datetime | None = None  # without a time zone where the camera recorded none
    #: Degrees north and east. Not shown, so that no log has it.
    location: tuple[float, float] | None = field(default=None, repr=False)

    @classmethod
    def of_photo(cls, image: Image.Image) -> "Capture":
        """Read the date and the place in an opened photo; what is missing or damaged is None."""
        location = None
        with contextlib.suppress(Exception):  # Pillow raises many types
            location = _location(image.getexif().get_ifd(ExifTags.IFD.GPSInfo))
        return cls(time=time_of(image), location=location)

    @classmethod
    def parse(cls, time: str, location: str) -> "Capture":
        """Make one of the texts of `time_text` and `location_text`, which anyone may have written."""
        found = cls()
        with contextlib.suppress(ValueError):
            parsed = datetime.fromisoformat(time)
            found = cls(time=parsed if parsed.year in YEARS else None)
        with contextlib.suppress(ValueError):
            north, east = map(float, location.split(","))
            return cls(time=found.time, location=_checked(north, east))
        return found

    @property
    def time_text(self) -> str:
        """The time in ISO 8601; "" for none."""
        return self.time.isoformat(timespec="seconds") if self.time else ""

    @property
    def location_text(self) -> str:
        """Degrees north and east, such as `48.13715,11.57541`; "" for none."""
        return "{:.5f},{:.5f}".format(*self.location) if self.location else ""

    @property
    def ffmetadata(self) -> str:
        """Lines of ffmpeg's metadata format; its mp4 writer gives the tracks the creation time of the file."""
        if self.time is None:
            return ""
        # An mp4 has UTC. A time without a zone stays as the camera showed it.
        utc = self.time.astimezone(UTC) if self.time.tzinfo else self.time
        created = f"creation_time={utc:%Y-%m-%dT%H:%M:%S}Z\n"
        # ISO 6709, as phones write it.
        place = "location={:+08.4f}{:+09.4f}/\n".format(*self.location) if self.location else ""
        return f"{created}{place}"

    def add_to(self, exif: Image.Exif) -> Image.Exif:
        """Add its tags to EXIF, and return that."""
        if self.time is not None:
            tags = exif.get_ifd(ExifTags.IFD.Exif)
            text, offset = self.time.strftime(_EXIF_TIME), self.time_text[19:]
            exif[ExifTags.Base.DateTime] = text
            for name in (ExifTags.Base.DateTimeOriginal, ExifTags.Base.DateTimeDigitized):
                tags[name] = text
            if offset:
                tags[ExifTags.Base.OffsetTimeOriginal] = tags[ExifTags.Base.OffsetTime] = offset
        if self.location is not None:
            north, east = self.location
            exif.get_ifd(ExifTags.IFD.GPSInfo).update(
                {
                    ExifTags.GPS.GPSLatitudeRef: "N" if north >= 0 else "S",
                    ExifTags.GPS.GPSLatitude: _degrees(north),
                    ExifTags.GPS.GPSLongitudeRef: "E" if east >= 0 else "W",
                    ExifTags.GPS.GPSLongitude: _degrees(east),
                }
            )
        return exif


def _location(gps: Mapping[int, object]) -> tuple[float, float] | None:
    names = ExifTags.GPS
    north = _side(gps, names.GPSLatitude, names.GPSLatitudeRef, "NS")
    east = _side(gps, names.GPSLongitude, names.GPSLongitudeRef, "EW")
    return None if north is None or east is None else _checked(north, east)


def _side(gps: Mapping[int, object], value: int, reference: int, signs: str) -> float | None:
    """Return degrees, negative for the second one of `signs`; None without a hemisphere."""
    sign = text_of(gps.get(reference, ""))[:1].upper()
    if value not in gps or not sign or sign not in signs:
        return None
    given = gps[value]
    degrees, *parts = map(_number, given[:3] if isinstance(given, tuple) else (given,))
    # Minutes and seconds of 0/0 are in the degrees.
    total = degrees + sum(0 if isnan(part) else part / 60**power for power, part in enumerate(parts, start=1))
    return total * (1, -1)[signs.index(sign)]


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except ZeroDivisionError:
        return float("nan")


def _checked(north: float, east: float) -> tuple[float, float] | None:
    is_place = isfinite(north) and isfinite(east) and abs(north) <= 90 and abs(east) <= 180
    return (north, east) if is_place else None


def _degrees(value: float) -> tuple[IFDRational, IFDRational, IFDRational]:
    """Return degrees, minutes and seconds, as EXIF has them."""
    seconds = round(abs(value) * 360_000)  # hundredths
    return IFDRational(seconds // 360_000), IFDRational(seconds // 6000 % 60), IFDRational(seconds % 6000, 100)
