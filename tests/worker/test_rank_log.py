"""`--log-format json`: an object a line from launcher and ranks, without passwords."""

import json
import logging
import re
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest

from svdq.producer.settings_loader import load_settings
from svdq.worker.health.rank_log import JobLogHandler, JsonFormatter
from tests.waiting import wait_until
from tests.worker.conftest import Site
from tests.worker.own_redis import OwnRedis

JOB_ID, OTHER = "0123456789abcdef0123", "f" * 20
SECRET = "s3cret-Of-The-Tests"


def record(message: str, *arguments: object, error: Exception | None = None) -> logging.LogRecord:
    cause = (type(error), error, None) if error is not None else None
    return logging.LogRecord("svdq.test", logging.WARNING, __file__, 1, message, arguments, cause)


def test_a_line_says_who_when_and_about_which_job() -> None:
    formatter = JsonFormatter(rank=3, group="1", job_ids=JobLogHandler(3).job_ids)
    line = json.loads(formatter.format(record("Job %s failed: ünwell.", JOB_ID)))
    moment = datetime.fromisoformat(line.pop("time"))
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 60
    assert line.pop("host")
    assert line == {
        "level": "WARNING",
        "rank": 3,
        "group": "1",
        "logger": "svdq.test",
        "job_id": JOB_ID,
        "message": f"Job {JOB_ID} failed: ünwell.",
    }
    several = json.loads(formatter.format(record("Took back %s, %s.", JOB_ID, OTHER)))
    assert (several.get("job_id"), several["job_ids"]) == (None, [JOB_ID, OTHER])
    assert "job_id" not in json.loads(formatter.format(record("Ready.")))


def test_a_line_of_the_step_loop_belongs_to_its_job() -> None:
    handler = JobLogHandler(0)
    handler.current_job = lambda: JOB_ID
    formatter = JsonFormatter(rank=0, group="0", job_ids=handler.job_ids)
    assert json.loads(formatter.format(record("A library's.")))["job_id"] == JOB_ID


@pytest.mark.parametrize(
    "text",
    [
        f"Redis redis://user:{SECRET}@host:6379/0 does not answer",
        f"'redis://:{SECRET}@host' and s3://key:{SECRET}@bucket/a?token={SECRET}, too",
        f"https://host/video.mp4?signature={SECRET}",
    ],
)
def test_passwords_are_masked(text: str) -> None:
    line = JsonFormatter().format(record(text, error=ValueError(text)))
    assert SECRET not in line
    assert "host" in json.loads(line)["message"]


@pytest.mark.long
def test_a_live_group_logs_json(site: Site, tmp_path: Path) -> None:
    """Also when a rank is killed and Redis goes away; `test_metrics` has a group to which nothing happens."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = OwnRedis(folder, "--requirepass", SECRET)
    url = server.url(f":{SECRET}")
    site.connection.close()
    site.connection = server.client(url)
    site.settings = load_settings(home=site.settings.home, redis_url=url)
    try:
        group = site.start(
            2, "--log-format", "json", "--metrics-port", "0", model="simulated:step_ms=30", SVDQ_REDIS_URL=url
        )
        first = site.submit(steps=6)
        site.wait([first])
        second = site.submit(steps=60)
        wait_until(lambda: site.view(second).status == "started")
        group.ranks()[1].kill()
        assert [view.status for view in site.wait([second])] == ["finished"]
        server.stop()
        wait_until(lambda: "does not answer" in group.text, lambda: group.text)
        server.start()
        wait_until(lambda: "is back" in group.text, lambda: group.text)
        group.send_signal(signal.SIGTERM)
        assert group.end() == 0
    finally:
        server.stop()
    lines = [json.loads(line) for line in group.text.splitlines() if line.startswith("{")]
    assert all({"time", "level", "host", "rank", "group", "logger", "message"} <= set(line) for line in lines)
    ready = [line for line in lines if line["message"].startswith("Ready with")]
    assert [(line["rank"], line["group"], line["logger"]) for line in ready] == [(0, "0", "svdq.worker")] * 2
    for job_id in (first, second):
        (ended,) = [line for line in lines if re.match(f"Job {job_id} finished", line["message"])]
        assert (ended["rank"], ended["group"], ended["job_id"]) == (0, "0", job_id)
    by = {line["logger"] for line in lines}
    assert "svdq.worker.launcher.metrics" in by
    assert SECRET not in group.text


def test_an_error_of_the_launcher_is_a_line_as_well(site: Site) -> None:
    done = site.run(
        "svdq", "worker", "--burst", "--log-format", "json", "--redis-url", f"redis://:{SECRET}@127.0.0.1:1/0"
    )
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, line["level"], line["rank"], line["group"]) == (3, "CRITICAL", None, None)
    assert line["message"].startswith("The Redis server redis://127.0.0.1:1 cannot be used")
    assert SECRET not in done.stderr
