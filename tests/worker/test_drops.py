"""A link to Redis that drops while jobs are in flight: it is said once, and once when it is back."""

import logging

import pytest

from svdq.worker import outages
from svdq.worker.intake import source as intake_module
from svdq.worker.outages import connect
from svdq.worker.queue import rq_worker
from tests.proxy import Proxy
from tests.worker.jobs import leases
from tests.worker.test_intake import finished, take

SAID = "Redis does not answer"


@pytest.mark.parametrize("kind", ["cut", "silent"])
def test_a_drop_is_said_once_and_its_end_once(site, open_intake, until, monkeypatch, caplog, kind: str) -> None:
    monkeypatch.setattr(intake_module, "BEAT_S", 0.2)
    caplog.set_level(logging.INFO)
    job_id = site.submit()
    with Proxy(site.settings.redis_url) as proxy:
        intake = open_intake(connect(proxy.url, 0.5, 1), lease_connection=connect(proxy.url, 0.5, 1))
        request = take(intake)
        fault = getattr(proxy, kind)
        fault.set()
        until(lambda: SAID in caplog.text)
        intake.ended(finished(request))
        assert site.view(job_id).status == "started"
        fault.clear()
        until(lambda: "Redis is back" in caplog.text)
        until(lambda: site.view(job_id).status == "finished")
        assert (caplog.text.count(SAID), caplog.text.count("Redis is back")) == (1, 1)
        assert not [record for record in caplog.records if record.name.startswith("rq.") and record.levelno > 20]


def test_a_drop_is_noticed_within_fifteen_seconds() -> None:
    """A beat may have just passed, and its connection is tried once more, anew."""
    longest_s = rq_worker.BEAT_S + outages.LEASE_TIMEOUT_S * (1 + outages.NUM_LEASE_RETRIES)
    assert longest_s < 15


def test_a_lost_job_is_one_line(site, open_intake, until, monkeypatch, caplog) -> None:
    monkeypatch.setattr(intake_module, "BEAT_S", 0.1)
    caplog.set_level(logging.INFO)
    job_id, other = site.submit(), site.submit()
    intake = open_intake()
    request, following = take(intake), take(intake)
    (lost,) = (entry for entry in leases(site.connection) if entry.startswith(job_id))
    site.connection.zrem("rq:wip:svdq-default", lost)
    until(lambda: "taken over" in caplog.text)
    intake.ended(finished(request))
    intake.ended(finished(following))
    until(lambda: site.view(other).status == "finished")
    assert caplog.text.count("taken over") == 1
