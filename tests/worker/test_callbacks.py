"""RQ's callbacks: only what the setting allows is called, beside the worker and never for longer than it may."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import rq

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model import ModelInfo
from svdq.pipeline.transport.ports import Report
from svdq.producer.embedded_redis.server import ensure_server
from svdq.producer.job import Job
from svdq.producer.queue import RENDER, SvdqQueue, fetch
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.worker.intake.feeder import IntakeOptions
from svdq.worker.intake.intake import Intake
from svdq.worker.jobs.callbacks import Callbacks
from svdq.worker.jobs.rq_adapter import GroupWorker
from svdq.worker.redis_link import connect

JOB = Job(image=f"inputs/{'0' * 64}.jpg", name="photo", seed=1)

#: What a user may write: each leaves a file, with what it was told.
USERS_MODULE = """
import json, os, signal, time
from pathlib import Path

HERE = Path(__file__).parent

def leave(job, **told):
    told |= {"status": job.get_status().value, "pid": os.getpid()}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    told["blocked"] = len(blocked)
    (HERE / f"{job.id}.json").write_text(json.dumps(told))

def finished(job, connection, result):
    assert connection.ping()
    leave(job, result=result)

def failed(job, connection, kind, value, traceback):
    leave(job, kind=kind.__name__, value=str(value))

def stopped(job, connection):
    leave(job)

def breaks(job, connection, result):
    leave(job)
    raise RuntimeError("The user's own mistake.")

def hangs(job, connection, result):
    leave(job)
    time.sleep(600)
"""
NAMES = tuple(f"users_hooks.{name}" for name in ("finished", "failed", "stopped", "breaks", "hangs"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user's module lies, and what it leaves."""
    folder = tmp_path / "hooks"
    folder.mkdir()
    (folder / "users_hooks.py").write_text(USERS_MODULE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.fixture
def callbacks(home: Path, folder: Path) -> Iterator[Callbacks]:
    callbacks = Callbacks(Settings.load(callbacks=NAMES))
    yield callbacks
    callbacks.close(wait=False)


@pytest.fixture
def worker(connection: redis.Redis, callbacks: Callbacks) -> Iterator[GroupWorker]:
    worker = GroupWorker(connection, on_stop=print, on_shutdown=print, callbacks=callbacks)
    worker.start()
    yield worker
    worker.end()


def put(connection: redis.Redis, job_id: str, **hooks: rq.Callback) -> None:
    queue = SvdqQueue("svdq-default", connection=connection)
    queue.enqueue(RENDER, kwargs={"job": JOB.model_dump(mode="json")}, job_id=job_id, **hooks)


def told(folder: Path, job_id: str) -> dict[str, object]:
    return json.loads((folder / f"{job_id}.json").read_text())


def status_of(connection: redis.Redis, job_id: str) -> str:
    return str(fetch(connection, job_id).get_status().value)


def test_each_end_calls_its_own(connection, worker: GroupWorker, callbacks: Callbacks, folder: Path) -> None:
    hooks = {
        "on_success": rq.Callback("users_hooks.finished"),
        "on_failure": rq.Callback("users_hooks.failed"),
        "on_stopped": rq.Callback("users_hooks.stopped"),
    }
    for job_id in ("a", "b", "c"):
        put(connection, job_id, **hooks)
    first, second, third = (worker.pop() for _ in range(3))
    worker.succeed(first, {"outputs": ["a.mp4"]})
    worker.fail(second, "There is no light in this photo.")
    worker.stop(third)
    callbacks.close(wait=True)

    assert told(folder, "a")["result"] == {"outputs": ["a.mp4"]}
    assert told(folder, "a")["status"] == "finished"
    assert told(folder, "b")["value"] == "There is no light in this photo."
    assert (told(folder, "b")["kind"], told(folder, "b")["status"]) == ("SvdqError", "failed")
    assert told(folder, "c")["status"] == "stopped"
    assert {told(folder, job_id)["blocked"] for job_id in "abc"} == {0}  # they can be ended as any process
    assert os.getpid() not in {told(folder, job_id)["pid"] for job_id in "abc"}


def test_what_a_callback_does_wrong_harms_no_job(
    connection, worker: GroupWorker, callbacks: Callbacks, folder: Path, caplog, capfd
) -> None:
    put(connection, "a", on_success=rq.Callback("users_hooks.breaks"))
    put(connection, "b", on_success=rq.Callback("users_hooks.hangs", timeout=1))
    put(connection, "c", on_success=rq.Callback("users_hooks.finished"))
    for flight in [worker.pop() for _ in range(3)]:
        worker.succeed(flight, {"outputs": []})
    callbacks.close(wait=True)

    assert [status_of(connection, job_id) for job_id in "abc"] == ["finished"] * 3
    assert (folder / "a.json").exists()
    assert (folder / "c.json").exists()
    assert "The user's own mistake." in capfd.readouterr().err
    assert "The callback users_hooks.breaks of job a failed: exit code 1." in caplog.text
    assert "The callback users_hooks.hangs of job b" in caplog.text


def test_a_stop_waits_for_none(connection, worker: GroupWorker, callbacks: Callbacks, folder: Path, until) -> None:
    put(connection, "a", on_success=rq.Callback("users_hooks.hangs"))
    worker.succeed(worker.pop(), {"outputs": []})
    until(lambda: (folder / "a.json").exists())
    callbacks.close(wait=False)
    assert not Path(f"/proc/{told(folder, 'a')['pid']}").exists()


def test_a_failure_that_is_tried_again_calls_nothing(
    connection, worker: GroupWorker, callbacks: Callbacks, folder: Path
) -> None:
    queue = SvdqQueue("svdq-default", connection=connection)
    queue.enqueue(
        RENDER,
        kwargs={"job": JOB.model_dump(mode="json")},
        job_id="a",
        retry=rq.Retry(max=1, interval=60),
        on_failure=rq.Callback("users_hooks.failed"),
    )
    worker.fail(worker.pop(), "It broke.")
    callbacks.close(wait=True)
    assert not (folder / "a.json").exists()


@pytest.mark.parametrize("name", ["users_hooks.finished2", "os.system", "users_hooks", "users_hooks.finished.__call__"])
def test_what_is_not_allowed_is_refused(connection, worker: GroupWorker, callbacks: Callbacks, name: str) -> None:
    put(connection, "a", on_success=rq.Callback(name))
    assert worker.pop() is None
    result = fetch(connection, "a").latest_result()
    assert result is not None
    assert f"Its callback '{name}' is not among those that the worker's SVDQ_CALLBACKS allows." in result.exc_string


def test_an_intake_runs_them_and_a_drained_one_waits(house, folder: Path) -> None:
    settings = Settings.load(home=house.settings.home, callbacks=NAMES)
    intake = Intake(
        connect(ensure_server(settings.home)),
        Storage(settings.storage),
        ModelInfo(name="fake", notice="", default_frames=9),
        IntakeOptions(burst=True, callbacks=Callbacks(settings)),
    )
    job = fetch(house.connection, house.submit())
    job.delete()
    queue = SvdqQueue("svdq-default", connection=house.connection)
    queue.enqueue(RENDER, kwargs=job.kwargs, job_id="a", on_success=rq.Callback("users_hooks.finished"))
    intake.start()
    request = intake.take()
    assert request is not None
    intake.ended(Report(job_id="a", body={}, result={"outputs": ["a.gif"], "used": {}, "notice": ""}))
    assert intake.take() is None
    intake.close(put_back=False)
    assert told(folder, "a")["result"]["outputs"] == ["a.gif"]


@pytest.mark.parametrize("value", ["finished", "users hooks.a", "a..b", "a.b()", "a.b,."])
def test_a_setting_that_names_no_function_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SVDQ_CALLBACKS", value)
    with pytest.raises(InputError, match=r"SVDQ_CALLBACKS .* is not the dotted name of a function"):
        Settings.load()


def test_the_setting_is_a_list(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load().callbacks == ()
    monkeypatch.setenv("SVDQ_CALLBACKS", "a.b, c.d.e,")
    assert Settings.load().callbacks == ("a.b", "c.d.e")
    monkeypatch.delenv("SVDQ_CALLBACKS")
    home.mkdir()
    (home / "svdq.toml").write_text('callbacks = ["x.y"]')
    assert Settings.load().callbacks == ("x.y",)
