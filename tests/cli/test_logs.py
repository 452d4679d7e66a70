"""`svdq logs`, as a user runs it."""

import json
import signal
from pathlib import Path

import pytest
import redis

from svdq.producer.job_log import LogEntry, append_log
from tests.conftest import Cli
from tests.forks import Piped
from tests.queued import add, finish
from tests.worker.own_redis import OwnRedis

AT = 1800014400.0  # 2027-01-15 in every time zone


def log(connection: redis.Redis, job_id: str, text: str, level: str = "INFO") -> None:
    entry = LogEntry.now(rank=2, host="here", level=level, text=text, at=AT)
    with connection.pipeline() as pipeline:
        append_log(pipeline, job_id, [entry])
        pipeline.execute()


def test_logs(svdq: Cli, connection: redis.Redis) -> None:
    job = add(connection, 1)
    nothing = svdq("logs", job.id)
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert "No worker has logged anything" in nothing.stderr
    log(connection, job.id, "Out of memory.", "WARNING")
    log(connection, job.id, "It broke:\nTraceback\n  File", "ERROR")
    first, second, *more = svdq("logs", job.id).stdout.splitlines()
    assert first.startswith("2027-01-15 ")
    assert first.endswith("  here rank 2  WARNING  Out of memory.")
    assert second.endswith("  ERROR  It broke:")
    assert more == ["    Traceback", "      File"]
    entries = [json.loads(line) for line in svdq("logs", job.id, "--json").stdout.splitlines()]
    assert [(entry["level"], entry["rank"]) for entry in entries] == [("WARNING", 2), ("ERROR", 2)]
    assert entries[1]["text"] == "It broke:\nTraceback\n  File"


@pytest.mark.slow
def test_logs_are_followed_until_the_job_has_ended(home, connection: redis.Redis) -> None:
    job = add(connection, 1)
    log(connection, job.id, "one")
    with Piped("logs", "--follow", job.id) as process:
        assert process.stdout.readline().endswith("INFO  one\n")
        log(connection, job.id, "two")
        assert process.stdout.readline().endswith("INFO  two\n")
        finish(job)
        log(connection, job.id, "finished")  # comes after the end, as it does
        assert process.stdout.read().endswith("INFO  finished\n")
        assert process.wait() == 0


@pytest.mark.slow
def test_logs_are_followed_across_a_restart_of_redis(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "own-redis"
    folder.mkdir()
    own = OwnRedis(folder)
    request.addfinalizer(own.stop)
    monkeypatch.setenv("SVDQ_REDIS_URL", own.url())
    connection = own.client(own.url())
    job = add(connection, 1)
    log(connection, job.id, "one")
    with Piped("logs", "--follow", job.id) as process:
        assert process.stdout.readline().endswith("INFO  one\n")
        for number in ("two", "three"):
            own.stop(signal.SIGKILL)
            assert "Redis has not answered since" in process.stderr.readline()
            own.start()
            own.client(own.url()).close()  # waits until it has loaded its data
            log(connection, job.id, number)
            assert process.stdout.readline().endswith(f"INFO  {number}\n")
        finish(job)
        assert (process.stdout.read(), process.stderr.read(), process.wait()) == ("", "", 0)
