from datetime import datetime, timedelta, timezone

import pytest

from svdq.pipeline.errors import InputError
from svdq.producer.due import parse_due

EAST = timezone(timedelta(hours=3))
EVENING = datetime(2027, 1, 30, 22, 15).astimezone()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("06:00", datetime(2027, 1, 31, 6)),
        (" 23:59 ", datetime(2027, 1, 30, 23, 59)),
        ("22:15", datetime(2027, 1, 31, 22, 15)),  # now is tomorrow
        ("22:15:30", datetime(2027, 1, 30, 22, 15, 30)),
        ("+2h", datetime(2027, 1, 31, 0, 15)),
        ("+90m", datetime(2027, 1, 30, 23, 45)),
        ("+1d2h3m4s", datetime(2027, 2, 1, 0, 18, 4)),
        ("2027-02-03T04:05", datetime(2027, 2, 3, 4, 5)),
        ("2027-02-03 04:05", datetime(2027, 2, 3, 4, 5)),
        ("2027-02-03", datetime(2027, 2, 3)),
    ],
)
def test_local_times(text: str, expected: datetime) -> None:
    assert parse_due(text, EVENING, "--at") == expected.astimezone()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("06:00+03:00", datetime(2027, 1, 31, 6, tzinfo=EAST)),
        ("2027-02-03T04:05+03:00", datetime(2027, 2, 3, 4, 5, tzinfo=EAST)),
    ],
)
def test_a_zone_that_is_given_counts(text: str, expected: datetime) -> None:
    assert parse_due(text, datetime(2027, 1, 30, 22, 15, tzinfo=EAST), "--at") == expected


@pytest.mark.parametrize(
    "text", ["", "+", "2h", "+2x", "+h", "evening", "25:00", "6", "2027-13-01T00:00", "+9999d" * 2]
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(InputError, match=r"^--at .* is not a time"):
        parse_due(text, EVENING, "--at")


@pytest.mark.parametrize("text", ["+0s", "2020-01-01T06:00", "2027-01-30T22:15"])
def test_what_is_past(text: str) -> None:
    with pytest.raises(InputError, match="in the past"):
        parse_due(text, EVENING, "--at")
