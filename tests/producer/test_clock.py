import time
from datetime import UTC, datetime, timedelta

import pytest

from svdq.producer.clock import SharedClock


@pytest.mark.parametrize(("ahead_s", "counted_s"), [(0.4, 0), (90, 90), (-3600, -3600)])
def test_it_is_the_clock_of_redis_and_not_of_this_host(ahead_s: float, counted_s: float) -> None:
    clock = SharedClock()
    clock.note(time.time() + ahead_s)
    assert abs(clock.now() - datetime.now(UTC) - timedelta(seconds=counted_s)) < timedelta(seconds=1)
