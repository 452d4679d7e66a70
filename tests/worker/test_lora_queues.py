"""Jobs with LoRAs that a group has not wait for one that has them, and hold up no other."""

import threading
import time
from pathlib import Path

import pytest
import redis

from svdq.pipeline.models.lora_folder import LoraFolder, digest_of
from svdq.pipeline.video_parameters import LoraChoice
from svdq.producer import job_control, keys
from svdq.producer.queue import queues
from svdq.producer.status import snapshot
from svdq.producer.status.job_view import view
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.status.registries import counts
from svdq.worker.ability import Ability
from svdq.worker.queue import abilities
from svdq.worker.queue.group_worker import GroupWorker
from tests.conftest import Cli
from tests.queued import enqueue
from tests.ranks import rank, save
from tests.waiting import wait_until
from tests.worker.jobs import JOB, pop, put


def group(connection: redis.Redis, folder: Path | None, model: str | None = None) -> GroupWorker:
    worker = GroupWorker(connection, loras=LoraFolder(folder), ability=Ability(model=model or ""))
    worker.register_birth()
    worker.look_around()
    worker.renew_leases([])
    return worker


def choose(folder: Path, *names: str) -> tuple[LoraChoice, ...]:
    files = {name: folder / f"{name}.safetensors" for name in names}
    for name, file in files.items():
        file.write_text(name)
    return tuple(LoraChoice(name=name, digest=digest_of(file)) for name, file in files.items())


def test_a_job_waits_for_its_loras_and_goes_on_when_they_come(connection, tmp_path, svdq: Cli) -> None:
    a, b = choose(tmp_path, "a", "b")
    without, with_a = group(connection, None), group(connection, tmp_path / "new")
    enqueue(connection, JOB.model_copy(update={"loras": (a,)}), "needs-a", "high")
    enqueue(connection, JOB.model_copy(update={"loras": (a, b)}), "needs-both")
    put(connection, "plain")
    taken = pop(without)
    assert taken is not None
    assert taken.rq_job.id == "plain"
    assert pop(without) is None
    waiting = f"/{without.abilities.own.id}.{keys.WAIT}"
    assert view(connection, "needs-a").queue == f"svdq-high:{waiting}"
    assert view(connection, "needs-a").waits_for == "the LoRA a"
    assert counts(connection)["svdq-default"]["queued"] == 1
    assert connection.hlen(keys.POPPED) == 0
    assert pop(with_a) is None

    (tmp_path / "new").mkdir()
    (tmp_path / "a.safetensors").rename(tmp_path / "new" / "mine.safetensors")
    with_a.look_around()
    put(connection, "later", priority="high")
    taken = pop(with_a)
    assert taken is not None
    assert taken.rq_job.id == "needs-a"  # before those that came later
    with_a.finish([(taken, {"outputs": []})])
    taken = pop(with_a)
    assert taken is not None
    assert taken.rq_job.id == "later"
    assert pop(with_a) is None
    assert view(connection, "needs-both").waits_for == "the LoRA b"

    intake = IntakeStatus(worker="w", loras=dict(with_a.abilities.loras))
    save(connection, rank(0, num_ranks=1, intake=intake))
    reason = "No running worker has the LoRA b; put it into their folder SVDQ_LORAS."
    assert snapshot.estimate(connection, [view(connection, "needs-both")])["needs-both"].reason == reason
    assert "no running worker has the LoRA b" in svdq("status", "needs-both").stdout

    (tmp_path / "b.safetensors").rename(tmp_path / "new" / "b.safetensors")
    with_a.look_around()
    taken = pop(with_a)
    assert taken is not None
    assert taken.rq_job.id == "needs-both"


@pytest.mark.parametrize("action", ["cancel", "move", "retry"])
def test_a_job_that_waits_for_a_lora_can_be_changed(connection, tmp_path, action: str) -> None:
    (a,) = choose(tmp_path, "a")
    without = group(connection, None)
    enqueue(connection, JOB.model_copy(update={"loras": (a,)}), "needs-a")
    assert pop(without) is None
    if action == "move":
        job_control.move(connection, "needs-a", front=True, priority="high")
        assert view(connection, "needs-a").queue.startswith("svdq-high:")
    else:
        job_control.cancel(connection, "needs-a")
        assert view(connection, "needs-a").status == "canceled"
        assert not any(queue.get_job_ids() for queue in queues(connection))
    if action == "retry":
        job_control.retry(connection, "needs-a")
    taken = pop(group(connection, tmp_path))
    assert (taken is None) == (action == "cancel")


def test_a_job_of_a_model_waits_for_a_group_with_both(connection, tmp_path) -> None:
    (a,) = choose(tmp_path, "a")
    of_model, with_a = group(connection, None, "own"), group(connection, tmp_path, "other")
    enqueue(connection, JOB.model_copy(update={"loras": (a,), "model": "own"}), "needs-a")
    assert pop(of_model) is None
    assert view(connection, "needs-a").queue.startswith("svdq-default:own/")
    with_a.look_around()
    assert pop(with_a) is None
    taken = pop(group(connection, tmp_path, "own"))
    assert taken is not None
    assert taken.rq_job.id == "needs-a"


def test_nothing_waits_for_a_folder_of_loras_that_hangs(connection, tmp_path, monkeypatch) -> None:
    (a,) = choose(tmp_path, "a")
    worker = group(connection, tmp_path)
    assert worker.abilities.loras == {"a": a.digest}
    monkeypatch.setattr(abilities, "LISTING_S", 0.1)
    answers = threading.Event()
    monkeypatch.setattr(LoraFolder, "digests", lambda self: answers.wait(60) and {})
    started = time.monotonic()
    worker.look_around()
    assert time.monotonic() - started < 10
    assert worker.abilities.loras == {"a": a.digest}, "those that it had before"
    answers.set()
    wait_until(lambda: worker.look_around() or worker.abilities.loras == {})
