"""Jobs that name a model wait in queues of their own, which only its workers take from."""

import json
import shutil
from pathlib import Path

import pytest
import redis

from svdq.pipeline.errors import InputError
from svdq.producer import job_control
from svdq.producer.job_control import move, place, retry
from svdq.producer.queue import queues
from svdq.producer.results.run_report import jobs_left
from svdq.producer.settings import Settings
from svdq.producer.status import snapshot
from svdq.producer.status.job_view import view
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.status.registries import counts, newest_ids
from svdq.producer.submitting.draft import Draft
from svdq.producer.submitting.model_choice import expect
from svdq.producer.submitting.submission import submit
from tests.conftest import Cli
from tests.queued import SvdJob, enqueue
from tests.ranks import rank, save

JOB = SvdJob(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1)
FOUR_STEP = SvdJob.model_validate(JOB.model_dump() | {"model": "/models/4step.toml"})


def test_a_job_that_names_a_model_is_another_job_and_the_others_stay() -> None:
    assert FOUR_STEP.model == "4step"
    assert "model" not in JOB.model_dump(mode="json")
    assert FOUR_STEP.digest(seed_was_drawn=True) != JOB.digest(seed_was_drawn=True)
    for name in ("", "..", ".hidden", "a\nb"):
        with pytest.raises(ValueError, match="model"):
            SvdJob.model_validate(JOB.model_dump() | {"model": name})


def test_queues_of_models_are_counted_listed_moved_and_retried(connection: redis.Redis) -> None:
    enqueue(connection, JOB, "any")
    enqueue(connection, FOUR_STEP, "own")
    enqueue(connection, FOUR_STEP, "other")
    assert [queue.name for queue in queues(connection)] == [
        "svdq-high", "svdq-default:4step", "svdq-default", "svdq-low",
    ]  # fmt: skip
    assert counts(connection)["svdq-default:4step"]["queued"] == 2
    assert jobs_left(connection)["queued"] == 3
    assert set(newest_ids(connection)) == {"any", "own", "other"}

    move(connection, "own", front=True, priority="high")
    assert view(connection, "own").queue == "svdq-high:4step"
    place(connection, "other", "own")
    assert connection.lrange("rq:queue:svdq-high:4step", 0, -1) == [b"other", b"own"]
    with pytest.raises(InputError, match="'any' waits for other workers than 'own'"):
        place(connection, "any", "own")

    assert dict(job_control.cancel_many(connection, ["own", "other"])) == {"own": "canceled", "other": "canceled"}
    retry(connection, "own", priority="low")
    assert view(connection, "own").queue == "svdq-low:4step"
    job_control.cancel(connection, "own")
    for registry in ("canceled:svdq-high:4step", "canceled:svdq-low:4step"):
        connection.delete(f"rq:{registry}")
    assert list(counts(connection)) == ["svdq-high", "svdq-default", "svdq-low"]  # not what was used once


def test_a_job_whose_model_no_worker_runs_says_so_and_holds_up_no_other(connection: redis.Redis) -> None:
    for number in range(5):
        enqueue(connection, FOUR_STEP, f"own-{number}")
    enqueue(connection, JOB, "any")
    intake = IntakeStatus(worker="w")
    save(connection, rank(0, intake=intake), rank(1))

    def expected(job_id: str) -> tuple[int | None, str]:
        found = snapshot.estimate(connection, [view(connection, job_id)])[job_id]
        return found.num_ahead, found.reason

    assert expected("own-3") == (None, "No worker runs the model 4step.")
    assert expected("any") == (0, "No worker has finished a video of such a size yet.")
    assert snapshot.take(connection).estimate.reason == "No worker runs the model 4step."
    save(connection, rank(0, "there-2", num_ranks=1, intake=intake, model="/models/4step.toml"))
    assert expected("own-3") == (3, "No worker has finished a video of such a size yet.")


def test_a_named_model_decides_family_and_defaults(connection: redis.Redis, settings: Settings) -> None:
    save(
        connection,
        rank(0, "a-1", num_ranks=1, model="xt", family="svd", facts={"defaults": {"steps": 25}}),
        rank(0, "b-1", num_ranks=1, model="xt-fast", family="svd", facts={"defaults": {"steps": 4}}),
        rank(0, "c-1", num_ranks=1, model="wan-4step", family="wan"),
    )
    assert expect(settings, connection).model is None
    fast, wan = (expect(settings, connection, name).model for name in ("xt-fast", "wan-4step"))
    assert fast is not None
    assert wan is not None
    assert (fast.family.name, fast.facts["defaults"], wan.family.name) == ("svd", {"steps": 4}, "wan")


def test_submit_names_a_model_that_runs_or_says_that_none_does(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    save(connection, rank(0, num_ranks=1, model="wan-4step", family="wan"))
    made = svdq("submit", photo, "--model", "wan-4step", "--json")
    job = view(connection, json.loads(made.stdout)["id"])
    assert (job.queue, job.parameters["family"], made.stderr) == ("svdq-default:wan-4step", "wan", "")
    missing = svdq("submit", photo, "--model", "/models/xt.toml")
    assert "No worker runs the model xt; its videos wait for one.\n" in missing.stderr
    assert "no worker runs the model xt" in svdq("status", missing.stdout.split()[0]).stdout


def test_lists_folders_and_python_take_the_family_of_a_named_model(
    svdq: Cli, connection: redis.Redis, settings: Settings, photo: Path, tmp_path: Path
) -> None:
    save(
        connection,
        rank(0, "a-1", num_ranks=1, model="xt", family="svd"),
        rank(0, "b-1", num_ranks=1, model="wan-4step", family="wan"),
    )
    name = "/models/wan-4step.toml"
    (tmp_path / "list.csv").write_text(f"photo,model,seed\n{photo},{name},2\n")
    (tmp_path / "inbox").mkdir()
    shutil.copy(photo, tmp_path / "inbox" / "cup.jpg")
    listed = svdq("batch", tmp_path / "list.csv", "--json")
    watched = svdq("watch", tmp_path / "inbox", "--once", "--stable-for", "10ms", "--model", name, "--json")
    found = [json.loads(line) for line in watched.stdout.splitlines()]
    ids = [json.loads(listed.stdout)["id"], *(event["id"] for event in found if event["event"] == "submitted")]
    ids += [submit(settings, photo, Draft(model=name, seed=1))[0].id]
    assert len(ids) == 3
    for each in ids:
        parameters = view(connection, each).parameters
        assert (parameters["family"], parameters["model"]) == ("wan", "wan-4step")


def test_each_model_of_a_sweep_decides_the_family_of_its_video(svdq: Cli, connection: redis.Redis, photo: Path) -> None:
    save(
        connection,
        rank(0, "a-1", num_ranks=1, model="xt", family="svd"),
        rank(0, "b-1", num_ranks=1, model="wan-4step", family="wan"),
    )
    made = svdq("submit", photo, "--sweep", "model=xt,wan-4step", "--json").stdout.splitlines()
    jobs = [view(connection, json.loads(line)["id"]).parameters for line in made]
    assert [(job["model"], job.get("family")) for job in jobs] == [("xt", None), ("wan-4step", "wan")]
