"""Parses times and durations, formats them and counts, and makes foreign text safe to print."""

import re
import unicodedata
from datetime import UTC, datetime, time, timedelta

from svdq.pipeline.errors import InputError

#: Unicode categories that move the cursor, hide or reorder text (bidi overrides), or cannot be encoded.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # of letters and emoji: formats that are harmless


def printable(text: str) -> str:
    r"""Replace each character that could control a terminal by its escape, such as `\x1b`; the result is one line."""
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape", "surrogatepass").decode("ascii")
        if unicodedata.category(character) in _UNSAFE and character not in _JOINERS
        else character
        for character in text
    )


def count(number: int, thing: str) -> str:
    """Format a number of things with the right plural: 1 video, 1,064 videos."""
    return f"1 {thing}" if number == 1 else f"{number:,} {thing}s"


def pace(videos_per_hour: float) -> str:
    """Format a number of videos an hour: 4.2 videos an hour, 1,064 videos an hour."""
    return f"{videos_per_hour:,.{0 if videos_per_hour >= 10 else 1}f} videos an hour"


MAX_SECONDS = 221_845_392_000  # the year 9000, which every time zone can represent

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_MAX_DURATION_S = 700_000 * 86_400  # keeps dates after the year 1
#: A number and a unit; a duration is one or more of them.
_PART = r"(\d{1,7}(?:\.\d{1,3})?)(ms|[smhdw])"


def parse_duration(text: str, option: str) -> timedelta:
    """Parse a duration such as 500ms, 30s, 2h30m, 1.5h, 30d or 2w; raises InputError, which names the option."""
    parsed = _duration(text)
    if parsed is None:
        raise InputError(f"{option} {text!r} is not a duration; write it as 30s, 12h, 30d or 2w.")
    return parsed


def parse_past(text: str, option: str, now: datetime) -> datetime:
    """Parse 22:00 (the last such time), a date, a date and time, or 12h ago; local without zone. Raises InputError."""
    try:
        ago = _duration(text)
        moment = _moment(text, now, is_future=False) if ago is None else now - ago
    except (ValueError, OverflowError) as error:
        ways = "as 22:00, as a date and time such as 2027-01-31T22:00, or as 12h for twelve hours ago"
        raise InputError(f"{option} {text!r} is not a time; write it {ways}.") from error
    if moment > now:
        raise InputError(f"{option} {text!r} is in the future; give a past time.")
    return max(moment, datetime.fromtimestamp(0, UTC))  # times near the year 1 overflow in some time zones


def parse_future(text: str, option: str, now: datetime) -> datetime:
    """Parse 22:00 (the next such time), a time from now such as +2h30m, or a date and time; as `parse_past`."""
    try:
        delay = _duration(text.strip()[1:]) if text.strip().startswith("+") else None
        moment = _moment(text, now, is_future=True) if delay is None else now + delay
    except (ValueError, OverflowError) as error:
        ways = "as 22:00, as +2h or +90m from now, or as a date and time such as 2027-01-31T22:00"
        raise InputError(f"{option} {text!r} is not a time; write it {ways}.") from error
    if moment <= now:
        raise InputError(f"{option} {text!r} is in the past; give a future time.")
    if moment.timestamp() >= MAX_SECONDS:
        raise InputError(f"{option} {text!r} is too late; give a time before the year 9000.")
    return moment


def duration(seconds: float) -> str:
    """Format a duration in its largest unit, hours with minutes: 5 s, 3 min, 2 h 10 min."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 and minutes else f"{hours} h"


def rfc3339(moment: datetime) -> str:
    """Format a time for JSON, in UTC with seconds: 2026-11-22T05:52:36Z."""
    return as_utc(moment).astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def iso_of(seconds: float) -> str:
    """Format seconds since the epoch as `rfc3339` does."""
    return rfc3339(datetime.fromtimestamp(seconds, UTC))


def as_utc(moment: datetime) -> datetime:
    """Add UTC to a time without a time zone; RQ and storages omit it."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _duration(text: str) -> timedelta | None:
    if not re.fullmatch(f"({_PART})+", text.strip()):
        return None
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(_PART, text))
    return timedelta(seconds=seconds) if seconds <= _MAX_DURATION_S else None


def _moment(text: str, now: datetime, *, is_future: bool) -> datetime:
    text = text.strip()
    if ":" not in text or "-" in text.partition("+")[0]:
        moments = _moments(datetime.fromisoformat(text), is_future=is_future)
        # Of an hour that comes twice the first one, unless only the second one is to come.
        return next((moment for moment in moments if is_future and moment > now), moments[0])
    at = time.fromisoformat(text)
    wall = now.astimezone(at.tzinfo).replace(tzinfo=None)
    found: list[datetime] = []
    for number in (-1, 0, 1):
        shown = datetime.combine(wall.date() + timedelta(days=number), at.replace(tzinfo=None))
        moments = _moments(shown.replace(tzinfo=at.tzinfo), is_future=is_future)
        # By the clock on the wall: at 3:10, after an hour that is left out, the next 2:30 is tomorrow's.
        is_later = [shown > wall] if len(moments) == 1 else [moment > now for moment in moments]
        found += [moment for moment, later in zip(moments, is_later, strict=True) if later == is_future]
    return min(found) if is_future else max(found)


def _moments(wall: datetime, *, is_future: bool) -> list[datetime]:
    """Return when a clock shows a time, local without a zone: twice in the hour that comes twice in autumn.

    A time in the hour that is left out in spring counts from where we look: 2:30 is 3:30 of summer time in the future,
    and 1:30 of winter time in the past.
    """
    if wall.tzinfo is not None:
        return [wall]
    first, second = (in_zone(wall.replace(fold=fold)) for fold in (0, 1))
    return [first, second] if first < second else [first if is_future else second]


def in_zone(moment: datetime) -> datetime:
    """Add the local time zone to a time without one; in the hour that a change of the clock leaves out, it is later."""
    # `astimezone` alone would take 2:30 in that hour for 1:30.
    return moment if moment.tzinfo is not None else datetime.fromtimestamp(moment.timestamp(), UTC).astimezone()
