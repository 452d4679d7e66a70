"""Rank 0's intake against a real Redis and a real storage; the test takes the place of the stage loop."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import redis
import rq
import torch
from PIL import Image

from svdq.pipeline.errors import InputError
from svdq.pipeline.loop.protocols import Report, Request
from svdq.pipeline.loop.sample import Resumption, Sample
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer import job_control, keys
from svdq.producer.connection import server_url
from svdq.producer.embedded_redis import ensure_server, stop_server
from svdq.producer.pauses import read_pauses
from svdq.producer.queue import fetch, read_job
from svdq.producer.status.registries import read_workers
from svdq.producer.storage.storage import Storage
from svdq.producer.together import ask_one
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.checkpoint.store import CheckpointStore, Codec, open_checkpoint_store
from svdq.worker.intake import source as intake_module
from svdq.worker.intake.reporter import CircuitBreaker
from svdq.worker.intake.source import Intake
from svdq.worker.outages import connect
from svdq.worker.queue.rq_worker import LEASE_S
from tests.proxy import Proxy
from tests.worker.conftest import with_frames
from tests.worker.jobs import leases, lossy

Open = Callable[..., Intake]  # makes an intake that has started


def take(intake: Intake) -> Request:
    request = intake.take()
    assert request is not None
    return request


def finished(request: Request) -> Report:
    return Report(job_id=request.job_id, body={}, result={"outputs": ["a.gif"], "used": {}, "notice": ""})


def test_a_request_is_what_was_submitted(site, open_intake: Open) -> None:
    photo = site.folder / "wide.png"
    Image.new("RGB", (300, 100), (1, 2, 3)).save(photo)
    job_id = site.submit(photo=photo, frames=None, steps=7, width=128, height=64, seed=5, formats=("mp4", "gif"))
    request = take(open_intake())
    assert request.job_id == job_id
    assert (request.parameters.steps, request.parameters.seed) == (7, 5)
    # What the job leaves open is the model's to say.
    assert (request.parameters.frames, request.parameters.decode_chunk_size) == (9, 9)
    assert request.photo is not None
    assert (request.photo.mode, request.photo.size) == ("RGB", (128, 64))
    assert request.job["job"]["name"] == "wide"
    assert request.job["job"]["formats"] == ["mp4", "gif"]
    assert site.view(job_id).status == "started"


def test_a_group_that_refuses_all_videos_alike_pauses(site, open_intake: Open, until) -> None:
    """A night's photos that were submitted for another family wait for a person, rather than failing one by one."""

    def refuse(parameters: VideoParameters) -> VideoParameters:
        raise InputError("The model fake makes videos of Wan.")

    job_ids = [site.submit() for _ in range(20)]
    intake = open_intake(complete=refuse, burst=True)
    assert intake.take() is None, "the burst ends"
    states = site.states(job_ids)
    assert states.count("failed") >= 3
    assert states.count("queued") >= 14
    until(lambda: read_pauses(site.connection))
    assert "The model fake makes videos of Wan." in read_pauses(site.connection)[0].text


def test_an_error_of_this_program_with_a_job_fails_that_job_and_no_other(site, open_intake: Open, caplog) -> None:
    def complete(parameters: VideoParameters) -> VideoParameters:
        if parameters.steps == 7:
            raise TypeError("no number")
        return with_frames(parameters)

    bad, good = site.submit(steps=7), site.submit()
    assert take(open_intake(complete=complete)).job_id == good
    [view] = site.wait([bad])
    assert view.error == "It could not be prepared: TypeError: no number"
    assert "Traceback" in caplog.text


def take_later(intake: Intake) -> "queue.SimpleQueue[Request]":
    """Take the next request in a thread, as a group does while it computes."""
    taken: queue.SimpleQueue[Request] = queue.SimpleQueue()
    threading.Thread(target=lambda: taken.put(intake.take()), daemon=True).start()
    return taken


def num_calls(site, *commands: str) -> int:
    """How often anyone has sent one of these commands."""
    statistics = site.connection.info("commandstats")
    return sum(statistics.get(f"cmdstat_{command}", {}).get("calls", 0) for command in commands)


def let_it_go_round(site, until) -> None:
    """Return after what is left of a round of the maintenance and another one; each looks at three queues."""
    before = num_calls(site, "lrange")
    until(lambda: num_calls(site, "lrange") >= before + 6)


def test_only_as_many_jobs_are_taken_as_the_stage_wants(site, open_intake: Open, until) -> None:
    """A job that is taken too early cannot be overtaken by an urgent one, nor rendered by another group."""
    job_ids = [site.submit() for _ in range(4)]
    intake = open_intake()
    assert [take(intake).job_id for _ in range(2)] == job_ids[:2]
    let_it_go_round(site, until)
    assert site.queued() == job_ids[2:]


def test_a_command_stops_the_execution_that_it_names(site, open_intake: Open, until, caplog) -> None:
    job_ids = [site.submit() for _ in range(2)]
    intake = open_intake()
    for job_id in job_ids:
        assert take(intake).job_id == job_id
    [execution] = fetch(site.connection, job_ids[1]).get_executions()
    stop = partial(rq.command.send_command, site.connection, intake.status().worker, "stop-execution")
    stop(job_id=job_ids[0], execution_id="an earlier one")
    stop(job_id=job_ids[1], execution_id=execution.id)
    until(lambda: site.connection.smembers("svdq:canceled") == {job_ids[1].encode()})
    assert f"Job {job_ids[0]} cannot be stopped here" in caplog.text


def test_an_end_that_cannot_be_written_holds_up_nothing_else(site, open_intake: Open, until) -> None:
    """Since another program has given a key of the job the wrong type."""
    job_ids = [site.submit() for _ in range(3)]
    intake = open_intake()
    bad, good = take(intake), take(intake)
    site.connection.set(f"rq:job:{bad.job_id}:dependents", "x")
    for request in (bad, good):
        intake.ended(finished(request))
    assert take(intake).job_id == job_ids[2]
    until(lambda: site.view(good.job_id).status == "finished")
    until(lambda: intake.status().in_flight == (job_ids[2],))


def test_no_more_is_in_flight_than_the_group_can_hold(site, open_intake: Open, until) -> None:
    """A slow last rank must not make one group take the whole queue."""
    job_ids = [site.submit() for _ in range(4)]
    intake = open_intake(max_in_flight=2)
    assert [take(intake).job_id for _ in range(2)] == job_ids[:2]
    take_later(intake)
    let_it_go_round(site, until)
    assert site.queued() == job_ids[2:]


def test_a_suspect_of_a_crash_runs_alone(site, open_intake: Open, until) -> None:
    """Nothing else is in flight, and no other photo is prepared, until it has ended."""
    marked: list[str] = []
    first, bad, after = (site.submit() for _ in range(3))
    site.connection.hset(keys.CRASHES, bad, "{}")
    intake = open_intake(mark_prepare=lambda job_id: nullcontext(marked.append(job_id)))
    request, following = take(intake), take_later(intake)
    until(lambda: site.view(bad).status == "started")
    let_it_go_round(site, until)
    assert (request.job_id, {*marked}) == (first, {first})

    intake.ended(finished(request))
    request, following = following.get(timeout=60), take_later(intake)
    let_it_go_round(site, until)
    assert (request.job_id, {*marked}) == (bad, {first, bad})
    assert site.queued() == [after]

    intake.ended(finished(request))
    assert following.get(timeout=60).job_id == after
    assert not site.connection.exists(keys.CRASHES)


def test_a_suspect_that_waits_is_rendered_before_a_drained_group_ends(site, open_intake: Open, until) -> None:
    first, bad = site.submit(), site.submit()
    site.connection.hset(keys.CRASHES, bad, "{}")
    intake = open_intake()
    request, following = take(intake), take_later(intake)
    until(lambda: site.view(bad).status == "started")
    intake.drain()
    intake.ended(finished(request))
    assert following.get(timeout=60).job_id == bad
    intake.ended(Report(job_id=bad, body={}, result={}, failure="It broke."))
    assert intake.take() is None
    assert [view.status for view in site.wait([first, bad])] == ["finished", "failed"]


def test_photos_of_jobs_that_others_take_do_not_pile_up(site, open_intake: Open, until) -> None:
    """A job waited for all of them to be prepared where several groups share a queue and the storage is slow."""
    marked: list[str] = []
    may_prepare = threading.Event()

    @contextmanager
    def mark(job_id: str) -> Iterator[None]:
        marked.append(job_id)
        if job_id != first:
            may_prepare.wait(60)
        yield

    first, slow, *others, last = (site.submit() for _ in range(5))
    intake = open_intake(mark_prepare=mark)
    assert take(intake).job_id == first
    until(lambda: slow in marked)
    for _ in (slow, *others):
        site.connection.lpop("rq:queue:svdq-default")
        before = num_calls(site, "lindex")
        until(lambda before=before: num_calls(site, "lindex") >= before + 6)  # two looks at three queues
    may_prepare.set()
    assert take(intake).job_id == last
    assert {*marked} == {first, slow, last}


def test_an_urgent_job_overtakes_jobs_that_are_not_taken_yet(site, open_intake: Open) -> None:
    first, second = site.submit(), site.submit()
    intake = open_intake()
    assert take(intake).job_id == first
    urgent = site.submit(priority="high")
    requests = [take(intake), take(intake)]
    assert [(request.job_id, request.priority) for request in requests] == [(urgent, 0), (second, 1)]


def test_burst_ends_when_queue_and_flights_are_empty(site, open_intake: Open) -> None:
    job_id = site.submit()
    intake = open_intake(burst=True)
    request = take(intake)
    later = site.submit()  # while the first is in flight
    assert take(intake).job_id == later
    intake.ended(finished(request))
    intake.ended(Report(job_id=later, body={}, result={}, failure="It broke."))
    assert intake.take() is None
    assert site.states([job_id, later]) == ["finished", "failed"]


def test_draining_leaves_the_queue_alone(site, open_intake: Open) -> None:
    first, second = site.submit(), site.submit()
    intake = open_intake()
    assert take(intake).job_id == first
    intake.drain()
    assert intake.take() is None
    assert site.queued() == [second]


def test_taken_jobs_go_back_when_the_group_stops(site, open_intake: Open) -> None:
    job_ids = [site.submit() for _ in range(4)]
    intake = open_intake()
    requests = [take(intake) for _ in range(3)]
    intake.ended(finished(requests[1]))
    intake.close(return_to_queue=True)
    assert site.queued() == [job_ids[0], job_ids[2], job_ids[3]]
    assert site.view(job_ids[1]).status == "finished"
    assert ask_one(site.connection, read_workers())[0] == []


BAD_PHOTOS = {
    "damaged": (lambda path: path.write_bytes(path.read_bytes()[:200]), "was damaged in the storage; submit it again"),
    "gone": (lambda path: path.unlink(), "submit it again"),
}


@pytest.mark.parametrize("what", BAD_PHOTOS)
@pytest.mark.parametrize("is_seen_ahead", [True, False])
def test_a_bad_photo_fails_its_job_and_no_other(site, open_intake: Open, until, what: str, is_seen_ahead: bool) -> None:
    other = site.folder / "other.jpg"
    Image.effect_noise((200, 100), 70).convert("RGB").save(other)
    before = site.submit()
    bad = site.submit(photo=other)
    after = site.submit()
    damage, sentence = BAD_PHOTOS[what]
    damage(Path(site.settings.storage) / site.view(bad).parameters["image"])
    if not is_seen_ahead:
        before = None
        site.connection.lpop("rq:queue:svdq-default")
    intake = open_intake()
    if before is not None:
        assert take(intake).job_id == before
    assert take(intake).job_id == after
    view = until(lambda: (seen := site.view(bad)).ended and seen)
    assert view.status == "failed"
    assert sentence in view.error


def test_a_photo_with_too_many_pixels_is_not_decoded(site, open_intake: Open, until) -> None:
    job_id = site.submit()
    intake = open_intake(max_pixels=100, burst=True)
    assert intake.take() is None
    assert "more than the 100 that are allowed" in site.view(job_id).error


@pytest.mark.usefixtures("own_server")
def test_an_end_is_written_when_redis_is_back(site, open_intake: Open, until) -> None:
    first, second = site.submit(), site.submit()
    intake = open_intake()
    done, broken = take(intake), take(intake)
    stop_server(site.settings.home)
    intake.ended(finished(done))
    intake.ended(Report(job_id=broken.job_id, body={}, result={}, failure="It broke."))
    with pytest.raises(redis.ConnectionError):
        site.connection.ping()

    ensure_server(site.settings.home)

    assert [view.status for view in site.wait([first, second])] == ["finished", "failed"]
    assert site.view(second).error == "It broke."
    third = site.submit()
    assert take(intake).job_id == third


@pytest.mark.parametrize(("lost", "number"), [("lmove", 1), ("lmove", 2), ("unpack(ARGV, i + 1", 1)])
def test_a_job_whose_name_was_lost_on_its_way_is_taken_all_the_same(
    site, open_intake: Open, lost: str, number: int
) -> None:
    """It would wait for its lease, or a minute for RQ's maintenance, which spends a retry; a burst would end before."""
    job_ids = [site.submit() for _ in range(number)]
    link = lossy(server_url(site.settings), lost)
    intake = open_intake(link, burst=True)
    began = time.monotonic()
    requests = [take(intake) for _ in job_ids]
    assert time.monotonic() - began < LEASE_S
    assert not link.lost
    assert sorted(request.job_id for request in requests) == sorted(job_ids)
    for request in requests:
        intake.ended(finished(request))
    assert intake.take() is None
    assert {site.connection.hget(f"rq:job:{job_id}", "retries_left") for job_id in job_ids} == {b"3"}
    assert not site.connection.exists(keys.POPPED)


def test_checkpoints_that_are_written_after_their_jobs_end_are_removed(
    site, open_intake: Open, until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake_module, "SWEEP_S", 0.2)
    store = open_checkpoint_store("local", site.settings.home, Storage(site.settings.storage))
    ended, waiting = site.submit(), site.submit()
    intake = open_intake(checkpoints=Checkpoints(store, Codec(model="fake", device=torch.device("cpu"))))
    intake.ended(finished(take(intake)))
    until(lambda: site.view(ended).ended)
    for job_id in (ended, waiting):
        store.open(job_id)
        store.write(job_id, 5, b"late")
    until(lambda: not store.steps(ended))
    assert store.steps(waiting) == [5]


CODEC = Codec(model="fake", device=torch.device("cpu"))


def write_checkpoint(site, job_id: str) -> CheckpointStore:
    """Write a checkpoint of a job, before its third step."""
    parameters = read_job(fetch(site.connection, job_id)).parameters
    tensors = {"latents": torch.zeros(1, 2, 4, 8, 8)}
    sample = Sample(job_id=job_id, parameters=parameters, boundaries=(0, 6), step=2, tensors=tensors)
    store = open_checkpoint_store("local", site.settings.home, Storage(site.settings.storage))
    store.open(job_id)
    store.write(job_id, 2, CODEC.encode(sample))
    return store


def test_a_job_without_progress_goes_on_from_its_checkpoint(site, open_intake: Open) -> None:
    job_id = site.submit()
    store = write_checkpoint(site, job_id)
    site.connection.hset(f"rq:job:{job_id}", "meta", "{}")
    request = take(open_intake(checkpoints=Checkpoints(store, CODEC)))
    assert request.resume is not None
    assert request.resume.resumed == (Resumption(from_step=2, steps_done_again=0),)


def test_a_job_that_another_group_had_goes_on_from_its_checkpoint(site, open_intake: Open, until) -> None:
    """The state that was read before the other group took the job was still used: the video began anew."""
    first, second = site.submit(), site.submit()

    def let_it_look_ahead() -> None:
        before = num_calls(site, "hmget")
        until(lambda: num_calls(site, "hmget") >= before + 4)  # at most two a round

    store = open_checkpoint_store("local", site.settings.home, Storage(site.settings.storage))
    intake = open_intake(checkpoints=Checkpoints(store, CODEC))
    assert take(intake).job_id == first
    let_it_look_ahead()
    site.connection.lrem("rq:queue:svdq-default", 1, second)  # as the other group does
    let_it_look_ahead()
    write_checkpoint(site, second)
    site.connection.lpush("rq:queue:svdq-default", second)
    assert take(intake).resume is not None


def test_a_job_that_the_user_stops_is_neither_finished_nor_failed(site, open_intake: Open, until) -> None:
    job_id = site.submit()
    intake = open_intake()
    take(intake)
    assert job_control.cancel(site.connection, job_id) == "stopping"
    intake.ended(Report(job_id=job_id, body={}, result={}, canceled=True))
    until(lambda: site.states([job_id]) == ["stopped"])
    until(lambda: not intake.status().in_flight)
    assert (intake.status().finished, intake.status().failed) == (0, 0)
    assert [(seen.finished, seen.failed) for seen in ask_one(site.connection, read_workers())[0]] == [(0, 0)]


class Forgetter:
    """Notes whose checkpoints are to go."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget(self, job_id: str) -> None:
        self.forgotten.append(job_id)

    def furthest(self, *_: object) -> None: ...

    def open(self, *_: object) -> None: ...

    def sweep(self, *_: object) -> None: ...


@pytest.mark.parametrize("failure", [None, "It broke."])
def test_an_end_that_redis_has_written_and_could_not_say_so_counts(
    site, open_intake: Open, until, failure: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = site.submit()
    forgetter = Forgetter()
    link = lossy(server_url(site.settings), "'DEL', 'rq:execution:")
    intake = open_intake(link, forgetter)
    request = take(intake)
    intake.ended(finished(request) if failure is None else Report(job_id=job_id, body={}, result={}, failure=failure))
    until(lambda: forgetter.forgotten)
    assert not link.lost
    assert forgetter.forgotten == [job_id]
    assert site.states([job_id]) == ["finished" if failure is None else "failed"]
    assert (intake.status().finished, intake.status().failed) == ((1, 0) if failure is None else (0, 1))
    assert len(fetch(site.connection, job_id).results()) == 1
    assert "taken over" not in caplog.text


@pytest.mark.parametrize("status", ["queued", "canceled"])
def test_the_result_of_a_job_that_was_taken_away_is_dropped(
    site, open_intake: Open, until, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    job_id, other = site.submit(), site.submit()
    forgetter = Forgetter()
    intake = open_intake(checkpoints=forgetter)
    request = take(intake)
    with site.connection.pipeline() as pipeline:
        pipeline.delete("rq:wip:svdq-default")
        pipeline.hset(f"rq:job:{job_id}", "status", status)
        pipeline.execute()
    intake.ended(finished(request))
    request = take(intake)
    intake.ended(finished(request))
    until(lambda: site.view(other).ended)
    until(lambda: other in forgetter.forgotten)
    assert site.view(job_id).status == status
    assert "its result here is dropped" in caplog.text
    # Whoever has it now goes on from its checkpoints.
    assert forgetter.forgotten == ([other] if status == "queued" else [job_id, other])


def test_the_status_counts_jobs_in_flight_finished_and_failed(site, open_intake: Open) -> None:
    ids = [site.submit() for _ in range(3)]
    intake = open_intake()
    requests = [take(intake) for _ in range(3)]
    status = intake.status()
    assert (status.in_flight, status.finished, status.failed, status.pace_s) == (tuple(ids), 0, 0, None)
    (worker,) = ask_one(site.connection, read_workers())[0]
    assert status.worker == worker.name
    parameters = {"frames": 2, "width": 64, "height": 64, "steps": 4}
    for request, failure in zip(requests, (None, None, "It broke."), strict=True):
        body = {"job": request.job, "parameters": parameters}  # of a rank: not found finished already
        result = {} if failure else {"outputs": [], "used": {}, "notice": ""}
        intake.ended(Report(job_id=request.job_id, body=body, result=result, failure=failure))
    site.wait(ids)
    status = intake.status()
    assert (status.finished, status.failed) == (2, 1)
    assert status.pace_s is not None
    assert not status.draining
    intake.drain()
    assert intake.status().draining


def test_three_different_jobs_that_fail_alike_open_the_breaker() -> None:
    breaker = CircuitBreaker()
    assert not breaker.record_failure("a", "Out of GPU memory in step 3 of 25; 1.5 GiB.")
    assert not breaker.record_failure("b", "Out of GPU memory in step 12 of 25; 2.25 GiB.")
    assert not breaker.record_failure("b", "Out of GPU memory in step 12 of 25; 2.25 GiB.")
    assert breaker.record_failure("c", "Out of GPU memory in step 1 of 9; 3 GiB.")
    assert not breaker.record_failure("d", "Out of GPU memory in step 1 of 9; 3 GiB.")


def test_a_success_or_another_reason_resets_the_breaker() -> None:
    breaker = CircuitBreaker()
    breaker.record_failure("a", "One.")
    breaker.record_failure("b", "One.")
    breaker.record_success()
    assert not breaker.record_failure("c", "One.")
    breaker.record_failure("d", "One.")
    assert not breaker.record_failure("e", "Another.")


def test_ids_in_reasons_do_not_make_them_different() -> None:
    breaker = CircuitBreaker()
    jobs = ("0123456789abcdef0123", "ffffffffff0123456789", "a0a0a0a0a0a0a0a0a0a0")
    assert [breaker.record_failure(job, f"Job {job} failed.") for job in jobs] == [False, False, True]


def test_leases_are_renewed_while_the_bookkeeping_waits(site, open_intake: Open, until, monkeypatch) -> None:
    """Its connection does not answer; a living group must not lose its jobs for that."""
    monkeypatch.setattr(intake_module, "BEAT_S", 0.1)
    with Proxy(site.settings.redis_url) as proxy:
        job_id = site.submit()
        link = connect(proxy.url)
        take(open_intake(link, lease_connection=site.connection))
        proxy.silent.set()
        (held,) = leases(site.connection)
        end_s = leases(site.connection)[held]
        until(lambda: leases(site.connection)[held] > end_s + 1)
        assert site.view(job_id).status == "started"
        proxy.silent.clear()
