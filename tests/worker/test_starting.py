"""A worker that starts is said to, at once, and counts as one."""

import pytest

from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.producer import keys
from svdq.producer.status.registries import read_workers
from svdq.producer.submitting.model_choice import expected_model
from svdq.producer.submitting.parameters import ExpectedModel
from svdq.producer.together import ask_one
from svdq.worker.launcher.launcher import starting_record


def test_a_record_lasts_until_the_groups_are_ready(site, until) -> None:
    ready = []
    with starting_record(site.settings, ResolvedModel(name="preview"), lambda: bool(ready)):
        until(lambda: ask_one(site.connection, read_workers())[1] == "starting")
        assert 0 < site.connection.ttl(keys.STARTING) <= keys.STARTING_TTL_S
        ready.append(True)
        until(lambda: ask_one(site.connection, read_workers())[1] == "none")
    with starting_record(site.settings, ResolvedModel(name="preview"), lambda: False):
        until(lambda: ask_one(site.connection, read_workers())[1] == "starting")
    assert ask_one(site.connection, read_workers())[1] == "none"


def test_the_record_of_a_killed_launcher_expires(site) -> None:
    now, _ = site.connection.time()
    site.connection.zadd(keys.STARTING, {"host:1": now - 1})
    assert ask_one(site.connection, read_workers())[1] == "none"


def test_the_model_that_a_worker_loads_decides_what_photos_are_for(site, until) -> None:
    loading = ResolvedModel(name="Wan-AI/Wan2.2-I2V-A14B-Diffusers", family="wan")
    with starting_record(site.settings, loading, lambda: False):
        model = ExpectedModel(name=loading.name, family="wan", is_configured=False)
        until(lambda: expected_model(site.settings) == model)
    assert expected_model(site.settings) is None


@pytest.mark.long
def test_wait_knows_that_a_worker_is_starting(site, until) -> None:
    job = site.submit()
    group = site.start(2, "--burst", wait=False)
    until(lambda: "Starting 2 ranks on the processors with the model preview" in group.text, lambda: group.text)
    assert "Ready" not in group.text
    until(lambda: ask_one(site.connection, read_workers())[1] == "starting", lambda: group.text)
    done = site.run("svdq", "wait", job)
    assert done.returncode == 0
    assert "No worker is running" not in done.stdout + done.stderr
    assert group.end() == 0
    assert not site.connection.exists(keys.STARTING)
