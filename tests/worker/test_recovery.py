"""Jobs of dead groups are taken back: real kills of real processes, on this host and as another host sees it."""

import itertools
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import redis

from svdq.pipeline.models.svd.tiny import write_tiny_model
from svdq.producer import keys
from svdq.producer.connection import server_url
from svdq.producer.job_control import cancel
from svdq.producer.queue import SvdqQueue, fetch
from svdq.producer.settings import Settings
from svdq.worker.queue import scripts
from svdq.worker.queue.crashes import CrashCount, CrashSuspect, Phase, read_count
from svdq.worker.queue.group_worker import GroupWorker
from svdq.worker.queue.recovery import POPPED_S, SILENT_S, Recovery
from tests.faults.arena import faults_by_seed
from tests.worker.jobs import Clock, leases, pop, put, slow_worker, waiting

SIMULATED = "simulated:step_ms=50"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def leftovers(connection: redis.Redis) -> list[bytes]:
    """Keys of work in progress."""
    patterns = ("rq:wip:*", "rq:execution:*", "rq:queue:*:intermediate", keys.POPPED, keys.CANCELED, keys.CRASHES)
    return [key for pattern in patterns for key in connection.scan_iter(pattern)]


# Hand-overs.


def test_a_popped_job_has_an_owner(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a", "b")
    assert scripts.pop(connection, worker.queues, worker.name).jobs[0].job_id == b"a"
    assert connection.hgetall(keys.POPPED) == {b"a": worker.name.encode()}
    assert pop(worker).rq_job.id == "b"  # begun: it is popped no more
    assert connection.hgetall(keys.POPPED) == {b"a": worker.name.encode()}


def test_a_lease_that_was_prolonged_meanwhile_is_left(connection: redis.Redis, worker: GroupWorker) -> None:
    put(connection, "a")
    active = pop(worker)
    assert not scripts.return_to_queue(connection, active.queue, active.execution, lease_until=1000)
    assert worker.holds_lease(active)


@pytest.mark.parametrize("status", ["finished", "canceled", None])
def test_a_job_that_has_ended_is_not_put_back(connection: redis.Redis, worker: GroupWorker, status) -> None:
    put(connection, "a")
    active = pop(worker)
    if status is None:
        connection.delete("rq:job:a")
    else:
        connection.hset("rq:job:a", "status", status)
    assert not scripts.return_to_queue(connection, active.queue, active.execution)
    assert waiting(connection) == []
    assert not connection.exists("rq:wip:svdq-default")


# At a group's start.


def test_jobs_of_a_dead_group_come_back_in_order(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker
) -> None:
    put(connection, "a", "b", "c", "d", "e")
    mine = pop(worker)
    for _ in range(2):
        pop(dead)
    scripts.pop(connection, dead.queues, dead.name)  # killed right after: d
    put(connection, "newer")

    Recovery(worker).at_start([])

    assert waiting(connection) == ["b", "c", "d", "e", "newer"]
    assert worker.holds_lease(mine)
    for job_id in ("b", "c", "d"):
        job = fetch(connection, job_id)
        assert (job.get_status().value, job.retries_left) == ("queued", 3)
    Recovery(worker).at_start([])
    assert waiting(connection) == ["b", "c", "d", "e", "newer"]


# In regular maintenance, as another host sees it.


def test_expired_leases_come_back_without_spending_retries(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker, clock: Clock
) -> None:
    put(connection, "a", "b", "c", "d")
    first, _ = pop(dead), pop(dead)
    scripts.pop(connection, dead.queues, dead.name)
    recovery = Recovery(worker, clock)
    recovery.expired()
    assert waiting(connection) == ["d"]  # a living one's, as far as Redis knows

    connection.zadd("rq:wip:svdq-default", dict.fromkeys(connection.zrange("rq:wip:svdq-default", 0, -1), 1))
    connection.delete(first.execution.key, dead.key)  # what ends with the lease
    recovery.expired()
    clock.now += SILENT_S
    recovery.expired()
    worker.maintain()
    assert waiting(connection) == ["a", "b", "c", "d"]
    assert {connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in "abc"} == {b"3"}
    assert [key for key in leftovers(connection) if key != b"rq:execution"] == []


def num_calls(connection: redis.Redis) -> int:
    stats = connection.info("commandstats")
    return sum(stats[name]["calls"] for name in stats if name != "cmdstat_info")


def test_jobs_in_flight_of_other_groups_are_not_read(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker, clock: Clock
) -> None:
    """Each group read the executions of all others every two seconds: hundreds of groups filled one Redis."""
    recovery = Recovery(worker, clock)
    recovery.unknown([])
    costs = []
    for number in (0, 20):
        put(connection, *(f"job-{index}" for index in range(number)))
        for _ in range(number):
            pop(dead)
        before = num_calls(connection)
        recovery.unknown([])
        recovery.expired()
        costs.append(num_calls(connection) - before)
    assert costs[0] == costs[1]


def test_a_job_whose_begin_was_not_confirmed_comes_back(
    connection: redis.Redis, worker: GroupWorker, clock: Clock
) -> None:
    """The answer was lost with the connection, so nobody renews the lease."""
    put(connection, "a", "b")
    held, lost = pop(worker), pop(worker)
    recovery = Recovery(worker, clock)
    recovery.unknown([held.execution.id])
    assert waiting(connection) == []
    connection.zincrby("rq:wip:svdq-default", -7, lost.execution.composite_key)
    recovery.unknown([held.execution.id])
    assert waiting(connection) == ["b"]
    lost = pop(worker)
    recovery.unknown([held.execution.id], is_last=True)  # a burst would end
    assert waiting(connection) == ["b"]
    assert worker.holds_lease(held)


def test_a_popped_job_is_never_stuck_while_its_group_is_alive(connection: redis.Redis, worker: GroupWorker) -> None:
    """It is seen between pop and admission by two rounds of maintenance, a day apart; RQ's own would queue it twice."""
    put(connection, "a")
    scripts.pop(connection, worker.queues, worker.name)
    other = GroupWorker(connection)
    recovery = Recovery(other, itertools.count(0, 100).__next__)
    for _ in range(2):
        recovery.expired()
        other.maintain()
        for key in connection.scan_iter("rq:queue:*:first_seen:*"):
            connection.set(key, 1)
    assert connection.hget("rq:job:a", "retries_left") == b"3"
    assert waiting(connection) == []
    assert connection.lrange("rq:queue:svdq-default:intermediate", 0, -1) == [b"a"]


def test_a_job_popped_by_another_program_comes_back_after_a_minute(
    connection: redis.Redis, worker: GroupWorker, clock: Clock
) -> None:
    put(connection, "a")
    SvdqQueue.lmove(connection, "rq:queue:svdq-default", None)
    recovery = Recovery(worker, clock)
    recovery.expired()
    clock.now += POPPED_S - 1
    recovery.expired()
    assert waiting(connection) == []
    clock.now += 1
    recovery.expired()
    assert waiting(connection) == ["a"]
    assert connection.hget("rq:job:a", "retries_left") == b"3"


def test_a_job_that_was_taken_back_before_it_was_begun_is_not_begun(
    settings: Settings, connection: redis.Redis, worker: GroupWorker
) -> None:
    """Its group slept between pop and admission for longer than it counts as alive."""
    put(connection, "a")
    taken = []

    def take_back() -> None:
        connection.delete(asleep.key)
        Recovery(worker).expired()
        assert waiting(connection) == ["a"]
        taken.append(pop(worker))

    asleep = slow_worker(server_url(settings), take_back)
    assert pop(asleep) is None
    assert pop(worker) is None
    assert list(leases(connection)) == [taken[0].execution.composite_key]


@pytest.mark.parametrize(
    "plant",
    [
        lambda connection: connection.hset(keys.CRASHES, "a", "[1]"),
        lambda connection: connection.hset(keys.CRASHES, "a", '{"step": 1, "rank": 1, "here": [], "total": "x"}'),
        lambda connection: connection.hset(keys.CRASHES, b"\xff", "{"),
        lambda connection: connection.hset(keys.PAUSES, b"\xff", "x"),
        lambda connection: connection.zadd("rq:wip:svdq-high", {b"\xff": 1, "x": 1, "x:y:z": 1}),
        lambda connection: connection.rpush("rq:queue:svdq-high:intermediate", b"\xff", "no such job"),
        lambda connection: connection.hset(keys.POPPED, "a", b"\xff"),
        lambda connection: connection.zadd("rq:deferred:svdq-high", {b"\xff": 1, "x": 1}),
        lambda connection: connection.hset("rq:job:a", mapping={"worker_name": b"\xff", "started_at": b"\xff"}),
    ],
)
def test_foreign_entries_of_registries_break_no_recovery(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker, plant
) -> None:
    put(connection, "a")
    pop(dead)
    plant(connection)
    recovery = Recovery(worker, itertools.count(0, 100).__next__)
    recovery.at_start([suspect("a")])
    for _ in range(3):
        recovery.unknown(())
        recovery.expired()
        worker.maintain()
    assert waiting(connection) == ["a"]


# Jobs that end their rank.


def suspect(job_id: str, step: int = 4, phase: Phase = "step") -> CrashSuspect:
    return CrashSuspect(job_id=job_id, phase=phase, step=step, rank=1)


def counted(before: CrashCount | None, found: CrashSuspect, *, only_suspect: bool = True) -> CrashCount:
    return CrashCount.after(before, found, only_suspect=only_suspect)


def test_crashes_are_counted_at_one_place() -> None:
    first = counted(None, suspect("a"))
    assert (first.here, first.total) == (1, 1)
    assert counted(first, suspect("a")).is_too_many(2)
    assert not counted(first, suspect("a", 4, "decode")).is_too_many(2), "another phase is another place"
    moved = counted(first, suspect("a", 7))
    assert not moved.is_too_many(2)
    for step in range(8, 16):
        moved = counted(moved, suspect("a", step))
    assert moved.total == 10
    assert moved.is_too_many(2), "at any place: it does not go on for ever"


def test_one_of_several_suspects_is_set_aside_only_when_it_died_alone() -> None:
    count = None
    for _ in range(20):
        count = counted(count, suspect("a"), only_suspect=False)
    assert count is not None
    assert not count.is_too_many(2)
    assert counted(count, suspect("a")).is_too_many(2)


def test_suspects_run_alone_until_they_have_ended(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker
) -> None:
    put(connection, "a", "b", "c")
    pop(dead)
    pop(dead)
    Recovery(worker).at_start([suspect("a"), suspect("c", 0, "prepare"), suspect("gone")])
    assert waiting(connection) == ["a", "b", "c"]
    assert [connection.hexists(keys.CRASHES, job_id) for job_id in ("a", "b", "c", "gone")] == [
        True,
        False,
        True,
        False,
    ]
    impatient = GroupWorker(connection, max_attempts=1)
    active = pop(impatient)
    assert active is not None, "it is not set aside, though one attempt is all it has"
    assert active.is_suspect
    impatient.finish([(active, {"outputs": []})])
    assert not connection.hexists(keys.CRASHES, "a")
    cancel(connection, "c")
    assert not connection.hexists(keys.CRASHES, "c")
    assert not connection.exists(keys.CRASHES)


def test_a_job_that_another_group_has_ended_meanwhile_is_no_suspect(
    connection: redis.Redis, worker: GroupWorker
) -> None:
    put(connection, "a", "b")
    worker.finish([(pop(worker), {"outputs": []})])
    Recovery(worker).at_start([suspect("a"), suspect("b")])
    assert connection.hkeys(keys.CRASHES) == [b"b"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 4, "rank": 1, "here": 1, "total": 1}', "null"])
def test_a_count_that_cannot_be_read_is_begun_anew(connection: redis.Redis, worker: GroupWorker, text: str) -> None:
    put(connection, "a", "b")
    connection.hset(keys.CRASHES, mapping={"a": text, "gone": text})
    Recovery(worker).at_start([suspect("a")])
    count = read_count(connection, "a")
    assert count is not None
    assert count.total == 1
    assert connection.hkeys(keys.CRASHES) == [b"a"], "what was counted of a job that is gone goes, too"


def test_a_job_that_killed_its_rank_twice_is_set_aside(
    connection: redis.Redis, worker: GroupWorker, dead: GroupWorker
) -> None:
    put(connection, "a", "b")
    pop(dead)
    pop(dead)
    Recovery(worker).at_start([suspect("a")])
    assert waiting(connection) == ["a", "b"]
    pop(dead)
    pop(dead)
    Recovery(worker).at_start([suspect("a")])
    assert waiting(connection) == ["a", "b"]
    assert pop(worker) is None
    assert waiting(connection) == ["b"]
    failed = fetch(connection, "a")
    assert failed.get_status().value == "failed"
    assert "died 2 times" in failed.latest_result().exc_string
    assert leftovers(connection) == []


# Real groups.


def outputs(site) -> list[str]:
    return sorted(path.name for path in (Path(site.settings.storage) / "outputs").glob("*.json"))


def check_all_finished(site, jobs: list[str]) -> None:
    views = site.wait(jobs)
    assert [view.status for view in views] == ["finished"] * len(jobs), [view.error for view in views]
    assert outputs(site) == sorted(f"photo-{job_id}.json" for job_id in jobs)
    assert {site.connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in jobs} == {b"3"}
    successes = sum(len(fetch(site.connection, job_id).results()) for job_id in jobs)
    assert successes == len(jobs)
    assert leftovers(site.connection) == []


@pytest.mark.long
def test_killed_ranks_lose_nothing(site, until) -> None:
    group = site.start(3, model=SIMULATED)
    jobs: list[str] = []
    for restart, rank in enumerate((0, 1, 2), start=1):
        before = group.ranks()
        more = [site.submit(steps=20) for _ in range(6)]
        until(lambda more=more: site.states(more).count("started") >= 3, lambda: group.text)
        before[rank].kill()
        group.ready(times=restart + 1)
        again = group.ranks()
        assert len(again) == 3
        assert {process.pid for process in again}.isdisjoint({process.pid for process in before})
        site.wait(more)
        begun = [fetch(site.connection, job_id).started_at for job_id in more]
        assert begun == sorted(begun), "in their old order"
        jobs += more
    check_all_finished(site, jobs)


@pytest.mark.slow
def test_after_a_kill_of_everything_the_next_group_goes_on_at_once(site, until) -> None:
    group = site.start(1, model=SIMULATED)
    jobs = [site.submit(steps=20) for _ in range(3)]
    until(lambda: site.states(jobs).count("started") >= 1)
    group.kill_all()
    newer = site.submit(steps=4)
    again = site.start(1, model=SIMULATED)
    until(lambda: "Took back" in again.text, lambda: again.text)
    check_all_finished(site, [*jobs, newer])
    assert "set aside" not in again.text


@pytest.mark.slow
@pytest.mark.long
def test_a_job_whose_rank_died_twice_fails_and_others_finish(site, until) -> None:
    group = site.start(2, model="simulated:step_ms=20", **faults_by_seed("kill=13"))
    jobs = [site.submit(steps=12, seed=seed) for seed in (1, 2, 13, 3, 4)]
    views = site.wait(jobs)
    assert [view.status for view in views] == ["finished", "finished", "failed", "finished", "finished"]
    assert "died 2 times" in views[2].error
    assert group.text.count("Ready with") == 3
    others = [job_id for job_id in jobs if job_id != jobs[2]]
    assert outputs(site) == sorted(f"photo-{job_id}.json" for job_id in others)
    assert {site.connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in others} == {b"3"}
    assert leftovers(site.connection) == []


@pytest.mark.long
def test_a_job_whose_rank_hung_twice_fails_and_others_finish(site) -> None:
    (site.folder / "svdq.toml").write_text("stall_s = 2.0\n")
    group = site.start(2, model="simulated:step_ms=20", **faults_by_seed("hang=13"))
    jobs = [site.submit(steps=12, seed=seed) for seed in (1, 2, 13, 3, 4)]
    views = site.wait(jobs)
    assert [view.status for view in views] == ["finished", "finished", "failed", "finished", "finished"]
    assert "made no progress and was ended 2 times" in views[2].error
    assert "in step 4, " in views[2].error
    assert group.text.count("Ready with") == 3, "two restarts and no more"
    logged = site.run("svdq", "logs", jobs[2]).stdout
    assert logged.count("makes no progress: step 4 of 12") == 2
    assert "threading.Event().wait()" in logged, "where it hung"
    assert leftovers(site.connection) == []


@pytest.mark.long
def test_a_model_that_is_away_after_a_restart_is_waited_for(site, until, tmp_path) -> None:
    write_tiny_model(tmp_path / "tiny")
    group = site.start(1, model=str(tmp_path / "tiny"))
    job = site.submit(steps=40)
    until(lambda: site.view(job).step > 2)
    (tmp_path / "tiny").rename(tmp_path / "away")
    group.ranks()[0].kill()
    until(lambda: "tries again in" in group.text, lambda: group.text)
    (tmp_path / "away").rename(tmp_path / "tiny")
    check_all_finished(site, [job])


@pytest.mark.long
def test_a_group_that_slept_past_its_lease_publishes_nothing(site, until) -> None:
    sleeper = site.start(2, model="simulated:step_ms=100")
    job = site.submit(steps=40)
    until(lambda: site.view(job).step > 2)
    family = psutil.Process(sleeper.process.pid).children(recursive=True)
    for process in family:
        process.send_signal(signal.SIGSTOP)
    site.start(2, model="simulated:step_ms=100")
    view = site.wait([job])[0]
    assert view.status == "finished"
    published = {path: path.stat().st_mtime_ns for path in (Path(site.settings.storage) / "outputs").iterdir()}
    for process in family:
        process.send_signal(signal.SIGCONT)
    # Whether it renews its leases first or ends the video: it says so once.
    until(lambda: f"Job {job} was canceled or taken over" in sleeper.text, lambda: sleeper.text)
    after = site.submit(steps=4)
    site.wait([after])
    sleeper.process.send_signal(signal.SIGTERM)
    until(lambda: sleeper.process.poll() is not None, lambda: sleeper.text)
    assert sleeper.text.count(f"Job {job} was canceled or taken over") == 1
    assert len(fetch(site.connection, job).results()) == 1
    assert {path: path.stat().st_mtime_ns for path in published} == published


def answers(connection: redis.Redis) -> bool:
    """Whether Redis is there."""
    try:
        return connection.ping()
    except redis.ConnectionError:
        return False


@pytest.mark.slow
@pytest.mark.usefixtures("own_server")
def test_redis_that_is_killed_comes_back_and_nothing_is_lost(site, until) -> None:
    group = site.start(1, model=SIMULATED)
    jobs = [site.submit(steps=10) for _ in range(5)]
    for number in (1, 2):
        until(lambda number=number: site.states(jobs).count("finished") >= number)
        before = group.text.count("Redis is back.")
        os.kill(site.connection.info("server")["process_id"], signal.SIGKILL)
        until(lambda before=before: group.text.count("Redis is back.") > before, lambda: group.text)
        until(lambda: answers(site.connection), lambda: group.text)
    check_all_finished(site, jobs)
    assert "Traceback" not in group.text
    assert group.text.count("Ready with") == 1
    assert json.loads(site.run("svdq", "status", "--json").stdout)["workers"]
