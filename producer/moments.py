"""Times and ages as people write them: 22:00, 2027-01-31, 12h, 30d. Pure, no clock of its own."""

import re
from datetime import datetime, time, timedelta

from svdq.pipeline.errors import InputError

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_age(text: str, option: str) -> timedelta:
    """Read an age such as 90m, 12h, 30d or 2w.

    Args:
        text: what the user wrote.
        option: the flag it was written for.

    Raises:
        InputError: it is none.
    """
    match = re.fullmatch(r"(\d{1,5})([smhdw])", text.strip())  # so short that it leads to no year before the first
    if match is None:
        raise InputError(f"{option} {text!r} is not an age; write it as 12h, 30d or 2w.")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def parse_past(text: str, option: str, now: datetime) -> datetime:
    """Read 22:00, which means the last such local time, a date, a date and time, or an age such as 12h.

    Args:
        text: what the user wrote; without a zone it is local.
        option: the flag it was written for.
        now: with a zone.

    Raises:
        InputError: it is none, or lies in the future.
    """
    if re.fullmatch(r"\d+[a-z]", text.strip()):
        return now - parse_age(text, option)
    try:
        at = time.fromisoformat(text) if ":" in text and "-" not in text.partition("+")[0] else None
        if at is None:
            moment = datetime.fromisoformat(text)
        else:
            # Put together as a wall clock shows it, zone last: a night in which clocks are changed is no exception.
            today = now.astimezone(at.tzinfo).replace(tzinfo=None)
            moment = datetime.combine(today.date(), at.replace(tzinfo=None))
            moment = (moment - timedelta(days=1) if moment > today else moment).replace(tzinfo=at.tzinfo)
    except ValueError as error:
        raise InputError(
            f"{option} {text!r} is not a time; write it as 22:00, as a date and time such as 2027-01-31T22:00, or as "
            "12h for twelve hours ago."
        ) from error
    moment = moment.astimezone() if moment.tzinfo is None else moment
    if moment > now:
        raise InputError(f"{option} {text!r} is in the future; give a time that has been.")
    return moment
