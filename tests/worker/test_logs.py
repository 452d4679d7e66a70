"""`--log-format json`: an object a line from launcher, ranks and whatever else writes to stderr, without passwords."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from svdq.worker.health.logging import GAP, LINE_BYTES, JobLogHandler, JsonFormatter, to_json_line
from tests.waiting import wait_until
from tests.worker.conftest import House
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


def test_what_the_step_loop_logs_is_about_its_job() -> None:
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
    for line in (JsonFormatter().format(record(text, error=ValueError(text))), to_json_line(text)):
        assert SECRET not in line
        assert "host" in json.loads(line)["message"]


def test_a_line_is_never_longer_than_a_pipe_takes_in_one_piece() -> None:
    for text in ("a" * 100_000, "ü\n" * 9000, "\x00" * 5000, "b" * (LINE_BYTES - 150)):
        line = JsonFormatter(job_ids=lambda _: [JOB_ID]).format(record(text, error=ValueError(text + "last")))
        assert len(line.encode()) < LINE_BYTES
        found = json.loads(line)
        assert found["exception"].startswith("ValueError: ")
        assert found["exception"].endswith("last")
        assert GAP in found["exception"]


@pytest.mark.parametrize("line_bytes", [LINE_BYTES, 512])
def test_a_line_about_many_jobs_is_cut_as_well(monkeypatch: pytest.MonkeyPatch, line_bytes: int) -> None:
    """Where POSIX' 512 bytes are the limit, 50 ids did not fit, and the formatter never returned."""
    monkeypatch.setattr(f"{JsonFormatter.__module__}.LINE_BYTES", line_bytes)
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 64)
    job_ids = [f"{number:020x}" for number in range(2000)]
    line = JsonFormatter(rank=511, group="511", job_ids=lambda _: job_ids).format(record(", ".join(job_ids)))
    assert len(line) < line_bytes
    assert json.loads(line)["job_ids"] == job_ids[:8]


@pytest.mark.parametrize(
    ("text", "level", "logger"),
    [
        ("W1121 10:00:00.123456 42 torch/distributed/run.py:774] a master port", "WARNING", "torchrun"),
        ("E1121 10:00:00.123456 42 elastic.py:882] failed (exitcode: -9)", "ERROR", "torchrun"),
        ("Segmentation fault", "INFO", "stderr"),
        ('{"time": "cut in t', "INFO", "stderr"),
        ('{"a": "JSON of somebody else"}', "INFO", "stderr"),
    ],
)
def test_what_is_no_json_is_put_into_it(text: str, level: str, logger: str) -> None:
    line = json.loads(to_json_line(text))
    assert (line["level"], line["logger"], line["rank"]) == (level, logger, None)
    assert line["message"] in text
    again = JsonFormatter(rank=1, group="0").format(record("x"))
    assert to_json_line(again) == again


def test_all_that_a_process_and_its_children_write_becomes_json() -> None:
    code = (
        "import logging, os, subprocess, sys\n"
        "from svdq.worker.health.logging import json_stderr\n"
        "with json_stderr():\n"
        "    logging.getLogger('svdq.test').error('ours')\n"
        "    os.write(2, b'raw \\xff\\n\\n')\n"
        "    subprocess.run([sys.executable, '-c', 'import os; os.write(2, b\"child\\\\n\")'])\n"
        "sys.stderr.write('after\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=os.environ)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stderr.decode().splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["ours", "raw �", "child"]
    assert last == "after"


@pytest.mark.long
def test_every_line_of_a_live_group_is_json(house: House, tmp_path: Path) -> None:
    """Also when a rank is killed and Redis goes away; `test_metrics` has a group to which nothing happens."""
    folder = tmp_path / "redis"
    folder.mkdir()
    server = OwnRedis(folder, "--requirepass", SECRET)
    url = server.url(f":{SECRET}")
    house.connection.close()
    house.connection = server.client(url)
    house.settings = type(house.settings).load(home=house.settings.home, redis_url=url)
    try:
        group = house.start(
            2, "--log-format", "json", "--metrics-port", "0", model="simulated:step_ms=30", SVDQ_REDIS_URL=url
        )
        first = house.submit(steps=6)
        house.wait([first])
        second = house.submit(steps=60)
        wait_until(lambda: house.view(second).status == "started")
        group.ranks()[1].kill()
        assert [view.status for view in house.wait([second])] == ["finished"]
        server.stop()
        wait_until(lambda: "does not answer" in group.text, lambda: group.text)
        server.start()
        wait_until(lambda: "is back" in group.text, lambda: group.text)
        group.send_signal(signal.SIGTERM)
        assert group.end() == 0
    finally:
        server.stop()
    lines = [json.loads(line) for line in group.text.splitlines()]
    assert all({"time", "level", "host", "rank", "group", "logger", "message"} <= set(line) for line in lines)
    ready = [line for line in lines if line["message"].startswith("Ready with")]
    assert [(line["rank"], line["group"], line["logger"]) for line in ready] == [(0, "0", "svdq.worker")] * 2
    for job_id in (first, second):
        (ended,) = [line for line in lines if re.match(f"Job {job_id} finished", line["message"])]
        assert (ended["rank"], ended["group"], ended["job_id"]) == (0, "0", job_id)
    by = {line["logger"] for line in lines}
    assert {"svdq.worker.launcher.metrics", "torchrun"} <= by
    assert SECRET not in group.text


def test_an_error_of_the_launcher_is_a_line_as_well(house: House) -> None:
    done = house.run("svdq", "worker", "--log-format", "json", "--redis-url", f"redis://:{SECRET}@127.0.0.1:1/0")
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, line["level"], line["rank"], line["group"]) == (3, "CRITICAL", None, None)
    assert line["message"].startswith("The Redis server redis://:***@127.0.0.1:1/0 cannot be used")
    assert SECRET not in done.stderr
