"""When something is to be, as a user writes it: `22:00`, `+2h30m`, `2027-01-31T22:00`. Pure, no clock of its own."""

import re
from datetime import datetime, time, timedelta

from svdq.pipeline.errors import InputError

_FROM_NOW = re.compile(
    r"\+(?:(?P<days>\d{1,4})d)?(?:(?P<hours>\d{1,5})h)?(?:(?P<minutes>\d{1,6})m)?(?:(?P<seconds>\d{1,7})s)?"
)


def parse_due(text: str, now: datetime, called: str) -> datetime:
    """Read a time of day, which means the next such local time, a time from now, or an ISO date and time.

    Args:
        text: what the user wrote; without a zone it is local.
        now: with a zone.
        called: what an error calls it, such as `--at`.

    Raises:
        InputError: it is none of these, or lies in the past.
    """
    text = text.strip()
    from_now = _FROM_NOW.fullmatch(text)
    try:
        if from_now and from_now.lastgroup:
            moment = now + timedelta(**{unit: int(number) for unit, number in from_now.groupdict("0").items()})
        elif ":" in text and "-" not in text.partition("+")[0]:
            moment = _next(time.fromisoformat(text), now)
        else:
            moment = datetime.fromisoformat(text)
        moment = moment.astimezone() if moment.tzinfo is None else moment
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{called} {text!r} is not a time; write it as 22:00, as +2h or +90m from now, or as a date and time such "
            "as 2027-01-31T22:00."
        ) from error
    if moment <= now:
        raise InputError(f"{called} {text!r} is in the past; give a time that is still to come.")
    return moment


def _next(at: time, now: datetime) -> datetime:
    """Put together as a wall clock shows it, zone last: a night in which clocks are changed is no exception."""
    today = now.astimezone(at.tzinfo).replace(tzinfo=None)
    moment = datetime.combine(today.date(), at.replace(tzinfo=None))
    return (moment + timedelta(days=1) if moment <= today else moment).replace(tzinfo=at.tzinfo)
