"""Pages of jobs, beyond the number of ids that is read at first."""

import pytest
import redis

from svdq.producer.status import selection
from svdq.producer.status.selection import place_of, read_page
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.queued import JOB, enqueue


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("window", [2, 3, 1000])
def test_pages_have_every_job_once(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, window: int, newest_first: bool
) -> None:
    monkeypatch.setattr(selection, "WINDOW", window)
    made = [f"job-{number}" for number in range(10)]
    for number, job_id in enumerate(made):
        enqueue(connection, JOB, job_id, ("high", "default", "low")[number % 3])
    found: list[str] = []
    after, has_more = None, True
    while has_more:
        views, has_more, end = read_page(connection, 3, after, newest_first=newest_first)
        found += [view.id for view in views]
        after = place_of(connection, found[-1])
        assert end == after
    assert found == (made[::-1] if newest_first else made)


@pytest.mark.parametrize("window", [2, 1000])
def test_pages_of_an_owner_look_behind_the_jobs_of_others(
    connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(selection, "WINDOW", window)
    for number in range(10):
        enqueue_many(
            connection, [Entry(job=JOB, job_id=f"job-{number}", owner="ana" if number in (0, 1, 4) else "ben")]
        )
    views, has_more, end = read_page(connection, 2, owners=("ana", ""))
    assert ([view.id for view in views], has_more) == (["job-4", "job-1"], True)
    views, has_more, _ = read_page(connection, 2, end, owners=("ana", ""))
    assert ([view.id for view in views], has_more) == (["job-0"], False)


def test_there_is_nothing(connection: redis.Redis) -> None:
    assert read_page(connection, 3) == ([], False, None)
    assert place_of(connection, "none") is None
