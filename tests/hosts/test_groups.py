"""A group on each of two hosts, one queue, one bucket: a cable is pulled, and the other host does what was lost."""

import json
import logging
import time
from collections import Counter

import pytest

from svdq.producer.queue import fetch
from svdq.producer.status.registries import view_workers
from svdq.producer.storage.storage import MARKER, Storage
from svdq.worker.checkpoint.store import SUFFIX
from tests.hosts.conftest import Lan
from tests.waiting import wait_until
from tests.worker.test_recovery import leftovers

pytestmark = pytest.mark.long

SIMULATED = "simulated:step_ms=50"
OPTIONS = ("--device", "cpu", "--checkpoints", "storage")
STEPS = 200


def published(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """How often each sidecar was put into the bucket, as the S3 server saw it."""
    lines = [record.getMessage() for record in caplog.records if '"PUT ' in record.getMessage()]
    return Counter(line.partition("photo-")[2].partition(".json")[0] for line in lines if ".json " in line)


def in_flight(lan: Lan, host_name: str) -> list[str]:
    """Jobs that the group of a host has begun."""
    begun = []
    for job_id in map(bytes.decode, lan.house.connection.zrange("rq:wip:svdq-default", 0, -1)):
        job = fetch(lan.house.connection, job_id.partition(":")[0])
        if f"svdq-{host_name}-" in (job.worker_name or ""):
            begun.append(job.id)
    return begun


def check(lan: Lan, jobs: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """All jobs have finished, once, with one result and one video each, and nothing else is left."""
    connection, storage = lan.house.connection, Storage(lan.house.settings.storage)
    assert lan.house.states(jobs) == ["finished"] * len(jobs)
    assert [len(fetch(connection, job_id).results()) for job_id in jobs] == [1] * len(jobs)
    assert {connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in jobs} == {b"3"}
    assert published(caplog) == dict.fromkeys(jobs, 1)
    files = {f"outputs/photo-{job_id}.{kind}" for job_id in jobs for kind in ("gif", "json")}
    assert {entry.key for entry in storage.entries("outputs")} == files


def hosts_of(lan: Lan, jobs: list[str]) -> dict[str, str]:
    """The host that has made each video."""
    storage = Storage(lan.house.settings.storage)
    return {job_id: json.loads(storage.read(f"outputs/photo-{job_id}.json"))["group"]["host"] for job_id in jobs}


def is_half_done(lan: Lan, jobs: list[str]) -> bool:
    """Whether there is a checkpoint of one of these, from before its last step."""
    kept = [entry.key.split("/") for entry in Storage(lan.house.settings.storage).entries("checkpoints")]
    return any(job_id in jobs and name not in (MARKER, f"{STEPS}{SUFFIX}") for _, job_id, name in kept)


def test_a_host_whose_cable_is_pulled_is_stood_in_for(lan: Lan, caplog: pytest.LogCaptureFixture) -> None:
    house = lan.house
    caplog.set_level(logging.INFO, "werkzeug")
    # Before there is a worker: on a busy machine, two hosts render faster than one process submits.
    jobs = [house.submit(steps=STEPS) for _ in range(10)]
    alpha = lan.start(lan.alpha, "svdq", "worker", "--ranks", 2, *OPTIONS, SVDQ_MODEL=SIMULATED)
    beta = lan.start(lan.beta, "svdq", "worker", "--ranks", 2, *OPTIONS, SVDQ_MODEL=SIMULATED)
    alpha.said("Ready with")
    beta.said("Ready with")
    wait_until(lambda: {worker.hostname for worker in view_workers(house.connection)} == {"alpha", "beta"})
    wait_until(lambda: len(in_flight(lan, "beta")) >= 2 and is_half_done(lan, in_flight(lan, "beta")), lan.all_text)

    lan.beta.pull_cable()
    pulled_at, lost = time.monotonic(), in_flight(lan, "beta")
    kept = is_half_done(lan, lost)  # but for the one that was, should it have ended at the last moment
    wait_until(lambda: not in_flight(lan, "beta"), lan.all_text)
    print(f"taken over after {time.monotonic() - pulled_at:.1f} s")
    house.wait(jobs)
    assert "Took back" in alpha.text
    assert set(hosts_of(lan, lost).values()) == {"alpha"}
    assert ("continues from step" in alpha.text) == kept, "what beta had kept in the bucket was of use on alpha"
    check(lan, jobs, caplog)

    lan.beta.plug_in()
    beta.said("Redis is back.")
    for job_id in lost:
        beta.said(f"Job {job_id} was canceled or taken over; this group drops it")
    wait_until(lambda: len(view_workers(house.connection)) == 2, lan.all_text)
    later = [house.submit(steps=STEPS) for _ in range(6)]
    house.wait(later)
    assert set(hosts_of(lan, later).values()) == {"alpha", "beta"}
    wait_until(lambda: "dropped" in beta.text, lan.all_text)

    for group in (alpha, beta):
        group.process.terminate()
        assert group.end() == 0, lan.all_text()
    check(lan, [*jobs, *later], caplog)
    assert leftovers(house.connection) == []
