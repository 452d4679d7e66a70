"""Times and durations as people write them, and foreign text without its control characters."""

import time
import unicodedata
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from svdq.pipeline.errors import InputError
from svdq.producer.text import duration, parse_duration, parse_future, parse_past, printable

EAST = timezone(timedelta(hours=3))
EVENING = datetime(2027, 1, 30, 22, 15).astimezone()
MORNING = datetime(2027, 1, 31, 8, 15).astimezone()


@given(st.text(st.characters()))  # surrogates included
def test_no_text_controls_a_terminal(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c")
    assert printable(shown) == shown
    assert len(shown.splitlines()) <= 1
    shown.encode()


@pytest.mark.parametrize("text", ["Straße 5.jpg", "日本語", "a\u00a0b", "👩\u200d👧", "back\\slash"])
def test_plain_text_stays(text: str) -> None:
    assert printable(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b2J", r"\x9b2J"),
        ("a\nb\tc\x7f", r"a\nb\tc\x7f"),
        ("gpj\u202egpj.exe", r"gpj\u202egpj.exe"),
        ("\udcff", r"\udcff"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_the_rest_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


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
        ("1d12h", datetime(2027, 1, 29, 20, 15)),
    ],
)
def test_past_times(text: str, expected: datetime) -> None:
    assert parse_past(text, "--since", MORNING) == expected.astimezone()


def test_a_zone_that_is_given_counts() -> None:
    east = timezone(timedelta(hours=3))
    now = datetime(2027, 1, 31, 8, 15, tzinfo=east)
    assert parse_past("09:00+03:00", "--since", now) == datetime(2027, 1, 30, 9, tzinfo=east)
    assert parse_past("2027-01-30T06:00:00Z", "--since", now) == datetime(2027, 1, 30, 9, tzinfo=east)


@pytest.mark.parametrize("text", ["", "yesterday", "25:00", "12", "h", "2027-13-01", "99999999999999d", "-3h", "3 h"])
def test_invalid_past_times(text: str) -> None:
    with pytest.raises(InputError, match=r"^--since '.*' is not a (time|duration); write it as "):
        parse_past(text, "--since", MORNING)


def test_future_times_are_refused() -> None:
    with pytest.raises(InputError, match="is in the future"):
        parse_past("2027-02-01", "--since", MORNING)


def test_durations_are_parsed() -> None:
    assert parse_duration("30d", "--older-than") == timedelta(days=30)
    assert parse_duration("90m", "--older-than") == timedelta(minutes=90)
    assert parse_duration("1.5h", "--older-than") == timedelta(minutes=90)
    assert parse_duration("200ms", "--stable-for") == timedelta(milliseconds=200)
    for text in ("", "30", "d", ".5h", "30 days", "-1d", "999999999w", "100001w", "9999999d"):
        with pytest.raises(InputError, match=r"^--older-than '.*' is not a duration"):
            parse_duration(text, "--older-than")


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
def test_future_local_times(text: str, expected: datetime) -> None:
    assert parse_future(text, "--at", EVENING) == expected.astimezone()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("06:00+03:00", datetime(2027, 1, 31, 6, tzinfo=EAST)),
        ("2027-02-03T04:05+03:00", datetime(2027, 2, 3, 4, 5, tzinfo=EAST)),
    ],
)
def test_the_zone_of_a_future_time_counts(text: str, expected: datetime) -> None:
    assert parse_future(text, "--at", datetime(2027, 1, 30, 22, 15, tzinfo=EAST)) == expected


@pytest.mark.parametrize(
    "text", ["", "+", "2h", "+2x", "+h", "evening", "25:00", "6", "2027-13-01T00:00", "+9999d" * 2]
)
def test_invalid_future_times(text: str) -> None:
    with pytest.raises(InputError, match=r"^--at .* is not a time"):
        parse_future(text, "--at", EVENING)


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("text", ["+0s", "2020-01-01T06:00", "2027-01-30T22:15"])
def test_past_times_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="in the past"):
        parse_future(text, "--at", EVENING)


@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        ("2026-03-28T21:00Z", "06:00", "2026-03-29T06:00+02:00"),  # the clock goes from 2:00 to 3:00
        ("2026-10-24T20:00Z", "02:30", "2026-10-25T02:30+02:00"),  # and back from 3:00 to 2:00
        ("2026-10-25T01:10Z", "06:00", "2026-10-25T06:00+01:00"),
        ("2026-03-28T21:00Z", "02:30", "2026-03-29T03:30+02:00"),  # which does not exist
        ("2026-03-28T21:00Z", "2027-03-28T02:30", "2027-03-28T03:30+02:00"),
        ("2026-03-29T01:10Z", "02:30", "2026-03-30T02:30+02:00"),  # at 3:10, after the hour that is left out
        ("2026-10-25T00:10Z", "02:30", "2026-10-25T02:30+02:00"),  # at 2:10 of the first one
        ("2026-10-25T00:40Z", "02:30", "2026-10-25T02:30+01:00"),
        ("2026-10-25T01:10Z", "02:30", "2026-10-25T02:30+01:00"),  # at 2:10 of the second one
        ("2026-10-25T01:10Z", "2026-10-25T02:30", "2026-10-25T02:30+01:00"),
        ("2026-10-25T01:40Z", "02:30", "2026-10-26T02:30+01:00"),
        ("2026-10-25T00:10Z", "02:30+02:00", "2026-10-25T02:30+02:00"),
    ],
)
def test_times_across_a_clock_change(in_berlin: None, now: str, text: str, expected: str) -> None:
    found = parse_future(text, "--until", datetime.fromisoformat(now).astimezone())
    assert found == datetime.fromisoformat(expected)


@pytest.mark.parametrize(
    ("now", "text", "expected"),
    [
        ("2026-10-25T00:40Z", "02:30", "2026-10-25T02:30+02:00"),
        ("2026-10-25T01:10Z", "02:30", "2026-10-25T02:30+02:00"),  # at 2:10 of the second one
        ("2026-10-25T01:40Z", "02:30", "2026-10-25T02:30+01:00"),
        ("2026-10-25T05:00Z", "2026-10-25T02:30", "2026-10-25T02:30+02:00"),
        ("2026-03-29T01:10Z", "02:30", "2026-03-29T01:30+01:00"),  # at 3:10, 40 minutes ago
        ("2026-03-29T01:10Z", "2026-03-29T02:30", "2026-03-29T01:30+01:00"),
        ("2026-03-29T00:50Z", "02:30", "2026-03-28T02:30+01:00"),
    ],
)
def test_past_times_across_a_clock_change(in_berlin: None, now: str, text: str, expected: str) -> None:
    found = parse_past(text, "--since", datetime.fromisoformat(now).astimezone())
    assert found == datetime.fromisoformat(expected)


def test_times_that_overflow_in_some_time_zones() -> None:
    with pytest.raises(InputError, match="before the year 9000"):
        parse_future("9999-12-31T23:59-12:00", "--at", EVENING)
    assert parse_past("0001-01-01T00:00+14:00", "--since", MORNING).timestamp() == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "1 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (3600, "60 min"),
        (5400, "1 h 30 min"),
        (7200, "2 h"),
        (7230, "2 h"),
        (200_000, "55 h"),
    ],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration(seconds) == text
