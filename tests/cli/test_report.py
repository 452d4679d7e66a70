"""`svdq report`, over a real Redis and real sidecars."""

import json
from datetime import UTC, datetime, timedelta

import pytest
import redis
from rq.job import JobStatus
from rq.utils import utcformat

from svdq.producer import job_control
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from tests.conftest import Cli
from tests.finished import add_video
from tests.queued import add, fail, finish

NOW = datetime.now(UTC)


def test_a_report_counts_what_ended_in_a_period(svdq: Cli, connection: redis.Redis, settings: Settings) -> None:
    storage = Storage(settings.storage)
    group = {"ranks": 2, "host": "box", "pid": 1}
    hour = timedelta(hours=1)
    for number in (1, 2):  # Redis has forgotten the first
        add_video(
            storage,
            number,
            finished_at=NOW - number * hour,
            seconds={"encode": 60.0, "denoise": 3000.0, "decode": 540.0, "write": 0.0},
            group=group,
        )
    finish(add(connection, 2), at=(NOW - 2 * hour).timestamp())
    add_video(storage, 3, finished_at=NOW - 30 * hour)
    fail(add(connection, 4, name="black <b>"), at=(NOW - 3 * hour).timestamp())
    fail(add(connection, 5), "", at=(NOW - 3 * hour).timestamp(), status=JobStatus.STOPPED)
    fail(add(connection, 6), "Long ago.", at=(NOW - 30 * hour).timestamp())
    add(connection, 7)
    job_control.cancel(connection, add(connection, 8).id)
    long_ago = add(connection, 9)
    job_control.cancel(connection, long_ago.id)
    connection.hset(long_ago.key, "ended_at", utcformat(NOW - 30 * hour))

    done = svdq("report", "--since", "12h", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert {name: found[name] for name in ("finished", "failed", "stopped", "canceled", "ending")} == {
        "finished": 2,
        "failed": 1,
        "stopped": 1,
        "canceled": 1,
        "ending": None,
    }
    assert found["left"] == {"queued": 1, "started": 0, "scheduled": 0, "deferred": 0}
    # From the beginning of the first, three hours ago, to the end of the last, one hour ago.
    assert found["videos_per_hour"] == pytest.approx(1.0, abs=0.01)
    ends = {job["id"][-1]: (job["status"], job["error"]) for job in found["jobs"]}
    assert ends == {
        "1": ("finished", None),
        "2": ("finished", None),
        "4": ("failed", "The frames are black."),
        "5": ("stopped", None),
        "8": ("canceled", None),
    }

    done = svdq("report", "--since", "150m", "--until", "90m")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("1 finished, 0 failed, 0 stopped, 0 canceled, from ")
    done = svdq("report")
    assert "Failed, 1 x: The frames are black. black <b> (00000000000000000004)" in done.stdout
