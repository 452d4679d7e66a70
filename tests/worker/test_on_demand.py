"""`svdq worker --on-demand`: the ranks end while there is nothing to do, and start again for a job."""

import json
import re
import shutil
import signal
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
import redis

from svdq.pipeline.models.lora_folder import digest_of
from svdq.pipeline.video_parameters import LoraChoice
from svdq.producer import keys
from svdq.producer.pauses import pause, resume
from svdq.producer.queue import SvdqQueue
from svdq.producer.status.ranks import read_groups
from svdq.producer.status.snapshot import take
from svdq.worker.launcher.resting import num_waiting
from svdq.worker.queue.group_worker import GroupWorker
from tests.faults.group import READY, Group
from tests.worker.jobs import pop, put

QUEUES = ("svdq-high", "svdq-default", "svdq-low")


def asleep(site, number: int = 1) -> bool:
    """Whether so many groups are asleep."""
    rests = [group.rest for group in read_groups(site.connection)]
    return sum(rest is not None and rest.reason == "idle" for rest in rests) == number


# One group.


@pytest.mark.slow
def test_ranks_end_while_there_is_no_job_and_start_for_the_next_one(site, until, no_processes_left) -> None:
    group = site.start(2, "--on-demand", "2s")
    first = site.submit()
    launcher = psutil.Process(group.process.pid)
    processes = launcher.children(recursive=True)
    site.wait([first])
    until(lambda: asleep(site), lambda: group.text)
    assert launcher.children(recursive=True) == []
    no_processes_left(processes)
    # What remains has no torch, and is small.
    maps = Path(f"/proc/{group.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "cuda" not in maps
    assert launcher.memory_info().rss < 60 << 20

    until(lambda: take(site.connection).worker_state == "running")
    snapshot = take(site.connection)
    (resting,) = snapshot.groups
    assert resting.is_whole
    assert [(rank.activity, rank.rss_bytes) for rank in resting.ranks] == [("asleep", 0)] * 2
    shown = site.run("svdq", "status").stdout
    assert "asleep until there is a job" in shown
    (*_, rank) = json.loads(site.run("svdq", "status", "--json").stdout)["ranks"]
    assert rank["rest"]["reason"] == "idle"

    (video,) = site.wait([site.submit()])
    assert video.status == "finished"
    assert group.text.count(READY) == 2
    until(lambda: all(found.rest is None for found in read_groups(site.connection)), lambda: group.text)
    assert len(site.sidecars()) == 2


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_sleeping_worker_ends_at_once_and_leaves_nothing(site, until, number: signal.Signals) -> None:
    group = site.start(1, "--on-demand", "0s", "--metrics-port", "0")
    until(lambda: asleep(site), lambda: group.text)
    url = re.search(r"http://\S+/metrics", group.text)
    assert url is not None, group.text
    with urllib.request.urlopen(url[0]) as answer:
        metrics = answer.read().decode()
    assert 'svdq_group_asleep{group="0"} 1.0\n' in metrics
    assert 'svdq_group_ranks_up{group="0"} 0.0\n' in metrics
    code, _ = group.stop(number)
    assert code == 0, group.text
    assert read_groups(site.connection) == []
    assert list(Path(site.settings.home, "run").iterdir()) == []


@pytest.mark.long
def test_a_due_job_wakes_a_group_and_a_later_one_does_not(site, until) -> None:
    group = site.start(1, "--on-demand", "0s")
    until(lambda: asleep(site), lambda: group.text)
    small = ("--frames", 2, "--steps", 4, "--size", "64x64", "--format", "gif", "--json")
    later, due = (
        json.loads(site.run("svdq", "submit", site.photo, *small, "--at", at, "--seed", seed).stdout)["id"]
        for at, seed in (("+1h", 1), ("+2s", 2))
    )
    site.wait([due])
    until(lambda: asleep(site), lambda: group.text)
    assert site.states([due, later]) == ["finished", "scheduled"]


@pytest.mark.long
def test_a_group_sleeps_while_the_queues_are_paused_and_wakes_when_they_are_resumed(site, until) -> None:
    group = site.start(1, "--on-demand", "2s")
    pause(site.connection)
    job_id = site.submit()
    until(lambda: asleep(site), lambda: group.text)
    assert site.states([job_id]) == ["queued"]
    resume(site.connection)
    (video,) = site.wait([job_id])
    assert video.status == "finished"


@pytest.mark.long
def test_a_burst_ends_instead_of_sleeping(site) -> None:
    job_id = site.submit()
    group = site.start(1, "--burst", wait=False, SVDQ_ON_DEMAND="0s")
    assert group.end() == 0, group.text
    assert site.states([job_id]) == ["finished"]


@pytest.mark.long
def test_ranks_that_cannot_start_again_try_until_they_can(site, until, upscaler: dict[str, str]) -> None:
    group = site.start(1, "--on-demand", "0s", **upscaler)
    until(lambda: asleep(site), lambda: group.text)
    file = Path(upscaler["SVDQ_UPSCALER"])
    moved = file.rename(file.with_suffix(".away"))
    try:
        job_id = site.submit()
        until(lambda: "tries again" in group.text or not group.runs, lambda: group.text)
    finally:
        moved.rename(file)
    (video,) = site.wait([job_id])
    assert video.status == "finished", group.text


@pytest.mark.long
def test_ranks_that_start_again_know_that_files_of_their_model_have_changed(
    site, until, tiny_wan: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_wan, folder, copy_function=shutil.copyfile)
    group = site.start(1, "--on-demand", "0s", model=str(folder))
    site.wait([site.submit(family="wan", frames=5)])
    until(lambda: asleep(site), lambda: group.text)
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_bytes(file.read_bytes() + b"\n")
    site.wait([site.submit(family="wan", frames=5)])
    first, second = (sidecar["model"] for sidecar in site.sidecars())
    assert first != second
    assert first.keys() == second.keys()


# Several groups.


@pytest.mark.long
def test_one_job_wakes_one_of_the_groups_of_a_worker(site, until) -> None:
    group = site.start(1, "--groups", "2", "--on-demand", "3s", wait=False)
    until(lambda: asleep(site, 2), lambda: group.text)
    site.wait([site.submit()])
    until(lambda: asleep(site, 2), lambda: group.text)
    assert group.text.count(READY) == 3


@pytest.mark.long
def test_one_job_wakes_one_worker_of_several_and_another_one_if_that_is_killed(site, until) -> None:
    workers = [site.start(1, "--on-demand", "3s") for _ in range(3)]

    def num_starts() -> int:
        return sum(worker.text.count("There is a job") for worker in workers)

    until(lambda: asleep(site, 3))
    site.wait([site.submit()])
    until(lambda: asleep(site, 3))
    assert num_starts() == 1
    job = site.submit()
    until(lambda: any(len(worker.family()) > 1 for worker in workers))
    assert num_starts() == 2
    [killed] = [worker for worker in workers if len(worker.family()) > 1]
    killed.kill_all()
    (video,) = site.wait([job])
    assert video.status == "finished"
    workers_left = [worker for worker in workers if worker is not killed]
    until(lambda: all(len(worker.family()) == 1 for worker in workers_left))
    assert num_starts() == 3
    site.wait([site.submit(), site.submit()])
    until(lambda: all(len(worker.family()) == 1 for worker in workers_left))
    assert num_starts() == 5


@pytest.mark.long
def test_a_job_that_an_awake_worker_is_about_to_take_wakes_no_other(site, until) -> None:
    sleeper = site.start(1, "--on-demand", "0s")
    until(lambda: asleep(site), lambda: sleeper.text)
    awake = GroupWorker(site.connection)
    awake.start()
    site.submit()
    time.sleep(1.5)
    assert pop(awake) is not None
    time.sleep(3)
    assert "There is a job" not in sleeper.text
    awake.end()


@pytest.mark.long
def test_jobs_of_a_host_that_died_wake_another_one(site, until) -> None:
    sleeper: Group = site.start(1, "--on-demand", "0s")
    until(lambda: asleep(site), lambda: sleeper.text)
    worker = site.start(1, model="simulated:step_ms=200")
    job_id = site.submit(steps=20)
    until(lambda: site.states([job_id]) == ["started"])
    worker.kill_all()
    (video,) = site.wait([job_id])
    assert video.status == "finished", sleeper.text


# What counts as work.


@pytest.mark.long
def test_a_job_that_another_worker_leaves_to_it_wakes_a_worker(site, until, tmp_path: Path) -> None:
    file = tmp_path / "loras" / "style.safetensors"
    file.parent.mkdir()
    file.write_text("a LoRA")
    group = site.start(1, "--on-demand", "2s", SVDQ_LORAS=str(file.parent))
    until(lambda: asleep(site), lambda: group.text)
    other = GroupWorker(site.connection)
    other.look_around()
    job_id = site.submit(loras=(LoraChoice(name="style", digest=digest_of(file)),))
    assert pop(other) is None
    assert site.view(job_id).waits_for == "the LoRA style"
    [done] = site.wait([job_id])
    assert done.status == "finished"


def test_jobs_count_that_wait_or_are_due_or_that_a_dead_group_has(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker
) -> None:
    def count() -> int:
        return num_waiting(connection, QUEUES)

    assert count() == 0
    put(connection, "a")
    put(connection, "b")
    assert count() == 2
    taken = pop(worker)
    assert taken is not None
    assert count() == 1  # the living group has the other one
    connection.zadd(taken.queue.started_job_registry.key, {taken.execution.composite_key: time.time() - 1}, xx=True)
    assert count() == 2
    connection.lmove("rq:queue:svdq-default", taken.queue.intermediate_queue_key)
    connection.hset(keys.POPPED, "b", worker.name)
    assert count() == 1
    connection.hset(keys.POPPED, "b", dead.name)
    connection.delete(dead.key)
    assert count() == 2
    connection.zadd("rq:scheduled:svdq-high", {"c": time.time() + 100})
    assert count() == 2
    connection.zadd("rq:scheduled:svdq-high", {"c": time.time() - 1})
    assert count() == 3
    connection.zadd(SvdqQueue("svdq-low", connection=connection).ready_job_registry.key, {"d": 0})
    assert count() == 4
    pause(connection)
    assert count() == 0


def test_keys_of_a_wrong_type_hide_no_work(connection: redis.Redis) -> None:
    for key in ("rq:queue:svdq-high", "rq:wip:svdq-high", "rq:scheduled:svdq-default"):
        connection.set(key, "not RQ's")
    connection.rpush("rq:queue:svdq-low", "a")
    assert num_waiting(connection, QUEUES) == 1


def test_a_group_that_failures_have_paused_does_not_sleep(open_intake, site, until) -> None:
    intake = open_intake(idle_s=0.5)
    site.connection.hset(keys.PAUSES, intake.status().worker, "It failed.")
    time.sleep(1.0)
    assert intake.idled is None
    resume(site.connection)
    assert intake.take() is None
    assert intake.idled is not None
    assert {*QUEUES} <= {*intake.idled}
