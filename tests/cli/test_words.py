"""How times, troubles and expectations read."""

from datetime import datetime, timedelta

from svdq.cli.words import clock, expected, trouble_reason
from svdq.producer.status.estimates import Estimate
from svdq.producer.status.ranks import Trouble

NOW = datetime(2027, 1, 30, 22, 15).astimezone()


def test_times_of_another_day_have_their_date() -> None:
    assert clock(NOW.timestamp(), NOW) == "22:15"
    assert clock((NOW - timedelta(days=1)).timestamp(), NOW) == "2027-01-29 22:15"


def test_what_is_expected_of_a_job() -> None:
    trouble = Trouble(effect="Videos wait", reason="No space left.", since=datetime.now().timestamp(), attempts=1)
    assert trouble_reason(trouble).startswith("No space left. (since ")
    assert trouble_reason(trouble).endswith(", tried once)")
    assert expected(Estimate(trouble=trouble, eta_s=5.0)) == f", waiting for storage: {trouble_reason(trouble)}"
    assert expected(Estimate(num_ahead=0)) == ", next"
    assert expected(Estimate(num_ahead=3, eta_s=150.0)) == ", 3 ahead of it, done in about 2 min"
    assert expected(Estimate()) == ""
