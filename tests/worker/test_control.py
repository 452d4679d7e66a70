"""Cancel, retry, move, pause and resume: on queued jobs, and on those that a real group has in flight."""

from pathlib import Path

import pytest
import rq.command
from rq.registry import CanceledJobRegistry, FailedJobRegistry

from svdq.pipeline.errors import InputError
from svdq.producer import job_control, keys
from svdq.producer.queue import SvdqQueue, fetch, server_url
from svdq.worker.queue import scripts
from tests.conftest import Cli
from tests.faults.arena import faults_by_seed
from tests.worker.jobs import HookedRedis, SlowWorker

SIMULATED = "simulated:step_ms=50"


def default(house) -> SvdqQueue:
    return SvdqQueue("svdq-default", connection=house.connection)


def test_a_queued_job_is_canceled_at_once(house, svdq: Cli) -> None:
    first, second = house.submit(), house.submit()
    assert svdq("cancel", first).stdout == f"{first}  canceled\n"
    assert house.states([first, second]) == ["canceled", "queued"]
    assert house.queued() == [second]
    assert CanceledJobRegistry(queue=default(house)).get_job_ids() == [first]
    with pytest.raises(InputError, match="is canceled: it has ended already"):
        job_control.cancel(house.connection, first)


def test_what_is_canceled_can_be_retried(house, svdq: Cli) -> None:
    first, second = house.submit(), house.submit()
    job_control.cancel(house.connection, first)
    assert svdq("retry", first).stdout == f"{first}  queued\n"
    assert house.queued() == [second, first]
    assert CanceledJobRegistry(queue=default(house)).get_job_ids() == []
    with pytest.raises(InputError, match="is queued: only failed"):
        job_control.retry(house.connection, first)


def test_a_job_is_retried_although_its_group_still_writes_to_it(house) -> None:
    job_id = house.submit()
    job_control.cancel(house.connection, job_id)
    writes = iter(range(3))

    def write(commands: str) -> None:
        if "HGETALL" in commands and (number := next(writes, None)) is not None:
            house.connection.hset(f"rq:job:{job_id}", "meta", f'{{"step": {number}}}')

    with HookedRedis.from_url(server_url(house.settings)) as connection:
        connection.after = write
        job_control.retry(connection, job_id)
    assert list(writes) == []
    assert house.queued() == [job_id]


def test_jobs_are_moved(house, svdq: Cli) -> None:
    one, two, three, four = (house.submit() for _ in range(4))
    assert svdq("move", three, four, "--front").returncode == 0
    assert house.queued() == [three, four, one, two]
    job_control.move(house.connection, two, front=False, priority="high")
    assert house.queued() == [three, four, one]
    assert SvdqQueue("svdq-high", connection=house.connection).get_job_ids() == [two]
    assert fetch(house.connection, two).origin == "svdq-high"
    assert svdq("move", one).returncode == 2
    with pytest.raises(InputError, match="no priority 'urgent'"):
        job_control.move(house.connection, one, front=False, priority="urgent")
    job_control.cancel(house.connection, one)
    with pytest.raises(InputError, match="is canceled: only queued jobs can be moved"):
        job_control.move(house.connection, one, front=True, priority=None)


def test_all_ids_are_looked_up_before_the_first_job_is_touched(house, svdq: Cli) -> None:
    one, two = house.submit(), house.submit()
    for command in (["cancel"], ["retry"], ["retry", "--force"], ["move", "--priority", "high"]):
        done = svdq(*command, one, "nope", two)
        assert (done.returncode, done.stdout) == (2, "")
    job_control.cancel(house.connection, two)
    done = svdq("cancel", one, two)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has ended already" in done.stderr
    assert house.states([one, two]) == ["queued", "canceled"]
    assert svdq("cancel", one, one).stdout == f"{one}  canceled\n"


def unlisted(house) -> str:
    """A job that is queued, in no list."""
    job_id = house.submit()
    house.connection.delete("rq:queue:svdq-default")
    return job_id


def popped(house) -> str:
    """A job that a group took off its queue and has not begun."""
    job_id = house.submit()
    queues = [default(house)]
    assert scripts.pop(house.connection, queues, "svdq-elsewhere-1-x.2.c").job_id == job_id.encode()
    return job_id


def elsewhere(house) -> str:
    """A job in another queue than its record says."""
    job_id = house.submit()
    house.connection.rename("rq:queue:svdq-default", "rq:queue:svdq-low")
    return job_id


def held_by_nobody(house) -> str:
    """A job that is started, without any execution."""
    job_id = unlisted(house)
    house.connection.hset(f"rq:job:{job_id}", "status", "started")
    return job_id


@pytest.mark.parametrize("make", [unlisted, popped, elsewhere, held_by_nobody])
def test_a_job_that_no_group_renders_is_canceled_wherever_it_is(house, svdq: Cli, make) -> None:
    job_id = make(house)
    assert svdq("cancel", job_id).stdout == f"{job_id}  canceled\n"
    assert house.states([job_id]) == ["canceled"]
    assert CanceledJobRegistry(queue=default(house)).get_job_ids() == [job_id]
    for name in keys.QUEUE_NAMES:
        assert not house.connection.exists(f"rq:queue:{name}", f"rq:queue:{name}:intermediate")
    assert not house.connection.exists(keys.POPPED)


@pytest.mark.parametrize("what", ["canceled", "gone"])
def test_a_job_that_is_canceled_or_deleted_while_a_group_takes_it_is_not_begun(house, what: str) -> None:
    job_id, connection = house.submit(), house.connection

    def meanwhile() -> None:
        if what == "canceled":
            job_control.cancel(connection, job_id)
        else:
            connection.delete(f"rq:job:{job_id}")

    assert SlowWorker(connection, meanwhile).pop() is None
    assert connection.hget(f"rq:job:{job_id}", "status") == (b"canceled" if what == "canceled" else None)
    assert not connection.exists("rq:wip:svdq-default", keys.POPPED, "rq:queue:svdq-default:intermediate")


@pytest.mark.parametrize("spoil", ["data", "record"])
def test_a_record_that_cannot_be_read_is_said_in_a_sentence(house, svdq: Cli, spoil: str) -> None:
    job_id = house.submit()
    if spoil == "data":
        house.connection.hdel(f"rq:job:{job_id}", "data")
    else:
        house.connection.set(f"rq:job:{job_id}", "x")
    for command in ("cancel", "retry", "move"):
        done = svdq(command, job_id, *(["--front"] if command == "move" else []))
        assert done.returncode == 2
        assert f"The record of job '{job_id}' cannot be read" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_pause_is_rqs_and_shown(house, svdq: Cli) -> None:
    svdq("pause")
    assert house.connection.exists("rq:suspended")
    house.connection.hset(keys.PAUSES, mapping={"svdq-a-1-x": "Three jobs failed.", "svdq-b-2-y": "It died since."})
    house.connection.hset("rq:worker:svdq-a-1-x", "birth", "…")  # it lives
    shown = svdq("status").stdout
    assert "Paused: no jobs are taken" in shown
    assert "PAUSED svdq-a-1-x: Three jobs failed. Fix the cause, then run `svdq resume`." in shown
    assert "svdq-b-2-y" not in shown
    assert svdq("resume").returncode == 0
    assert not house.connection.exists("rq:suspended", keys.PAUSES)


@pytest.mark.slow
def test_jobs_in_flight_stop_at_their_next_step(house, until) -> None:
    """By our command, by RQ's stop command, and by RQ's plain cancel, which sends no command; the others go on."""
    group = house.start(3, model=SIMULATED)
    jobs = [house.submit(steps=300) for _ in range(3)]
    after = house.submit(steps=4)
    until(lambda: house.states(jobs).count("started") >= 3)
    canceled = house.run("svdq", "cancel", jobs[1])
    assert canceled.stdout == f"{jobs[1]}  stops at its next step\n", canceled.stderr
    rq.command.send_stop_job_command(house.connection, jobs[2], serializer=fetch(house.connection, jobs[2]).serializer)
    fetch(house.connection, jobs[0]).cancel()

    assert [view.status for view in house.wait([*jobs, after])] == ["canceled", "stopped", "stopped", "finished"]
    until(lambda: "its result here is dropped" in group.text, lambda: group.text)
    queue = default(house)
    assert sorted(FailedJobRegistry(queue=queue).get_job_ids()) == sorted(jobs[1:])  # where RQ keeps stopped ones
    until(lambda: not list(house.connection.scan_iter("rq:execution:*")))
    assert not house.connection.exists("rq:wip:svdq-default", keys.CANCELED)
    assert not list((Path(house.settings.storage) / "outputs").glob(f"*{jobs[1]}*"))
    assert "Traceback" not in group.text

    # Once more.
    assert house.run("svdq", "retry", jobs[1]).returncode == 0
    until(lambda: house.states([jobs[1]]) == ["started"], lambda: group.text)
    until(lambda: house.view(jobs[1]).step > 0, lambda: group.text)


@pytest.mark.long
def test_a_group_pauses_and_a_finished_video_stays_until_another_one_replaces_it(house, until) -> None:
    group = house.start(1, model=SIMULATED)
    job_id = house.submit(steps=120)  # rendered for longer than `svdq cancel` takes to start
    [file] = house.wait([job_id])[0].outputs
    sidecar, before = Path(file).with_suffix(".json"), Path(file).stat().st_mtime_ns
    first = sidecar.read_bytes()

    job_control.pause(house.connection)
    until(lambda: "Intake is paused" in group.text, lambda: group.text)
    waiting = house.submit(steps=4)
    # Which takes longer than the group takes between two looks at the queue.
    assert "Paused: no jobs are taken" in house.run("svdq", "status").stdout
    assert house.states([waiting]) == ["queued"]
    job_control.resume(house.connection)
    assert house.wait([waiting])[0].status == "finished"

    assert house.run("svdq", "retry", job_id, "--force").returncode == 0
    until(lambda: house.view(job_id).step > 3, lambda: group.text)
    assert house.run("svdq", "cancel", job_id).returncode == 0
    assert house.wait([job_id])[0].status == "stopped"
    assert (sidecar.read_bytes(), Path(file).stat().st_mtime_ns) == (first, before)
    assert job_id in house.run("svdq", "fetch", "--all", "--output", house.folder / "videos").stdout

    # What was asked for once is remembered: this is not the acknowledgement of a video that a crash prevented.
    assert house.run("svdq", "retry", job_id).returncode == 0
    assert house.wait([job_id])[0].status == "finished"
    assert Path(file).stat().st_mtime_ns > before
    assert sidecar.read_bytes() != first
    assert house.connection.ttl(f"rq:job:{job_id}") > 0


@pytest.mark.long
def test_three_jobs_that_fail_alike_pause_intake(house, until) -> None:
    group = house.start(1, model="simulated:step_ms=20", **faults_by_seed("nan=5"))
    jobs = [house.submit(steps=6, seed=5) for _ in range(3)]
    house.wait(jobs)
    until(lambda: "INTAKE IS PAUSED" in group.text, lambda: group.text)
    rest = [house.submit(steps=6, seed=6) for _ in range(2)]
    until(lambda: "Intake is paused" in group.text, lambda: group.text)
    assert "3 different jobs in a row failed" in house.run("svdq", "status").stdout
    assert house.states(rest) == ["queued", "queued"]
    house.run("svdq", "resume")
    assert [view.status for view in house.wait(rest)] == ["finished", "finished"]
