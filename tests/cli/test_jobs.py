"""The commands that look at jobs, as a user runs them."""

import json
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import redis
import rq

from svdq.pipeline.planning.costs import ShapeCosts
from svdq.producer import keys
from svdq.producer.connection import session
from svdq.producer.embedded_redis import stop_server
from svdq.producer.queue import SvdqQueue
from svdq.producer.settings import Settings
from svdq.producer.status import job_view
from svdq.producer.status.ranks import Condition, IntakeStatus
from tests.conftest import Cli
from tests.forks import Piped
from tests.queued import NOTICE, add, fail, finish, start
from tests.ranks import rank, save
from tests.terminal import terminal
from tests.waiting import wait_until


def test_wait(svdq: Cli, connection: redis.Redis) -> None:
    good, bad, late = add(connection, 1), add(connection, 2), add(connection, 3)
    finish(good)
    done = svdq("wait", good.id)
    assert (done.returncode, done.stdout) == (0, f"{good.id}  photo  finished, {NOTICE}: /videos/a b.mp4\n")
    fail(bad)
    timer = threading.Timer(0.7, finish, [late])
    timer.start()
    done = svdq("wait", late.id, bad.id, good.id, "--json")
    timer.join()
    assert done.returncode == 1
    seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert [view["id"] for view in seen] == [late.id, bad.id, good.id]
    assert seen[1]["error"] == "The frames are black."
    assert seen[2]["outputs"] == ["/videos/a b.mp4"]


def wait_and_read(job: rq.job.Job, num_lines: int, before_last: Callable[[], object] = lambda: None) -> list[str]:
    """Wait for a job in a process of its own, end it when so many lines have come on stderr, and return these."""
    with Piped("wait", job.id) as process:
        lines = [process.stderr.readline() for _ in range(num_lines - 1)]
        before_last()
        lines.append(process.stderr.readline())
        finish(job)
        assert process.stdout.read() == f"{job.id}  photo  finished, {NOTICE}: /videos/a b.mp4\n"
        assert process.stderr.read() == ""
        assert process.wait() == 0
    return lines


def test_wait_says_that_no_worker_runs(home: Path, connection: redis.Redis) -> None:
    (line,) = wait_and_read(add(connection, 1), 1)
    assert line == "No worker is running; start one with `svdq worker`.\n"


def test_progress_on_a_terminal(home: Path, connection: redis.Redis) -> None:
    job = add(connection, 1)
    start(job, step=2, notice=NOTICE)
    save(connection, rank(0, intake=IntakeStatus(worker="w", in_flight=(job.id,), costs=(COSTS,))))
    save(connection, rank(1))
    with terminal("wait", job.id, size=(24, 120), NO_COLOR="1") as screen:
        shown = screen.read_until("step 2 of 4")
        finish(job)
        assert screen.end() == 0
    assert screen.text.rstrip().endswith(": /videos/a b.mp4")
    assert f"photo  started, step 2 of 4, done in about 25 s, {NOTICE}" in shown
    assert not re.search(r"\x1b\[[0-9;]*[34][0-7]m", shown), "colours, although NO_COLOR is set"


def test_submit_and_wait(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    def render() -> None:
        [job] = wait_until(SvdqQueue("svdq-default", connection=connection).get_jobs)
        finish(job)

    thread = threading.Thread(target=render)
    thread.start()
    done = svdq("submit", photo, "--wait", "--json")
    thread.join()
    answer = json.loads(done.stdout)
    assert (answer["status"], answer["outputs"]) == ("finished", ["/videos/a b.mp4"])
    assert done.returncode == 0


def test_a_wait_without_redis_says_so_at_once_and_how_to_go_on(
    svdq: Cli, own_server: Path, settings: Settings, monkeypatch
) -> None:
    monkeypatch.setattr(job_view, "MAX_OUTAGE_S", 2.0)
    with session(settings) as connection:
        job = add(connection, 1)
    timer = threading.Timer(1.0, stop_server, [own_server])
    timer.start()
    done = svdq("wait", job.id)
    timer.join()
    assert done.returncode == 3
    *_, outage, error = done.stderr.splitlines()
    assert re.fullmatch(r"Redis has not answered since \d\d:\d\d; retrying\.", outage)
    assert f"Job {job.id} goes on; follow it with `svdq wait {job.id}`" in error


def test_status_list_info(svdq: Cli, connection: redis.Redis) -> None:
    finish(add(connection, 1))
    job = add(connection, 2)
    start(job, step=2, rank=1, notice=NOTICE)
    listed = svdq("list").stdout.splitlines()
    assert listed[0] == f"{job.id}  photo  started, step 2 of 4, {NOTICE}"
    assert listed[1].endswith(f"finished, {NOTICE}: /videos/a b.mp4")
    (in_flight,) = json.loads(svdq("status", "--json").stdout)["jobs"]
    assert (in_flight["id"], in_flight["step"], in_flight["rank"]) == (job.id, 2, 1)
    info = svdq("status").stdout
    assert f"{job.id}  photo  started, step 2 of 4 (no worker is running), {NOTICE}" in info
    assert "svdq-default" in info
    assert json.loads(svdq("status", "--json").stdout)["queues"][1]["finished"] == 1
    assert svdq("status", job.id).stdout == f"{job.id}  photo  started, step 2 of 4 (no worker is running), {NOTICE}\n"
    document = json.loads(svdq("status", job.id, "--json").stdout)
    assert (document["eta_s"], document["eta_reason"]) == (None, "No worker is running.")


def test_queued_jobs_are_listed_in_the_order_in_which_workers_take_them(svdq: Cli, connection: redis.Redis) -> None:
    first, second, third = (add(connection, number) for number in range(3))
    urgent = add(connection, 3, "high")
    assert svdq("move", third.id, "--front").returncode == 0
    listed = [line.split()[0] for line in svdq("list", "--status", "queued").stdout.splitlines()]
    assert listed == [urgent.id, third.id, first.id, second.id]
    assert svdq("list", "--status", "queued", "--limit", 1).stdout.split()[0] == urgent.id


def test_a_worker_that_starts_is_not_called_missing(svdq: Cli, connection: redis.Redis) -> None:
    job = add(connection, 1)
    for command in (["status"], ["top"], ["status", job.id]):
        assert "o worker is running" in svdq(*command).stdout
    connection.zadd(keys.STARTING, {"host:1": connection.time()[0] + 60})
    for command in (["status"], ["top"], ["status", job.id]):
        shown = svdq(*command).stdout
        assert "worker is starting" in shown
        assert "o worker is running" not in shown
    assert json.loads(svdq("status", "--json").stdout)["eta_reason"] == "A worker is starting."


#: Costs of a job of the shape of JOB: 10 s a step, 5 s for the decode.
COSTS = ShapeCosts(frames=25, width=1024, height=576, guided=True, step_s=(10.0,), encode_s=1.0, decode_s=5.0)


def test_status_shows_estimates_and_conditions_of_a_worker(svdq: Cli, connection: redis.Redis) -> None:
    first, stuck, queued = (add(connection, number) for number in (1, 2, 3))
    start(first, step=2, rank=1)
    start(stuck, step=4, rank=1)
    condition = Condition(
        effect="Videos wait to be written", reason="No space left.", since=time.time(), attempts=7, job_ids=(stuck.id,)
    )
    intake = IntakeStatus(worker="w", in_flight=(stuck.id, first.id), pace_s=60.0, costs=(COSTS,))
    save(connection, rank(0, intake=intake))
    save(connection, rank(1))
    lines = svdq("status", first.id, queued.id).stdout.splitlines()
    assert lines[0] == f"{first.id}  photo  started, step 2 of 4, done in about 25 s"
    assert lines[1] == f"{queued.id}  photo  queued, next, done in about 46 s"
    # The end of the queued job is that of all.
    assert re.search(r"3 to do, done in about 46 s, at \d\d:\d\d\.", svdq("status").stdout)
    assert json.loads(svdq("status", "--json").stdout)["eta_s"] == 46.0

    save(connection, rank(1, conditions=(condition,)))
    lines = svdq("status", first.id, stuck.id, queued.id).stdout.splitlines()
    assert lines[0] == f"{first.id}  photo  started, step 2 of 4, done in about 25 s"
    assert lines[1].startswith(f"{stuck.id}  photo  started, waiting for storage: No space left. (since ")
    assert lines[1].endswith(", tried 7 times)")
    assert lines[2] == f"{queued.id}  photo  queued, next (the storage is unavailable)"
    document = json.loads(svdq("status", stuck.id, "--json").stdout)
    assert (document["eta_s"], document["condition"]["attempts"]) == (None, 7)
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", document["condition"]["since"])

    shown = svdq("status").stdout
    assert "On here, rank 1: Videos wait to be written: No space left. (since " in shown
    assert "3 to do; the end is unknown: The storage is unavailable.\n" in shown
    assert re.search(f"{stuck.id}  photo  .*waits for storage", shown)
    document = json.loads(svdq("status", "--json").stdout)
    assert (document["eta_s"], document["eta_reason"]) == (None, "The storage is unavailable.")
    assert [entry["rank"] for entry in document["ranks"]] == [0, 1]
    assert [entry["reason"] for entry in document["conditions"]] == ["No space left."]

    connection.delete(rank(1).key)  # as when its time is over
    shown = svdq("status").stdout
    assert "No space left." not in shown
    assert "the end is unknown: Not all ranks of the group on here" in shown
    svdq("pause")
    assert svdq("status", queued.id).stdout == f"{queued.id}  photo  queued, next (jobs are not taken)\n"


def test_status_says_how_webhooks_are_refused(svdq: Cli, connection: redis.Redis) -> None:
    for second in (1000, 2000):
        connection.xadd(keys.WEBHOOKS, {"type": "video.created", "id": "a"}, id=f"{second}000-0")
    assert "webhook" not in svdq("status").stdout, "they are only on their way"
    connection.set(keys.WEBHOOKS_REFUSAL, "was answered with 401")
    day = f"{datetime.fromtimestamp(1000):%Y-%m-%d %H:%M}"
    sentence = f"2 webhooks not accepted, the oldest since {day}: the last attempt was answered with 401."
    assert sentence in svdq("status").stdout.splitlines()
    assert json.loads(svdq("status", "--json").stdout)["webhooks"] == {
        "waiting": 2,
        "oldest_at": "1970-01-01T00:16:40Z",
        "error": "The last attempt was answered with 401.",
    }
    connection.xtrim(keys.WEBHOOKS, maxlen=0)  # as when a day is over
    nothing = {"waiting": 0, "oldest_at": None, "error": None}
    assert json.loads(svdq("status", "--json").stdout)["webhooks"] == nothing


def test_list_has_a_limit(svdq: Cli, connection: redis.Redis) -> None:
    jobs = [add(connection, number) for number in range(5)]
    shown = [line.split()[0] for line in svdq("list", "--limit", 2).stdout.splitlines()]
    assert shown == [jobs[4].id, jobs[3].id]
    done = svdq("list", "--limit", 10**20)  # more than Redis can count
    assert (done.returncode, done.stdout, "--limit" in done.stderr) == (2, "", True)


def test_waiting_says_once_what_keeps_jobs_waiting(svdq: Cli, connection: redis.Redis) -> None:
    svdq("pause")
    condition = Condition(effect="No video is begun", reason="Gone.", since=time.time(), attempts=2)
    save(connection, rank(0, conditions=(condition,)))
    lines = wait_and_read(add(connection, 1), 3, before_last=lambda: connection.delete(keys.RANKS))
    assert "Paused: no jobs are taken until `svdq resume`.\n" in lines
    assert [line for line in lines if line.startswith("On here, rank 0: No video is begun: Gone. (since ")]
    assert lines[2].startswith("No worker is running")


def test_an_empty_list_names_svdq_submit(svdq: Cli) -> None:
    done = svdq("list")
    assert (done.returncode, done.stdout) == (0, "")
    assert "svdq submit" in done.stderr


@pytest.mark.usefixtures("own_server")
def test_redis(svdq: Cli, home: Path) -> None:
    assert svdq("redis", "url").returncode == 1
    url = svdq("redis", "start").stdout.strip()
    assert url.startswith("unix://")
    assert svdq("redis", "url").stdout.strip() == url
    for command in ("start", "url"):
        assert json.loads(svdq("redis", command, "--json").stdout) == {"url": url}
    assert "Stopped" in svdq("redis", "stop").stdout
    assert "not running" in svdq("redis", "stop").stdout
    assert json.loads(svdq("redis", "stop", "--json").stdout) == {"stopped": False}
    assert json.loads(svdq("redis", "url", "--json").stdout) == {"url": None}


def test_inspect(svdq: Cli, home: Path, tmp_path: Path, photo: Path) -> None:
    record = {
        "svdq": "0.1.0",
        "job_id": "1",
        "job": {"seed": 5, "decode_chunk_size": None, "guidance_scale_2": None, "formats": ["mp4", "gif"]},
        "model": {
            "name": "preview",
            "notice": NOTICE,
            "weights": {"unet": "svd.safetensors"},
            "loras": [{"file": "calm.safetensors", "component": "unet", "strength": 0.5}],
        },
        "source": "holiday/day 1/IMG_0001.jpg",
        "memory_bytes": {"step": 8310000000},
    }
    sidecar = tmp_path / "a.json"
    sidecar.write_text(json.dumps(record))
    assert json.loads(svdq("inspect", sidecar, "--json").stdout) == record
    shown = svdq("inspect", sidecar).stdout
    assert NOTICE in shown
    assert "8.3 GB" in shown
    assert "holiday/day 1/IMG_0001.jpg" in shown
    rows = [line.split("  ", 1) for line in shown.splitlines()]
    wanted = {("decode_chunk_size", "all"), ("guidance_scale_2", "none"), ("formats", "mp4, gif")}
    wanted |= {("model weights", "unet svd.safetensors")}
    wanted |= {("model loras", "file calm.safetensors component unet strength 0.5")}
    assert wanted <= {(name, value.strip()) for name, *more in rows for value in more}
    assert "--like" in shown
    assert svdq("inspect", photo).returncode == 2
