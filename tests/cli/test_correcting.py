"""Corrected submissions, which replace what still waits, and more videos like a finished one."""

import json
from pathlib import Path

import pytest
import redis

from svdq.producer.queue import fetch, read_arguments
from svdq.producer.status.job_view import view
from svdq.producer.storage.storage import Storage
from tests.conftest import Cli
from tests.finished import add_video
from tests.queued import add, start

WAN = ("--family", "wan", "--size", "128x80", "--frames", "5")


def submit(svdq: Cli, *arguments: object) -> list[str]:
    done = svdq("submit", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["id"] for line in done.stdout.splitlines()]


def status(connection: redis.Redis, job_id: str) -> str:
    return view(connection, job_id).status


def test_a_corrected_prompt_names_the_older_video_and_replaces_it(
    svdq: Cli, connection: redis.Redis, photo: Path
) -> None:
    prompt = photo.with_suffix(".txt")
    prompt.write_text("A wave brakes.")
    [old] = submit(svdq, photo, *WAN)
    prompt.write_text("A wave breaks.")
    done = svdq("submit", photo, *WAN)
    assert done.stderr == f"1 older video of this photo still waits: `svdq cancel {old}`.\n"
    assert status(connection, old) == "queued"

    prompt.write_text("A wave breaks on the beach.")
    dry = svdq("submit", photo, *WAN, "--replace", "--dry-run")
    assert dry.stderr == "2 older videos of this photo would be canceled.\n"
    assert status(connection, old) == "queued"
    done = svdq("submit", photo, *WAN, "--replace")
    assert done.stderr == "Canceled, since they still waited: 2 older videos of this photo.\n"
    new = done.stdout.split()[0]
    assert (status(connection, old), status(connection, new)) == ("canceled", "queued")
    assert svdq("submit", photo, *WAN, "--replace").stderr == ""


def test_nothing_is_canceled_unless_all_is_queued(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    [old] = submit(svdq, photo, *WAN)
    bad = photo.with_name("bad.jpg")
    bad.write_text("no photo")
    assert svdq("submit", photo, bad, *WAN, "--prompt", "It breaks.", "--replace").returncode == 2
    assert svdq("submit", photo, "--prompt", "It breaks.", "--size", "63x80", "--replace").returncode == 2
    assert status(connection, old) == "queued"


def test_only_what_waits_and_is_ones_own_is_replaced(
    svdq: Cli, connection: redis.Redis, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SVDQ_OWNER", "ben")
    [theirs] = submit(svdq, photo, *WAN, "--seed", "1")
    monkeypatch.setenv("SVDQ_OWNER", "ana")
    [begun] = submit(svdq, photo, *WAN, "--seed", "2")
    start(fetch(connection, begun))
    [scheduled] = submit(svdq, photo, *WAN, "--seed", "3", "--at", "+2h")
    image = read_arguments(fetch(connection, theirs)).job.image
    nobodys = add(connection, 1, image=image).id
    upscaled = add(connection, 2, image=image, finishes="photo-" + "0" * 20, upscale="2").id
    other = add(connection, 3).id
    connection.hset("rq:job:" + "f" * 20, "data", "no record")
    connection.lpush("rq:queue:svdq-default", "f" * 20)

    done = svdq("submit", photo, *WAN, "--seed", "4", "--depends-on", begun, "--replace")
    assert done.returncode == 0, done.stderr
    found = {each: status(connection, each) for each in (theirs, begun, scheduled, nobodys, upscaled, other)}
    assert found == {
        theirs: "queued",
        begun: "started",
        scheduled: "canceled",
        nobodys: "canceled",
        upscaled: "queued",
        other: "queued",
    }


def test_a_chain_with_another_end_replaces_the_links_that_differ(
    svdq: Cli, connection: redis.Redis, photo: Path
) -> None:
    first, second, third = submit(svdq, photo, *WAN, "--then", "It brakes.", "--then", "It foams.")
    same, new = submit(svdq, photo, *WAN, "--then", "It breaks.", "--replace")
    assert same == first
    found = [status(connection, each) for each in (first, second, third, new)]
    assert found == ["queued", "canceled", "canceled", "deferred"]


def test_more_videos_like_one(svdq: Cli, connection: redis.Redis, storage: Storage) -> None:
    liked = add_video(
        storage, 7, name="my cup", folder="trip/day {1}", source="trip/day 1/cup.jpg", motion_bucket_id=99
    )
    key = f"outputs/trip/day {{1}}/my cup-{liked}.json"
    recorded = json.loads(storage.read(key))
    lora = {"name": "style", "strength": 0.8, "digest": "0" * 16}  # which need not be here: workers have it
    recorded["job"] |= {"loras": [lora], "model": "svd-xt", "upscale": "2"}
    storage.write_text(key, json.dumps(recorded))
    made = [submit(svdq, "--more", liked, "--variations", "3") for _ in range(2)]
    assert "still wait" not in svdq("submit", "--more", liked).stderr
    ids = {*made[0], *made[1]}
    assert len(ids - {liked}) == 6, "each command makes new ones"
    found = [read_arguments(fetch(connection, job_id)) for job_id in ids]
    seeds = {each.job.seed for each in found}
    assert len(seeds - {7}) == 6
    for each in found:
        assert each.job.model_dump(mode="json") | {"seed": 7} == recorded["job"]
        assert each.source == "trip/day 1/cup.jpg"

    [own] = submit(
        svdq, "--more", liked, "--seed", "5", "--frames", "3", "--output", "other", "--name", "{photo}-{seed}"
    )
    job = read_arguments(fetch(connection, own)).job
    assert (job.folder, job.name, job.seed, job.frames, job.motion_bucket_id) == ("other", "cup-5", 5, 3, 99)


def test_what_there_can_be_no_more_of(svdq: Cli, storage: Storage, photo: Path, connection: redis.Redis) -> None:
    liked = add_video(storage, 7)
    for others in ((photo,), ("--replace",), ("--finish",)):
        assert "leave out PHOTO" in svdq("submit", *others, "--more", liked).stderr
    assert "--replace" in svdq("submit", "--finish", liked, "--upscale", "2", "--replace").stderr
    waiting = add(connection, 9).id
    assert f"{waiting!r}" in svdq("submit", "--more", waiting).stderr
    [image] = storage.entries("inputs")
    storage.remove(image.key)
    done = svdq("submit", "--more", liked)
    assert (done.returncode, done.stdout) == (2, "")
    assert "was removed from the storage" in done.stderr
