"""`svdq pause --free`: ranks end after their step until `svdq resume`; videos go on after the steps that they have."""

import signal
import socket
from pathlib import Path

import numpy as np
import pytest

from svdq.producer.pauses import free, resume
from svdq.producer.status.ranks import read_groups
from tests.faults.group import READY

pytestmark = pytest.mark.slow

ENDED = "The ranks have ended, and the GPUs are free"
NOT_STARTED = "no ranks start until `svdq resume`"


def rest(site) -> list[str]:
    return [str(group.rest) for group in read_groups(site.connection)]


def is_freed(site) -> bool:
    return rest(site) == ["its GPUs are free"]


def ends(site, group) -> None:
    group.send_signal(signal.SIGTERM)
    assert group.end() == 0, group.text
    assert not read_groups(site.connection)


@pytest.mark.parametrize(
    ("ranks", "phase"),
    [
        (1, "denoising"),
        (7, "denoising"),
        *(pytest.param(ranks, phase, marks=pytest.mark.long) for ranks in (1, 7) for phase in ("encoding", "decoding")),
    ],
)
def test_videos_go_on_after_the_steps_that_they_have(site, until, ranks: int, phase: str) -> None:
    group = site.start(ranks, model="simulated:encode_ms=800,step_ms=100,decode_ms=800")
    jobs = [site.submit(steps=20) for _ in range(ranks + 3)]

    def is_reached() -> bool:
        found = [rank for each in read_groups(site.connection) for rank in each.ranks if rank.job_id]
        if phase == "decoding":
            return any(rank.activity == "decoding" for rank in found)
        return any(rank.activity == "denoising" and bool(rank.step) == (phase == "denoising") for rank in found)

    until(is_reached, lambda: group.text)
    free(site.connection)
    until(lambda: ENDED in group.text, lambda: group.text)
    assert group.ranks() == []
    until(lambda: is_freed(site))
    assert set(site.states(jobs)) <= {"queued", "finished"}
    status = site.run("svdq", "status").stdout
    assert "the GPUs are left to other programs until" in status
    assert "the end is unknown: Jobs are not taken." in status
    resume(site.connection)
    # The simulated model fails a video of which a step was left out, done twice in a row or out of order.
    assert {view.status for view in site.wait(jobs)} == {"finished"}, group.text
    assert group.text.count(READY) == 2
    for job_id in jobs:
        (sidecar,) = site.sidecars(job_id)
        assert sum(stage["steps"] for stage in sidecar["stages"]) == 20
        assert all(each["steps_done_again"] == 0 for each in sidecar.get("resumed", []))
    ends(site, group)


@pytest.mark.long
def test_videos_in_rounds_have_the_same_frames(site, until, tiny_wan: Path) -> None:
    options = {"frames": 5, "family": "wan", "prompt": "x", "formats": ("png",), "seed": 5}
    disturbed, same = site.submit(steps=60, **options), site.submit(steps=60, **options)
    group = site.start(1, "--experts", "rounds", model=str(tiny_wan))
    until(lambda: site.view(disturbed).step >= 2, lambda: group.text)
    free(site.connection)
    until(lambda: ENDED in group.text, lambda: group.text)
    assert group.ranks() == []
    resume(site.connection)
    until(lambda: group.text.count(READY) == 2, lambda: group.text)
    assert {view.status for view in site.wait([disturbed, same])} == {"finished"}, group.text
    np.testing.assert_array_equal(site.frames(disturbed), site.frames(same))
    ends(site, group)


@pytest.mark.long
def test_a_step_that_takes_too_long_is_cut_off_and_the_ones_before_are_kept(site, until) -> None:
    group = site.start(2, model="simulated:step_ms=14000")
    job = site.submit(steps=3)
    until(lambda: site.view(job).step == 1, lambda: group.text)
    free(site.connection)
    until(lambda: ENDED in group.text, lambda: group.text)
    assert group.ranks() == []
    resume(site.connection)
    assert site.wait([job])[0].status == "finished", group.text
    (sidecar,) = site.sidecars(job)
    assert [each["from_step"] for each in sidecar["resumed"]] == [1]
    assert group.text.count(READY) == 2
    ends(site, group)


def test_a_host_stays_freed_when_its_worker_is_killed(site, until) -> None:
    group = site.start(1)
    assert site.run("svdq", "pause", "--free", "--here").returncode == 0
    until(lambda: ENDED in group.text, lambda: group.text)
    job = site.submit()
    group.kill_launcher()
    second = site.start(1, wait=False)
    until(lambda: NOT_STARTED in second.text, lambda: second.text)
    until(lambda: is_freed(site), lambda: second.text)
    assert [process.pid for process in second.family()] == [second.process.pid]
    assert site.states([job]) == ["queued"]
    assert site.run("svdq", "resume", "--here").returncode == 0
    assert site.wait([job])[0].status == "finished", second.text
    ends(site, second)


def test_ranks_that_are_asleep_stay_so(site, until) -> None:
    group = site.start(1, "--on-demand", "1s")
    until(lambda: rest(site) == ["asleep until there is a job"], lambda: group.text)
    free(site.connection, socket.gethostname())
    until(lambda: is_freed(site), lambda: group.text)
    resume(site.connection)
    until(lambda: rest(site) == ["asleep until there is a job"], lambda: group.text)
    free(site.connection, socket.gethostname())
    until(lambda: is_freed(site), lambda: group.text)
    job = site.submit()
    ends(site, group)
    assert site.states([job]) == ["queued"]
    assert group.text.count(READY) == 1


def test_ranks_that_start_are_ended(site, until) -> None:
    group = site.start(1, wait=False)
    until(lambda: "Starting 1 rank" in group.text, lambda: group.text)
    free(site.connection)
    until(lambda: ENDED in group.text or NOT_STARTED in group.text, lambda: group.text)
    assert group.ranks() == []
    until(lambda: is_freed(site), lambda: group.text)
    ends(site, group)


def test_a_burst_ends_when_it_is_freed(site, until) -> None:
    free(site.connection)
    site.submit()
    group = site.start(1, "--burst", wait=False)
    assert group.end() == 1, group.text
    assert "It ended because no jobs are taken. Paused: the GPUs are left" in group.text
    assert READY not in group.text
