"""Which jobs `svdq cancel`, `retry`, `move` and `fetch` act on, as a user selects them."""

import json
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import redis
import rq
from rq.job import JobStatus

from svdq.producer.queue import SvdqQueue, fetch, statuses
from svdq.producer.settings import Settings
from svdq.producer.status.job_view import JobView
from svdq.producer.status.selection import select
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.conftest import Cli
from tests.finished import add_video
from tests.queued import JOB, add, enqueue, fail, finish, start


def named(connection: redis.Redis, job_id: str, name: str) -> rq.job.Job:
    return enqueue(connection, JOB.model_copy(update={"name": name}), job_id)


def test_all_queued_jobs_are_canceled_however_many(svdq: Cli, connection: redis.Redis) -> None:
    """`svdq list --status queued | xargs svdq cancel` reached fifty."""
    ids = [add(connection, number).id for number in range(120)]
    done = svdq("cancel", "--queued")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 120)
    assert set(statuses(connection, ids)) == {"canceled"}
    done = svdq("cancel", "--all")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "No jobs match.\n")
    assert svdq("retry", "--all", "--since", "1h").returncode == 0
    assert SvdqQueue("svdq-default", connection=connection).get_job_ids() == ids, "in their old order"


def test_by_status_name_and_age(svdq: Cli, connection: redis.Redis) -> None:
    cups = [named(connection, f"{number}" * 20, f"cup{number}") for number in (1, 2)]
    dog = named(connection, "d" * 20, "dog")
    for job in (*cups, dog):
        fail(job)
    connection.hset(cups[0].key, "ended_at", "2020-01-01T00:00:00.000000Z")
    assert svdq("retry", "--failed", "--name", "cup*", "--since", "1h").stdout == f"{cups[1].id}  queued\n"
    assert svdq("retry", "--failed", "--name", "nobody").stderr == "No jobs match.\n"
    assert svdq("move", "--name", "cup2", "--priority", "high").stdout == f"{cups[1].id}  moved\n"
    cups[1].set_status(JobStatus.QUEUED)
    assert svdq("cancel", "--name", "cup?").stdout == f"{cups[1].id}  canceled\n"
    assert statuses(connection, [job.id for job in (*cups, dog)]) == ["failed", "canceled", "failed"]


@pytest.mark.parametrize("command", [["cancel", "--queued"], ["cancel", "--all"], ["move", "--all", "--front"]])
def test_jobs_that_change_after_they_were_selected_are_left_out(
    svdq: Cli, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    waiting, started, ended = (add(connection, number) for number in range(3))

    def select_in_time(*args: Any) -> list[JobView]:
        found = select(*args)
        start(fetch(connection, started.id))
        finish(fetch(connection, ended.id))
        return found

    monkeypatch.setattr("svdq.cli.control.select", select_in_time)
    done = svdq(*command)
    changed = [waiting, started] if command == ["cancel", "--all"] else [waiting]
    outcome = "moved" if command[0] == "move" else "canceled"
    assert (done.returncode, done.stdout, done.stderr) == (0, "".join(f"{job.id}  {outcome}\n" for job in changed), "")
    assert statuses(connection, [ended.id]) == ["finished"]


def test_since_counts_the_end_of_failed_jobs(svdq: Cli, connection: redis.Redis) -> None:
    failed, waiting = add(connection, 1), add(connection, 2)
    fail(failed)
    for job in (failed, waiting):
        connection.hset(job.key, "created_at", "2020-01-01T00:00:00.000000Z")
    assert svdq("cancel", "--queued", "--since", "1h").stderr == "No jobs match.\n"
    assert svdq("retry", "--failed", "--since", "1h").stdout == f"{failed.id}  queued\n"


def test_a_name_as_a_mac_spells_it(svdq: Cli, connection: redis.Redis, settings: Settings) -> None:
    apart = unicodedata.normalize("NFD", "café*")
    job = named(connection, "1" * 20, "café 1")
    assert svdq("cancel", "--name", apart).stdout == f"{job.id}  canceled\n"
    video_id = add_video(Storage(settings.storage), 2, name="café 2")
    assert svdq("fetch", "--name", apart, "--output", "videos").stdout.startswith(video_id)


def test_the_same_selection_everywhere(svdq: Cli, connection: redis.Redis, settings: Settings) -> None:
    cups = [named(connection, f"{number}" * 20, f"cup{number}") for number in (1, 2)]
    dog = named(connection, "d" * 20, "dog")
    assert svdq("list", "--name", "cup*", "--limit", "1").stdout.startswith(cups[1].id)
    assert svdq("list", "1111", "dddd", "--json").stdout.count("\n") == 2
    assert svdq("list", "--since", "1h", "--name", "x").stderr.startswith("There are no such jobs")
    svdq("cancel", "--status", "queued", "--name", "cup*")
    assert svdq("list", "--status", "canceled", "--name", "*2").stdout.startswith(cups[1].id)
    assert svdq("retry", "--status", "canceled", "--name", "cup1").stdout == f"{cups[0].id}  queued\n"
    assert svdq("move", "--status", "queued", "--since", "1h", "--priority", "low").stdout.count("moved") == 2
    wrong = svdq("move", "--status", "failed", "--priority", "low")
    assert (wrong.returncode, "not for jobs that are failed" in wrong.stderr) == (2, True)
    video_id = add_video(Storage(settings.storage), 7, name="cup9")
    assert svdq("fetch", "--status", "finished", "--name", "cup*", "--output", "v").stdout.startswith(video_id)
    assert statuses(connection, [dog.id]) == ["queued"]


@pytest.mark.parametrize("command", [["cancel"], ["retry"], ["move", "--front"], ["fetch", "--output", "videos"]])
def test_ids_or_a_selection(svdq: Cli, connection: redis.Redis, command: list[str]) -> None:
    for arguments in ([], ["f" * 20, "--all"]):
        done = svdq(*command, *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert "Give either IDs" in done.stderr


def test_the_beginning_of_an_id_is_enough(svdq: Cli, connection: redis.Redis, settings: Settings) -> None:
    one, two = named(connection, "abcd1" + "0" * 15, "one"), named(connection, "abcd2" + "0" * 15, "two")
    assert svdq("status", "abcd1").stdout.startswith(one.id)
    assert svdq("move", "abcd2", "--front").stdout == f"{two.id}  moved\n"
    assert svdq("logs", "abcd1").returncode == 0
    for beginning, sentence in (
        ("abcd", f"2 ids: {one.id}, {two.id}; give more characters"),
        ("beef", "There is no job 'beef'"),
        ("*", "There is no job"),
        ("", "There is no job"),
    ):
        done = svdq("cancel", beginning)
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr
    assert svdq("cancel", "abcd1", one.id).stdout == f"{one.id}  canceled\n"
    done = svdq("status", "abc")
    assert done.returncode == 2
    finish(two)
    assert svdq("wait", "abcd2").returncode == 0
    assert svdq("status", "a").returncode == 2

    job_id = add_video(Storage(settings.storage), 7)
    assert svdq("fetch", job_id[:6], "--output", "videos").stdout.startswith(job_id)
    assert f"Job '{two.id}' is finished, but its files" in svdq("fetch", "abcd2", "--output", "videos").stderr


def test_a_wait_that_takes_too_long(svdq: Cli, connection: redis.Redis) -> None:
    done_job, late = add(connection, 1), add(connection, 2)
    finish(done_job)
    started = time.monotonic()
    done = svdq("wait", done_job.id, late.id, "--timeout", "1s", "--json")
    assert 1 <= time.monotonic() - started < 20
    assert done.returncode == 1
    assert [json.loads(line)["status"] for line in done.stdout.splitlines()] == ["finished", "queued"]
    assert done.stderr.endswith("Error: 1 of 2 jobs had not ended after 1s.\n")
    assert svdq("wait", done_job.id, "--timeout", "1s").returncode == 0
    assert svdq("wait", late.id, "--timeout", "soon").returncode == 2
    assert svdq("wait", done_job.id, "--timeout", "").returncode == 2


def test_times_and_photos_are_in_json(svdq: Cli, connection: redis.Redis, photo) -> None:
    submitted = json.loads(svdq("submit", photo, "--json").stdout)
    assert submitted["photo"] == str(photo)
    job = rq.job.Job.fetch(submitted["id"], connection=connection, serializer=rq.serializers.JSONSerializer)
    connection.hset(
        job.key,
        mapping={
            "started_at": "2026-11-22T05:52:36.250000Z",
            "ended_at": "2026-11-22T05:53:36.750000Z",
            "worker_name": "w",
        },
    )
    finish(fetch(connection, job.id))
    for command in (["status", job.id], ["list"], ["wait", job.id]):
        found = json.loads(svdq(*command, "--json").stdout)
        assert (found["started_at"], found["ended_at"]) == ("2026-11-22T05:52:36Z", "2026-11-22T05:53:36Z")
        assert (found["duration_s"], found["worker"], found["photo"]) == (60.5, "w", str(photo))
        assert found["created_at"].endswith("Z")


def test_queued_jobs_of_others_are_canceled_only_when_asked(svdq: Cli, connection: redis.Redis) -> None:
    for number, owner in enumerate(("me", "me", "her", "")):
        enqueue_many(connection, [Entry(job=JOB, job_id=f"{number:020x}", owner=owner)])

    def ids(*command: str) -> set[int]:
        done = svdq(*command, "--json", SVDQ_OWNER="me")
        assert done.returncode == 0, done.stderr
        return {int(json.loads(line)["id"], 16) for line in done.stdout.splitlines()}

    assert ids("list", "--mine") == {0, 1, 3}
    assert ids("list", "--owner", "her") == {2}
    shown = svdq("list").stdout
    assert (shown.count("(owner: me)"), shown.count("(owner: her)")) == (2, 1)
    assert "owner" not in svdq("list", "--owner", "her").stdout
    assert "(owner: her)" in svdq("status", f"{2:020x}").stdout
    assert ids("cancel", "--queued") == {0, 1, 3}  # that without an owner is everybody's
    assert "1 such job of other owners" in svdq("cancel", "--queued", SVDQ_OWNER="me").stderr
    assert ids("cancel", "--queued", "--everybody") == {2}


def test_finished_videos_have_owners_when_redis_has_forgotten_them(
    svdq: Cli, connection: redis.Redis, storage: Storage, tmp_path: Path
) -> None:
    for number, owner in enumerate(("me", "her", "", "her")):
        add_video(storage, number, owner=owner)
    enqueue_many(connection, [Entry(job=JOB, job_id=f"{3:020x}", owner="me")])  # as of an earlier version

    def ids(*options: str) -> set[int]:
        done = svdq("fetch", *options, "--output", tmp_path / "videos", "--json", SVDQ_OWNER="me")
        assert done.returncode == 0, done.stderr
        return {int(json.loads(line)["id"], 16) for line in done.stdout.splitlines()}

    assert ids("--mine") == {0, 2, 3}
    assert ids("--owner", "her") == {1}
