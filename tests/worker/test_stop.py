"""Stops at inconvenient moments: they come in time, and jobs go back to their queue."""

import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from svdq.producer.status.ranks import read_groups
from svdq.worker.launcher.launcher import STOP_S
from tests.proxy import Proxy


@pytest.mark.slow
@pytest.mark.long
def test_a_group_stops_although_a_photo_never_comes(site, s3: str, s3_server: str, until) -> None:
    with Proxy(s3_server) as proxy:
        group = site.start(1, SVDQ_STORAGE=s3, AWS_ENDPOINT_URL=proxy.url)
        proxy.silent.set()
        site.settings = site.settings.model_copy(update={"storage": s3})
        job = site.submit()
        until(lambda: site.view(job).status == "started", lambda: group.text)
        group.send_signal(signal.SIGTERM)
        assert group.end() == 0, group.text
        proxy.shutdown()
    assert "1 job went back to the queue" in group.text
    assert "credentials" not in group.text, "where they are is said by the library of S3, for each connection"
    assert site.queued() == [job]


@pytest.mark.long
@pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="nohup runs the tests")
def test_a_terminal_that_closes_stops_the_run_in_order(site, until, tmp_path: Path) -> None:
    group = site.start(1, "--report", tmp_path / "night.json", model="simulated:step_ms=50")
    job = site.submit(steps=900)
    until(lambda: site.view(job).status == "started", lambda: group.text)
    group.send_signal(signal.SIGHUP)
    assert group.end() == 0, group.text
    assert json.loads((tmp_path / "night.json").read_text())["ending"] == "It was stopped by a signal."
    assert site.queued() == [job]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_draining_puts_jobs_back(site, until, number: signal.Signals) -> None:
    """Rank 0 has nothing more to do and waits for the reports of jobs that later ranks still have."""
    group = site.start(2, model="simulated:step_ms=50")
    job = site.submit(steps=900)

    def is_past_rank_0() -> bool:
        ranks = [rank for found in read_groups(site.connection) for rank in found.ranks]
        return any(rank.rank > 0 and rank.job_id == job for rank in ranks)

    until(is_past_rank_0, lambda: group.text)
    group.send_signal(signal.SIGINT)
    until(lambda: "Taking no more jobs" in group.text, lambda: group.text)
    time.sleep(2)  # rank 0 closes its link to rank 1
    started = time.monotonic()
    group.send_signal(number)
    assert group.end() == 0, group.text
    assert site.view(job).status == "queued", group.text
    assert site.queued() == [job]
    assert "1 job went back to the queue" in group.text
    if number == signal.SIGTERM:  # after a second Ctrl-C the launcher kills them so soon that a busy machine is late
        assert time.monotonic() - started < STOP_S, "the launcher would have killed the ranks"


@pytest.mark.slow
def test_a_stop_of_every_process_at_once_is_a_stop(site, until) -> None:
    """As Slurm and some supervisors do it; torchrun killed its ranks, with a traceback."""
    group = site.start(2, model="simulated:step_ms=20")
    job = site.submit(steps=900)
    until(lambda: site.view(job).step > 2, lambda: group.text)
    for process in group.family():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    assert group.end() == 0, group.text
    assert "Traceback" not in group.text
    assert "1 job went back to the queue" in group.text
    assert site.queued() == [job]


@pytest.mark.long
def test_a_run_that_is_stopped_leaves_its_trace(site, tmp_path: Path) -> None:
    """As --until does; the trace was empty."""
    trace = tmp_path / "trace.json"
    group = site.start(1, model="simulated:step_ms=5", SVDQ_TRACE=str(trace))
    site.wait([job := site.submit(steps=4)])
    group.send_signal(signal.SIGTERM)
    assert group.end() == 0
    named = {
        event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("args") == {"job": job}
    }
    assert named == {"encode", "steps 0-3", "decode", "write"}
