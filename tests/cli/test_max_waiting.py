"""`SVDQ_MAX_WAITING`: an owner has no more waiting jobs; a submission above it is refused as a whole."""

from pathlib import Path

import redis

from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.submitting.enqueue import enqueue_many
from svdq.producer.submitting.entries import Entry
from tests.conftest import Cli
from tests.finished import add_video
from tests.queued import JOB


def num_waiting(connection: redis.Redis) -> int:
    return int(connection.llen("rq:queue:svdq-default"))


def test_a_submission_above_the_limit_is_refused_as_a_whole(
    svdq: Cli, connection: redis.Redis, settings: Settings, photo: Path
) -> None:
    others = [Entry(job=JOB, job_id=f"{number:020x}", owner="ben") for number in range(5)]
    enqueue_many(connection, others)
    limited = {"SVDQ_OWNER": "ana", "SVDQ_MAX_WAITING": "3"}
    submit = ("submit", photo, "--seed", "1")
    assert svdq(*submit, "--variations", 2, **limited).returncode == 0
    for more in ((), ("--dry-run",), ("--at", "23:59")):
        done = svdq(*submit, "--variations", 4, *more, **limited)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "ana has 2 waiting of the 3 that SVDQ_MAX_WAITING allows, and 2 more would be too many" in done.stderr
        assert "submit 1 at most" in done.stderr
    assert num_waiting(connection) == 7
    assert svdq(*submit, "--variations", 3, **limited).returncode == 0  # two of them exist
    assert "submit later" in svdq("submit", photo, "--seed", 9, **limited).stderr
    assert svdq("submit", photo, "--seed", 9, **limited | {"SVDQ_OWNER": "carl"}).returncode == 0
    assert num_waiting(connection) == 9


def test_nothing_is_stored_of_a_submission_above_the_limit(svdq: Cli, settings: Settings, photo: Path) -> None:
    assert svdq("submit", photo, "--variations", 2, SVDQ_MAX_WAITING="1").returncode == 2
    assert list(Storage(settings.storage).entries("inputs")) == []
    done = svdq("submit", photo, SVDQ_MAX_WAITING="0")
    assert (done.returncode, "SVDQ_MAX_WAITING" in done.stderr) == (2, True)


def test_videos_that_are_upscaled_later_count(svdq: Cli, connection: redis.Redis, settings: Settings) -> None:
    ids = [add_video(Storage(settings.storage), number) for number in range(2)]
    finish = ("submit", "--finish", "--upscale", "2")
    done = svdq(*finish, *ids, SVDQ_MAX_WAITING="1")
    assert (done.returncode, "2 more would be too many" in done.stderr) == (2, True), done.stderr
    assert num_waiting(connection) == 0
    assert svdq(*finish, ids[0], SVDQ_MAX_WAITING="1").returncode == 0
