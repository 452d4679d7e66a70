"""Times that have been, and ages, as people write them."""

from datetime import datetime, timedelta, timezone

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.moments import parse_age, parse_past

MORNING = datetime(2027, 1, 31, 8, 15).astimezone()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("22:00", datetime(2027, 1, 30, 22)),
        ("06:30", datetime(2027, 1, 31, 6, 30)),
        ("08:15", datetime(2027, 1, 31, 8, 15)),
        ("08:15:01", datetime(2027, 1, 30, 8, 15, 1)),
        ("2027-01-30", datetime(2027, 1, 30)),
        ("2027-01-30T22:00", datetime(2027, 1, 30, 22)),
        ("12h", datetime(2027, 1, 30, 20, 15)),
        ("2w", datetime(2027, 1, 17, 8, 15)),
    ],
)
def test_times_that_have_been(text: str, expected: datetime) -> None:
    assert parse_past(text, "--since", MORNING) == expected.astimezone()


def test_a_zone_that_is_given_counts() -> None:
    east = timezone(timedelta(hours=3))
    now = datetime(2027, 1, 31, 8, 15, tzinfo=east)
    assert parse_past("09:00+03:00", "--since", now) == datetime(2027, 1, 30, 9, tzinfo=east)


@pytest.mark.parametrize("text", ["", "yesterday", "25:00", "12", "h", "2027-13-01", "99999999999999d", "-3h", "3 h"])
def test_what_is_no_time_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(InputError, match=r"^--since '.*' is not an? (time|age); write it as "):
        parse_past(text, "--since", MORNING)


def test_what_is_to_come_is_refused() -> None:
    with pytest.raises(InputError, match="is in the future"):
        parse_past("2027-02-01", "--since", MORNING)


def test_ages() -> None:
    assert parse_age("30d", "--older-than") == timedelta(days=30)
    assert parse_age("90m", "--older-than") == timedelta(minutes=90)
    for text in ("", "30", "d", "1.5h", "30 days", "-1d", "999999999w"):
        with pytest.raises(InputError, match=r"^--older-than '.*' is not an age"):
            parse_age(text, "--older-than")
