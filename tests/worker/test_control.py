"""Cancel, retry, move, pause and resume: on queued jobs, and on those that a real group has in flight."""

import json
import socket
from pathlib import Path

import pytest
import rq.command
from rq.registry import CanceledJobRegistry, FailedJobRegistry

from svdq.pipeline.errors import InputError
from svdq.producer import job_control, keys
from svdq.producer.connection import server_url
from svdq.producer.pauses import free, is_freed, pause, read_pauses, resume
from svdq.producer.queue import SvdqQueue, fetch
from svdq.worker.queue import scripts
from tests.conftest import Cli
from tests.worker.jobs import HookedRedis, pop, slow_worker

SIMULATED = "simulated:step_ms=50"


def default(site) -> SvdqQueue:
    return SvdqQueue("svdq-default", connection=site.connection)


def test_a_queued_job_is_canceled_at_once(site, svdq: Cli) -> None:
    first, second = site.submit(), site.submit()
    assert svdq("cancel", first).stdout == f"{first}  canceled\n"
    assert site.states([first, second]) == ["canceled", "queued"]
    assert site.queued() == [second]
    assert CanceledJobRegistry(queue=default(site)).get_job_ids() == [first]
    with pytest.raises(InputError, match="is canceled: it has ended already"):
        job_control.cancel(site.connection, first)


def test_what_is_canceled_can_be_retried(site, svdq: Cli) -> None:
    first, second = site.submit(), site.submit()
    job_control.cancel(site.connection, first)
    assert svdq("retry", first).stdout == f"{first}  queued\n"
    assert site.queued() == [second, first]
    assert CanceledJobRegistry(queue=default(site)).get_job_ids() == []
    with pytest.raises(InputError, match="is queued: only failed"):
        job_control.retry(site.connection, first)


def test_a_job_is_retried_although_its_group_still_writes_to_it(site) -> None:
    job_id = site.submit()
    job_control.cancel(site.connection, job_id)
    writes = iter(range(3))

    def write(commands: str) -> None:
        if "HGETALL" in commands and (number := next(writes, None)) is not None:
            site.connection.hset(f"rq:job:{job_id}", "meta", f'{{"step": {number}}}')

    with HookedRedis.from_url(server_url(site.settings)) as connection:
        connection.after = write
        job_control.retry(connection, job_id)
    assert list(writes) == []
    assert site.queued() == [job_id]


def test_jobs_are_moved(site, svdq: Cli) -> None:
    one, two, three, four = (site.submit() for _ in range(4))
    assert svdq("move", three, four, "--front").returncode == 0
    assert site.queued() == [three, four, one, two]
    job_control.move(site.connection, two, front=False, priority="high")
    assert site.queued() == [three, four, one]
    assert SvdqQueue("svdq-high", connection=site.connection).get_job_ids() == [two]
    assert fetch(site.connection, two).origin == "svdq-high"
    assert svdq("move", one).returncode == 2
    with pytest.raises(InputError, match="no priority 'urgent'"):
        job_control.move(site.connection, one, front=False, priority="urgent")
    job_control.cancel(site.connection, one)
    with pytest.raises(InputError, match="is canceled: only queued jobs can be moved"):
        job_control.move(site.connection, one, front=True, priority=None)


def test_all_ids_are_looked_up_before_the_first_job_is_touched(site, svdq: Cli) -> None:
    one, two = site.submit(), site.submit()
    for command in (["cancel"], ["retry"], ["retry", "--force"], ["move", "--priority", "high"]):
        done = svdq(*command, one, "nope", two)
        assert (done.returncode, done.stdout) == (2, "")
    job_control.cancel(site.connection, two)
    done = svdq("cancel", one, two)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has ended already" in done.stderr
    assert site.states([one, two]) == ["queued", "canceled"]
    assert svdq("cancel", one, one).stdout == f"{one}  canceled\n"


def unlisted(site) -> str:
    """A job that is queued, in no list."""
    job_id = site.submit()
    site.connection.delete("rq:queue:svdq-default")
    return job_id


def popped(site) -> str:
    """A job that a group took off its queue and has not begun."""
    job_id = site.submit()
    queues = [default(site)]
    assert scripts.pop(site.connection, queues, "svdq-elsewhere-1-x.2.c").jobs[0].job_id == job_id.encode()
    return job_id


def elsewhere(site) -> str:
    """A job in another queue than its record says."""
    job_id = site.submit()
    site.connection.rename("rq:queue:svdq-default", "rq:queue:svdq-low")
    return job_id


def held_by_nobody(site) -> str:
    """A job that is started, without any execution."""
    job_id = unlisted(site)
    site.connection.hset(f"rq:job:{job_id}", "status", "started")
    return job_id


@pytest.mark.parametrize("make", [unlisted, popped, elsewhere, held_by_nobody])
def test_a_job_that_no_group_renders_is_canceled_wherever_it_is(site, svdq: Cli, make) -> None:
    job_id = make(site)
    assert svdq("cancel", job_id).stdout == f"{job_id}  canceled\n"
    assert site.states([job_id]) == ["canceled"]
    assert CanceledJobRegistry(queue=default(site)).get_job_ids() == [job_id]
    for name in keys.QUEUE_NAMES:
        assert not site.connection.exists(f"rq:queue:{name}", f"rq:queue:{name}:intermediate")
    assert not site.connection.exists(keys.POPPED)


@pytest.mark.parametrize("what", ["canceled", "gone"])
def test_a_job_that_is_canceled_or_deleted_when_popped_is_not_begun(site, what: str) -> None:
    job_id, connection = site.submit(), site.connection

    def meanwhile() -> None:
        if what == "canceled":
            job_control.cancel(connection, job_id)
        else:
            connection.delete(f"rq:job:{job_id}")

    assert pop(slow_worker(server_url(site.settings), meanwhile)) is None
    assert connection.hget(f"rq:job:{job_id}", "status") == (b"canceled" if what == "canceled" else None)
    assert not connection.exists("rq:wip:svdq-default", keys.POPPED, "rq:queue:svdq-default:intermediate")


@pytest.mark.parametrize("spoil", ["data", "record"])
def test_a_record_that_cannot_be_read_is_said_in_a_sentence(site, svdq: Cli, spoil: str) -> None:
    job_id = site.submit()
    if spoil == "data":
        site.connection.hdel(f"rq:job:{job_id}", "data")
    else:
        site.connection.set(f"rq:job:{job_id}", "x")
    for command in ("cancel", "retry", "move"):
        done = svdq(command, job_id, *(["--front"] if command == "move" else []))
        assert done.returncode == 2
        assert f"The record of job '{job_id}' cannot be read" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_pause_is_rqs_and_shown(site, svdq: Cli) -> None:
    svdq("pause")
    assert site.connection.exists("rq:suspended")
    site.connection.hset(keys.PAUSES, mapping={"svdq-a-1-x": "Three jobs failed.", "svdq-b-2-y": "It died since."})
    site.connection.hset("rq:worker:svdq-a-1-x", "birth", "…")  # it lives
    shown = svdq("status").stdout
    assert "Paused: no jobs are taken" in shown
    assert "PAUSED svdq-a-1-x: Three jobs failed. Fix the cause, then run `svdq resume`." in shown
    assert "svdq-b-2-y" not in shown
    assert svdq("resume").returncode == 0
    assert not site.connection.exists("rq:suspended", keys.PAUSES)


def test_hosts_that_are_freed_are_said_and_others_go_on(site, svdq: Cli) -> None:
    here = socket.gethostname()
    assert svdq("pause", "--here").returncode == 2
    freed = svdq("pause", "--free", "--here")
    assert freed.stdout == f"Paused on {here} until `svdq resume`; the GPUs are free within 15 s.\n"
    said = f"Paused on {here}: its GPUs are left to other programs until `svdq resume`."
    assert said in svdq("status").stdout
    assert said.rstrip(".") in svdq("doctor").stdout
    assert not site.connection.exists("rq:suspended")
    free(site.connection, "elsewhere")
    assert svdq("resume", "--here").stdout == f"{said}\nResumed; groups take jobs again.\n"
    assert [each.host for each in read_pauses(site.connection)] == ["elsewhere"]


def test_all_hosts_are_freed_until_resume(site, svdq: Cli) -> None:
    said = "Paused: the GPUs are left to other programs until `svdq resume`."
    assert json.loads(svdq("pause", "--free", "--json").stdout) == {"paused": True, "freed": "*"}
    assert svdq("resume", "--here").stdout == f"{said}\n"
    assert is_freed(site.connection, "anywhere")
    assert json.loads(svdq("resume", "--json").stdout) == {"paused": False, "reasons": [said]}
    assert not is_freed(site.connection, "anywhere")
    assert not site.connection.exists("rq:suspended")


@pytest.mark.slow
def test_jobs_in_flight_stop_at_their_next_step(site, until) -> None:
    """By our command, by RQ's stop commands, and by RQ's plain cancel, which sends no command; the others go on."""
    group = site.start(3, model=SIMULATED)
    jobs = [site.submit(steps=1000) for _ in range(4)]
    after = site.submit(steps=4)
    until(lambda: site.states(jobs).count("started") >= 4)
    canceled = site.run("svdq", "cancel", jobs[1])
    assert canceled.stdout == f"{jobs[1]}  stops at its next step\n", canceled.stderr
    rq.command.send_stop_job_command(site.connection, jobs[2], serializer=fetch(site.connection, jobs[2]).serializer)
    [execution] = fetch(site.connection, jobs[3]).get_executions()
    rq.command.send_stop_execution_command(site.connection, jobs[3], execution.id)
    fetch(site.connection, jobs[0]).cancel()

    assert [view.status for view in site.wait([*jobs, after])] == ["canceled", *["stopped"] * 3, "finished"]
    until(lambda: f"Job {jobs[0]} was canceled or taken over" in group.text, lambda: group.text)
    queue = default(site)
    assert sorted(FailedJobRegistry(queue=queue).get_job_ids()) == sorted(jobs[1:])  # where RQ keeps stopped ones
    until(lambda: not list(site.connection.scan_iter("rq:execution:*")))
    assert not site.connection.exists("rq:wip:svdq-default", keys.CANCELED)
    assert not list((Path(site.settings.storage) / "outputs").glob(f"*{jobs[1]}*"))
    assert "Traceback" not in group.text

    # Once more.
    assert site.run("svdq", "retry", jobs[1]).returncode == 0
    until(lambda: site.states([jobs[1]]) == ["started"], lambda: group.text)
    until(lambda: site.view(jobs[1]).step > 0, lambda: group.text)


@pytest.mark.long
def test_a_group_pauses_and_a_video_stays_until_another_replaces_it(site, until) -> None:
    group = site.start(1, model=SIMULATED)
    job_id = site.submit(steps=120)  # rendered for longer than `svdq cancel` takes to start
    [file] = site.wait([job_id])[0].outputs
    sidecar, before = Path(file).with_suffix(".json"), Path(file).stat().st_mtime_ns
    first = sidecar.read_bytes()

    pause(site.connection)
    until(lambda: "Intake is paused" in group.text, lambda: group.text)
    waiting = site.submit(steps=4)
    # Which takes longer than the group takes between two looks at the queue.
    assert "Paused: no jobs are taken" in site.run("svdq", "status").stdout
    assert site.states([waiting]) == ["queued"]
    resume(site.connection)
    assert site.wait([waiting])[0].status == "finished"

    assert site.run("svdq", "retry", job_id, "--force").returncode == 0
    until(lambda: site.view(job_id).step > 3, lambda: group.text)
    assert site.run("svdq", "cancel", job_id).returncode == 0
    assert site.wait([job_id])[0].status == "stopped"
    assert (sidecar.read_bytes(), Path(file).stat().st_mtime_ns) == (first, before)
    assert job_id in site.run("svdq", "fetch", "--all", "--output", site.folder / "videos").stdout

    # What was asked for once is remembered: this is not the acknowledgement of a video that a crash prevented.
    assert site.run("svdq", "retry", job_id).returncode == 0
    assert site.wait([job_id])[0].status == "finished"
    assert Path(file).stat().st_mtime_ns > before
    assert sidecar.read_bytes() != first
    assert site.connection.ttl(f"rq:job:{job_id}") > 0
