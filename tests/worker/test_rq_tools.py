"""RQ's own tools at a live group: `rq info` and rq-dashboard show what is, and break nothing."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from svdq.producer import job_control
from svdq.producer.queue import RENDER, SvdqQueue, fetch

pytestmark = pytest.mark.long

SIMULATED = "simulated:step_ms=100"
#: Jobs of each state in the queue of `populate`.
COUNTS = {"queued": 2, "started": 1, "finished": 1, "failed": 1, "scheduled": 1, "deferred": 1, "canceled": 1}


def populate(site, until: Callable[..., object]) -> dict[str, str]:
    """Start a group and bring a job into each state; return their ids by state, the second queued one left out."""
    finished, failed = site.submit(), site.submit()
    site.connection.hset(f"rq:job:{failed}", "success_callback_name", "os.system")
    site.start(1, model=SIMULATED)
    site.wait([finished, failed])
    started = site.submit(steps=1000)
    until(lambda: site.view(started).step > 0)
    ids = {"finished": finished, "failed": failed, "started": started}
    parameters = fetch(site.connection, finished).kwargs
    ids["canceled"] = site.submit()
    job_control.cancel(site.connection, ids["canceled"])
    ids["queued"] = site.submit()
    site.submit()
    queue = SvdqQueue("svdq-default", connection=site.connection)
    later = datetime.now(UTC) + timedelta(hours=1)
    ids["scheduled"] = queue.enqueue_at(later, RENDER, kwargs=parameters).id
    ids["deferred"] = queue.enqueue(RENDER, kwargs=parameters, depends_on=started).id
    return ids


def url_of(site) -> str:
    return f"unix://{site.connection.connection_pool.connection_kwargs['path']}"


def get(url: str, data: bytes | None = None) -> str:
    with urllib.request.urlopen(url, data) as answer:
        return str(answer.read().decode())


@contextlib.contextmanager
def serving(log: Path, until: Callable[..., object], command: list[str], port_flag: str) -> Iterator[str]:
    """Run a tool's server on the loopback; give its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, port_flag, str(port)], stdout=output, stderr=subprocess.STDOUT)
    try:
        until(lambda: process.poll() is not None or listens(port), log.read_text)
        assert process.poll() is None, log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_rq_info_and_the_dashboard_show_a_live_group(site, until) -> None:
    ids = populate(site, until)

    shown = site.run("rq", "info", "--queue-class", "svdq.producer.queue.SvdqQueue", "--url", url_of(site))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(r"svdq-default \|.* 2, 1 executing, 1 finished, 1 failed", shown.stdout), shown.stdout
    assert re.search(r"busy svdq-high:.*, svdq-low\. jobs: 1 finished, 1 failed", shown.stdout), shown.stdout

    log = site.folder / "dashboard.log"
    program = Path(sys.executable).parent / "rq-dashboard"
    command = [str(program), "--json", "--bind", "127.0.0.1", "--redis-url", url_of(site)]
    with serving(log, until, command, "--port") as web:
        (queue,) = json.loads(get(f"{web}/0/data/queues.json"))["queues"]
        assert queue["name"] == "svdq-default"
        seen = {state: queue[f"{state}_job_registry_count"] for state in COUNTS if state != "queued"}
        assert {"queued": queue["count"], **seen} == COUNTS

        (worker,) = json.loads(get(f"{web}/0/data/workers.json"))["workers"]
        assert (worker["state"], worker["current_job"]) == ("busy", "idle")  # its list of executions stays empty
        # Before each of them that of jobs which name the model.
        assert worker["queues"][1::2] == ["svdq-high", "svdq-default", "svdq-low"]
        assert (worker["successful_job_count"], worker["failed_job_count"]) == (1, 1)

        for view in ("queues", "workers", "jobs"):
            assert "RQ-dashboard" in get(f"{web}/0/view/{view}")
        for state, job_id in ids.items():
            listed = json.loads(get(f"{web}/0/data/jobs/svdq-default/{state}/8/asc/1.json"))["jobs"]
            assert listed[0]["id"] == job_id
            assert len(listed) == COUNTS[state]
            assert job_id in get(f"{web}/0/view/job/{job_id}")
            if state == "deferred":
                continue  # rq-dashboard 0.9 fails on any job that depends on others
            job = json.loads(get(f"{web}/0/data/job/{job_id}.json"))
            assert job["status"] == state
            if state == "finished":
                assert job["result"]["outputs"] == list(site.view(job_id).outputs)
            elif state == "failed":
                assert job["exc_info"].startswith("Refused: Its callback 'os.system'")
            elif state == "started":
                assert json.loads(job["metadata"])["step"] > 0
        assert " ERROR " not in log.read_text()

        # Its buttons.
        job_control.cancel(site.connection, ids["started"])
        until(lambda: site.view(ids["started"]).status == "stopped")
        fetch(site.connection, ids["queued"]).delete()
        assert json.loads(get(f"{web}/job/{ids['started']}/requeue", b""))["status"] == "OK"
        assert json.loads(site.connection.hget(f"rq:job:{ids['started']}", "meta"))  # not pickle
        until(lambda: site.view(ids["started"]).status == "started")
        assert json.loads(get(f"{web}/job/{ids['finished']}/delete", b""))["status"] == "OK"
        assert not site.connection.exists(f"rq:job:{ids['finished']}")
        assert " ERROR " not in log.read_text()
