"""`--until`: when a worker is to be done, and whether another video can be by then. Pure, no clock of its own."""

from collections.abc import Collection
from datetime import datetime, time, timedelta
from statistics import median

from svdq.pipeline.errors import InputError


def parse_until(text: str, now: datetime) -> datetime:
    """Read 06:00, which means the next such local time, or an ISO date and time; without a zone it is local.

    Args:
        text: what the user wrote.
        now: with a zone.

    Raises:
        InputError: it is neither, or lies in the past.
    """
    try:
        at = time.fromisoformat(text) if ":" in text and "-" not in text.partition("+")[0] else None
        if at is None:
            moment = datetime.fromisoformat(text)
        else:
            # Put together as a wall clock shows it, zone last: a night in which clocks are changed is no exception.
            zone = at.tzinfo
            today = now.astimezone(zone).replace(tzinfo=None)
            moment = datetime.combine(today.date(), at.replace(tzinfo=None))
            moment = (moment + timedelta(days=1) if moment <= today else moment).replace(tzinfo=zone)
    except ValueError as error:
        raise InputError(
            f"--until {text!r} is not a time; write it as 06:00 or as a date and time such as 2027-01-31T06:00."
        ) from error
    moment = moment.astimezone() if moment.tzinfo is None else moment
    if moment <= now:
        raise InputError(f"--until {text!r} is in the past; give a time that is still to come.")
    return moment


def is_too_late(now_s: float, until_s: float | None, latencies_s: Collection[float]) -> bool:
    """Whether a video that is begun now would not be done in time, going by how long the last ones took.

    Args:
        now_s: seconds since the epoch.
        until_s: the same; None means there is no end.
        latencies_s: from beginning to end of the last videos; as long as there are none, hope counts.
    """
    return until_s is not None and now_s + (median(latencies_s) if latencies_s else 0.0) >= until_s
