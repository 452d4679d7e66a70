"""`svdq remove` and `svdq mark`: single videos from the command line."""

import json
from collections.abc import Callable

import pytest
import redis

from svdq.producer.chains import record_link
from svdq.producer.storage.storage import Storage
from svdq.producer.verdicts import read_verdicts
from tests.conftest import Cli
from tests.queued import add, finish, write_files

Svdq = Callable[..., tuple[int, str, str]]


@pytest.fixture(name="svdq")
def _svdq(svdq: Cli) -> Svdq:
    def run(*arguments: str) -> tuple[int, str, str]:
        done = svdq(*arguments)
        return done.returncode, done.stdout, done.stderr

    return run


def finished(connection: redis.Redis, storage: Storage, number: int) -> str:
    job = add(connection, number, name=f"cup{number}")
    write_files(storage, job)
    finish(job)
    return job.id


def files(storage: Storage) -> list[str]:
    return sorted(entry.key for folder in ("outputs", "checkpoints") for entry in storage.entries(folder))


def test_a_finished_video_is_removed_with_its_record_and_checkpoints(
    svdq: Svdq, connection: redis.Redis, storage: Storage
) -> None:
    kept, removed = finished(connection, storage, 1), finished(connection, storage, 2)
    storage.write_bytes(f"checkpoints/{removed}/7.safetensors", b"x")
    code, output, _ = svdq("remove", removed, "--yes", "--json")
    assert code == 0
    assert json.loads(output) == {"id": removed, "outcome": "removed"}
    left = "\n".join(files(storage))
    assert removed not in left
    assert kept in left
    assert svdq("status", removed)[0] == 2


def test_a_video_that_redis_has_forgotten_is_found_by_a_short_id(
    svdq: Svdq, connection: redis.Redis, storage: Storage
) -> None:
    job_id = "abcdef0123456789abcd"
    sidecar = {
        "svdq": "1.0",
        "job_id": job_id,
        "job": {"image": f"inputs/{'0' * 64}.jpg", "name": "cup", "seed": 1},
        "model": {"name": "tiny", "notice": ""},
        "outputs": [f"outputs/cup-{job_id}.mp4"],
        "seconds": {},
        "versions": {},
    }
    storage.write_bytes(f"outputs/cup-{job_id}.mp4", b"video")
    storage.write_bytes(f"outputs/cup-{job_id}.json", json.dumps(sidecar | {"job": {"later": 1}}).encode())
    code, _, error = svdq("remove", job_id, "--yes")
    assert (code, "of another version of svdq" in error) == (2, True)
    storage.write_bytes(f"outputs/cup-{job_id}.json", json.dumps(sidecar).encode())
    storage.write_bytes("outputs/notes.txt", b"mine")
    assert svdq("mark", "reject", "abcdef")[0] == 0
    assert read_verdicts(connection, [job_id]) == ["reject"]
    code, output, _ = svdq("remove", "--rejected", "--yes")
    assert (code, output) == (0, f"{job_id}  removed\n")
    assert files(storage) == ["outputs/notes.txt"]
    assert read_verdicts(connection, [job_id]) == [None]


def test_nothing_is_removed_if_one_of_the_videos_is_needed(
    svdq: Svdq, connection: redis.Redis, storage: Storage
) -> None:
    job_id, waiting, link = finished(connection, storage, 1), add(connection, 2).id, add(connection, 3).id
    before = files(storage)
    for other, words in ((waiting, f"svdq cancel {waiting}"), ("0" * 18 + "aa", "no job")):
        code, _, error = svdq("remove", job_id, other, "--yes")
        assert (code, words in error) == (2, True), error
    svdq("mark", "keep", job_id)
    code, _, error = svdq("remove", job_id, "--yes")
    assert (code, f"svdq mark none {job_id}" in error) == (2, True)
    svdq("mark", "none", job_id)
    with connection.pipeline() as pipeline:
        record_link(pipeline, job_id, link)
        pipeline.execute()
    code, _, error = svdq("remove", job_id, "--yes")
    assert (code, f"svdq cancel {link}" in error) == (2, True)
    assert files(storage) == before


def test_remove_asks_and_needs_something_to_remove(svdq: Svdq, connection: redis.Redis, storage: Storage) -> None:
    job_id = finished(connection, storage, 1)
    for arguments, words in (((job_id,), "--yes"), (("--yes",), "--rejected"), (("--rejected", job_id), "--rejected")):
        code, _, error = svdq("remove", *arguments)
        assert (code, words in error) == (2, True), error


def test_cancel_of_a_finished_job_names_remove(svdq: Svdq, connection: redis.Redis, storage: Storage) -> None:
    job_id = finished(connection, storage, 1)
    assert f"svdq remove {job_id}" in svdq("cancel", job_id)[2]


def test_commands_that_change_jobs_print_json(svdq: Svdq, connection: redis.Redis, storage: Storage) -> None:
    queued = add(connection, 1).id
    for arguments, outcome in (
        (("move", queued, "--front"), "moved"),
        (("cancel", queued), "canceled"),
        (("retry", queued), "queued"),
    ):
        code, output, _ = svdq(*arguments, "--json")
        assert (code, json.loads(output)["outcome"]) == (0, outcome)
    assert json.loads(svdq("pause", "--json")[1]) == {"paused": True}
    resumed = json.loads(svdq("resume", "--json")[1])
    assert (resumed["paused"], len(resumed["reasons"])) == (False, 1)
    assert svdq("prune", "--older-than", "1h", "--dry-run", "--json")[:2] == (0, "")
