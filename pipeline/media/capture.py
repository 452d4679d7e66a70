"""When and where a photo was taken: reads it from EXIF, and makes EXIF and XMP of it for videos."""

import contextlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import isfinite

from PIL import ExifTags, Image
from PIL.TiffImagePlugin import IFDRational

_EXIF_TIME = "%Y:%m:%d %H:%M:%S"
#: Years that all containers can hold, and that a set clock may show.
_YEARS = range(1970, 2100)


@dataclass(frozen=True, kw_only=True)
class Capture:
    """When and where a photo was taken, or a video rendered."""

    time: datetime | None = None  # without a time zone where the camera recorded none
    #: Degrees north and east. Not shown, so that no log has it.
    location: tuple[float, float] | None = field(default=None, repr=False)

    @classmethod
    def of_photo(cls, image: Image.Image) -> "Capture":
        """Read the EXIF of an opened photo; what is missing or damaged is None."""
        with contextlib.suppress(Exception):  # Pillow raises many types
            exif = image.getexif()
            return cls(time=_time(exif), location=_location(exif.get_ifd(ExifTags.IFD.GPSInfo)))
        return cls()

    @classmethod
    def parse(cls, time: str, location: str) -> "Capture":
        """Make one of the texts of `time_text` and `location_text`, which anyone may have written."""
        found = cls()
        with contextlib.suppress(ValueError):
            parsed = datetime.fromisoformat(time)
            found = cls(time=parsed if parsed.year in _YEARS else None)
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

    @property
    def xmp(self) -> str:
        """An XMP packet; "" if the time is not known."""
        if self.time is None:
            return ""
        place = ""
        if self.location is not None:
            north, east = (f"{abs(value) // 1:.0f},{abs(value) % 1 * 60:.4f}" for value in self.location)
            place = (
                f' exif:GPSLatitude="{north}{"N" if self.location[0] >= 0 else "S"}"'
                f' exif:GPSLongitude="{east}{"E" if self.location[1] >= 0 else "W"}"'
            )
        time = self.time_text
        return (
            '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/">'
            '<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about=""'
            ' xmlns:exif="http://ns.adobe.com/exif/1.0/" xmlns:xmp="http://ns.adobe.com/xap/1.0/"'
            f' xmp:CreateDate="{time}" exif:DateTimeOriginal="{time}"{place}/></rdf:RDF></x:xmpmeta>'
            '<?xpacket end="w"?>'
        )


def _time(exif: Image.Exif) -> datetime | None:
    tags = exif.get_ifd(ExifTags.IFD.Exif)
    for name, offset in (
        (ExifTags.Base.DateTimeOriginal, ExifTags.Base.OffsetTimeOriginal),
        (ExifTags.Base.DateTimeDigitized, ExifTags.Base.OffsetTimeDigitized),
    ):
        with contextlib.suppress(ValueError):  # such as 0000:00:00 of a camera whose clock is not set
            time = datetime.strptime(str(tags.get(name, "")).strip("\0 "), _EXIF_TIME)
            if time.year not in _YEARS:
                continue
            zone = str(tags.get(offset, "")).strip("\0 ")
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(f"{time.isoformat()}{zone}")
            return time
    return None


def _location(gps: dict[int, object]) -> tuple[float, float] | None:
    sides = []
    for value, reference, negative in (
        (ExifTags.GPS.GPSLatitude, ExifTags.GPS.GPSLatitudeRef, "S"),
        (ExifTags.GPS.GPSLongitude, ExifTags.GPS.GPSLongitudeRef, "W"),
    ):
        if value not in gps:
            return None
        degrees, minutes, seconds = map(float, gps[value])  # type: ignore[call-overload]
        sides.append((degrees + minutes / 60 + seconds / 3600) * (-1 if gps.get(reference) == negative else 1))
    return _checked(sides[0], sides[1])


def _checked(north: float, east: float) -> tuple[float, float] | None:
    is_place = isfinite(north) and isfinite(east) and abs(north) <= 90 and abs(east) <= 180
    return (north, east) if is_place else None


def _degrees(value: float) -> tuple[IFDRational, IFDRational, IFDRational]:
    """Return degrees, minutes and seconds, as EXIF has them."""
    seconds = round(abs(value) * 360_000)  # hundredths
    return IFDRational(seconds // 360_000), IFDRational(seconds // 6000 % 60), IFDRational(seconds % 6000, 100)
