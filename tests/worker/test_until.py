"""`--until`: what is a time, which moment it means, and what can still be done by then."""

from datetime import datetime, timedelta, timezone

import pytest

from svdq.pipeline.errors import InputError
from svdq.worker.until import is_too_late, parse_until

EAST = timezone(timedelta(hours=3))
EVENING = datetime(2027, 1, 30, 22, 15).astimezone()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("06:00", datetime(2027, 1, 31, 6)),
        ("23:59", datetime(2027, 1, 30, 23, 59)),
        ("22:15", datetime(2027, 1, 31, 22, 15)),  # now is tomorrow
        ("22:15:30", datetime(2027, 1, 30, 22, 15, 30)),
        ("2027-02-03T04:05", datetime(2027, 2, 3, 4, 5)),
        ("2027-02-03 04:05", datetime(2027, 2, 3, 4, 5)),
    ],
)
def test_local_times(text: str, expected: datetime) -> None:
    assert parse_until(text, EVENING) == expected.astimezone()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("06:00+03:00", datetime(2027, 1, 31, 6, tzinfo=EAST)),
        ("2027-02-03T04:05+03:00", datetime(2027, 2, 3, 4, 5, tzinfo=EAST)),
    ],
)
def test_a_zone_that_is_given_counts(text: str, expected: datetime) -> None:
    assert parse_until(text, datetime(2027, 1, 30, 22, 15, tzinfo=EAST)) == expected


@pytest.mark.parametrize("text", ["", "morning", "25:00", "6", "2027-13-01T00:00", "06:00 tomorrow"])
def test_what_is_no_time_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(InputError, match=f"^--until '{text}' is not a time"):
        parse_until(text, EVENING)


@pytest.mark.parametrize("text", ["2020-01-01T06:00", "2027-01-30T22:15"])
def test_what_is_past_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="in the past"):
        parse_until(text, EVENING)


def test_another_video_is_begun_as_long_as_one_like_the_last_ones_would_be_done() -> None:
    assert not is_too_late(1000.0, None, [10.0])
    assert not is_too_late(1000.0, 1011.0, [10.0, 10.0, 500.0])
    assert is_too_late(1000.0, 1009.0, [10.0, 10.0, 500.0])
    assert not is_too_late(1000.0, 1001.0, [])
    assert is_too_late(1001.0, 1001.0, [])
