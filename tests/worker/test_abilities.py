"""A job that a group cannot make is left to one that can, in its place; or fails, or waits, if there is none."""

import json
import time

import pytest
import redis

from svdq.pipeline.models.families import published_model
from svdq.producer import job_control, keys
from svdq.producer.job import Job
from svdq.producer.queue import queues
from svdq.producer.status.estimates import NOT_ABLE
from svdq.producer.status.job_view import view
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.status.snapshot import estimate
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from svdq.worker.ability import READ, Ability
from svdq.worker.memory_plan import RankInfo
from svdq.worker.queue.group_worker import GroupWorker
from tests.conftest import Cli
from tests.queued import WanJob, enqueue
from tests.ranks import rank, save
from tests.waiting import wait_until
from tests.worker.conftest import Site
from tests.worker.jobs import JOB, pop, put

GIB = 2**30
LARGE = JOB.model_copy(update={"width": 1024, "height": 576, "frames": 25, "decode_chunk_size": 8})
WAN = WanJob(image=JOB.image, name="photo", seed=1)
FITTING = LARGE.model_copy(update={"width": 512, "height": 320, "frames": 9})


def ability(family: str = "svd", gib: int = 80, **fields: object) -> Ability:
    """The ability of a GPU with so much memory."""
    ranks = (RankInfo(capacity=gib * GIB, weights=5 * GIB, device="A GPU", encodes=True, decodes=True),)
    facts = published_model(family).facts
    return Ability(**{"model": family, "family": family, "facts": facts, "dtype": "float16", "ranks": ranks} | fields)


def group(connection: redis.Redis, ability: Ability, **options: object) -> GroupWorker:
    worker = GroupWorker(connection, ability=ability, **options)
    worker.register_birth()
    worker.look_around()
    return worker


def forget(connection: redis.Redis, worker: GroupWorker) -> None:
    """Let the days pass after which a group is forgotten."""
    [member] = [name for name in connection.zrange(keys.ABILITIES, 0, -1) if worker.name.encode() in name]
    connection.zadd(keys.ABILITIES, {member: time.time() - keys.ABILITY_TTL_S - 60})


def take_all(worker: GroupWorker) -> list[str]:
    """The ids of what a group takes, in order."""
    worker.look_around()
    taken = []
    while (active := pop(worker)) is not None:
        taken.append(active.id)
    return taken


@pytest.mark.parametrize(
    ("able", "less", "job", "waits_for"),
    [
        (ability(), ability(gib=13), LARGE, "a GPU with "),
        (ability(), ability(upscales=False), JOB.model_copy(update={"upscale": "2"}), "an upscaler"),
        (ability("wan"), ability(), WAN, "a model of Wan"),
    ],
    ids=["memory", "upscaler", "family"],
)
def test_a_group_leaves_what_only_another_can_make(
    connection, svdq: Cli, able: Ability, less: Ability, job: Job, waits_for: str
) -> None:
    small, large = group(connection, less), group(connection, able)
    for job_id, asked in (("a", job), ("b", job), ("c", FITTING), ("d", job)):
        enqueue(connection, asked, job_id)
    assert take_all(small) == ["c"]
    assert connection.hlen(keys.POPPED) == 0
    shown = view(connection, "a")
    assert shown.status == "queued"
    assert shown.waits_for.startswith(waits_for)
    assert f"queued, waits for {waits_for}" in svdq("list", "a").stdout
    save(connection, rank(0, num_ranks=1, intake=IntakeStatus(worker="w", ability=less.id)))
    assert estimate(connection, [shown])["a"].reason == NOT_ABLE
    assert f"waits for {shown.waits_for} (no running worker can make it)" in svdq("status", "a").stdout
    assert take_all(large) == ["a", "b", "d"]
    assert view(connection, "a").waits_for == ""


def test_what_no_known_group_can_make_is_taken_and_fails_there(connection) -> None:
    small = group(connection, ability(gib=13))
    put(connection, "fits")
    enqueue(connection, LARGE, "too-large")
    assert take_all(small) == ["fits", "too-large"]


def test_it_waits_where_that_is_set_until_a_group_comes_that_can(connection) -> None:
    small = group(connection, ability(gib=13), wait_for_able=True)
    enqueue(connection, LARGE, "a")
    enqueue(connection, LARGE, "b")
    assert take_all(small) == []
    assert view(connection, "b").waits_for.startswith("a GPU with ")
    assert take_all(group(connection, ability("wan"), wait_for_able=True)) == []
    assert take_all(group(connection, ability())) == ["a", "b"]


def test_a_group_that_has_gone_is_waited_for_until_it_is_forgotten(connection) -> None:
    small, large = group(connection, ability(gib=13)), group(connection, ability())
    large.register_death()
    enqueue(connection, LARGE, "a")
    assert take_all(small) == []
    forget(connection, large)
    assert take_all(small) == ["a"]


def test_a_worker_that_starts_may_be_able(connection) -> None:
    connection.zadd(keys.STARTING, {"other:1 svd svd": time.time() + 60})
    small = group(connection, ability(gib=13))
    enqueue(connection, LARGE, "a")
    assert take_all(small) == []
    connection.delete(keys.STARTING)
    assert take_all(small) == ["a"]


def test_a_job_is_taken_at_most_once_by_each_group_that_cannot_make_it(connection) -> None:
    small, middle, large = (group(connection, ability(gib=gib)) for gib in (9, 13, 80))
    moderate = LARGE.model_copy(update={"frames": 14, "decode_chunk_size": 2})
    for job_id, job in (("a", LARGE), ("b", moderate), ("c", LARGE), ("d", moderate)):
        enqueue(connection, job, job_id)
    assert take_all(small) == []
    assert {view(connection, job_id).queue.count(".") for job_id in "ac"} == {1}, "two abilities in one step"
    assert take_all(middle) == ["b", "d"]
    assert take_all(middle) == take_all(small) == []
    assert take_all(large) == ["a", "c"]


def test_owners_take_turns_and_what_is_moved_to_the_front_stays_there(connection) -> None:
    small, large = group(connection, ability(gib=13)), group(connection, ability())
    for owner, job_ids in (("ana", "abc"), ("bob", "xyz")):
        enqueue_many(
            connection, [Entry(job=LARGE, job_id=job_id, priority="default", owner=owner) for job_id in job_ids]
        )
    job_control.move(connection, "y", front=True, priority=None)
    job_control.move(connection, "c", front=True, priority=None)
    assert take_all(small) == []
    job_control.move(connection, "z", front=True, priority=None)
    put(connection, "later")
    assert take_all(large) == ["z", "c", "y", "a", "x", "b", "later"]


def test_priorities_hold_between_what_is_left_and_what_is_not(connection) -> None:
    small, large = group(connection, ability(gib=13)), group(connection, ability())
    for priority in ("low", "default", "high"):
        enqueue(connection, LARGE, f"left-{priority}", priority)
    assert take_all(small) == []
    put(connection, "fits", priority="default")
    assert take_all(large) == ["left-high", "left-default", "fits", "left-low"]


def test_a_job_of_a_newer_version_waits_for_that(connection) -> None:
    newer = ability(reads={**READ, "svd": (*READ["svd"], "sharpness")})
    enqueue(connection, JOB, "a")
    kwargs = {"job": JOB.model_dump(mode="json") | {"sharpness": 0.5}}
    connection.hset("rq:job:a", "data", json.dumps(["svdq.producer.queue.render", None, [], kwargs]))
    small, large = group(connection, ability()), group(connection, newer)
    assert take_all(small) == []
    assert view(connection, "a").waits_for == "a newer svdq"
    forget(connection, large)
    assert take_all(small) == []
    assert view(connection, "a").status == "failed"
    assert "not those of a job of this version" in (view(connection, "a").error or "")


@pytest.mark.parametrize("text", ["", "[]", '{"family": 7}', ability("wan", facts={"vae": "x"}).model_dump_json()])
def test_what_others_write_as_an_ability_stops_no_group(connection, text: str) -> None:
    connection.set(f"{keys.ABILITY}0bad", text)
    connection.zadd(keys.ABILITIES, {"0bad svdq-there-1-x.1.a ": time.time()})
    small = group(connection, ability("wan", gib=6))
    enqueue(connection, WAN, "a")
    assert take_all(small) == ["a"]
    assert all(not queue.unable for queue in queues(connection))


@pytest.mark.slow
def test_a_burst_leaves_what_only_another_worker_can_make_and_says_so(site: Site, upscaler: dict[str, str]) -> None:
    able = site.start(1, **upscaler)
    wait_until(lambda: site.connection.zcard(keys.ABILITIES) == 1)
    able.kill_all()
    plain, upscaled = site.submit(), site.submit(upscale="2")
    ended = site.run("svdq", "worker", "--ranks", 1, "--device", "cpu", "--burst")
    assert ended.returncode == 1, ended.stderr
    assert "It ended because the queued jobs wait for other workers: 1 job for an upscaler." in ended.stdout
    assert site.states([plain, upscaled]) == ["finished", "queued"]

    site.start(1, **upscaler)
    [done] = site.wait([upscaled])
    assert done.status == "finished"
