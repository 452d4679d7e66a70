"""The record of a rank: how busy it is, how fast its group is, and what it logs about a job."""

import logging
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import redis
import torch

from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.planning.costs import CostModel, CostPrior, Shape
from svdq.pipeline.transport.topology import Topology
from svdq.producer.job_log import read_log
from svdq.producer.queue import fetch
from svdq.producer.status.ranks import Condition, IntakeStatus, RankStatus, read_groups
from svdq.worker.active_job import SampleJob
from svdq.worker.health import progress
from svdq.worker.health.pictures import Pictures
from svdq.worker.health.progress import ProgressMonitor
from svdq.worker.health.rank_log import JobLogHandler
from svdq.worker.health.rank_status import BusyMeter, Pace, RankReporter, describe, published_step_s
from svdq.worker.queue.crashes import CrashMarker
from tests.queued import SvdJob, enqueue
from tests.worker.jobs import JOB

pytestmark = pytest.mark.slow

PARAMETERS = SvdParameters(seed=1, steps=8, frames=2, width=64, height=64, decode_chunk_size=2)
TAKEN = SampleJob(
    job=SvdJob(image=f"inputs/{'a' * 64}.png", name="photo", seed=1), execution=("registry", "execution")
).model_dump(mode="json")
SAMPLE = Sample(job_id="0123456789abcdef0123", parameters=PARAMETERS, boundaries=(0, 4, 10), step=3, job=TAKEN)


class Stuck:
    """A part that waits for the storage."""

    condition = Condition(effect="Videos wait", reason="Full.", since=1.0, attempts=2, job_ids=(SAMPLE.job_id,))


def open_reporter() -> RankReporter:
    topology = Topology(rank=1, num_ranks=2)
    return RankReporter(
        describe(topology, torch.device("cpu"), ModelInfo(name="fake", notice="a notice")), torch.device("cpu")
    )


def test_a_rank_knows_the_published_time_of_a_step_on_its_gpu() -> None:
    a14b = {"base": "Wan-AI/Wan2.2-I2V-A14B-Diffusers"}
    preset = ModelInfo(name="wan2.2-4step", notice="", made_of=a14b)
    assert published_step_s(preset, "NVIDIA GeForce RTX 4090") == 30.5
    assert published_step_s(ModelInfo(name=a14b["base"], notice=""), "NVIDIA H100 80GB HBM3") == 6.78
    assert published_step_s(preset, "NVIDIA RTX A5000") is None
    assert published_step_s(preset, "") is None
    assert published_step_s(ModelInfo(name="/models/mine", notice=""), "NVIDIA GeForce RTX 4090") is None


def test_the_meter_counts_what_is_computed() -> None:
    meter = BusyMeter()
    assert meter.share() == 0.0
    meter.begin()
    time.sleep(0.05)
    meter.begin()  # the next step of the same sample
    assert 0.0 < meter.share() <= 1.0
    meter.end()
    before = meter.share()
    time.sleep(0.1)
    assert 0.0 < meter.share() < before


def test_the_pace_leaves_idle_time_out() -> None:
    pace = Pace()
    assert pace.seconds(100.0) is None
    for now_s in (100.0, 103.0, 108.0):
        pace.finished(now_s)
    assert pace.seconds(109.0) == 4.0
    pace.idle()
    pace.finished(5000.0)
    assert pace.seconds(5000.0) == 4.0
    pace.finished(5007.0)
    assert pace.seconds(5007.0) == 5.0


def test_the_pace_of_short_videos_is_not_that_of_a_long_one_in_flight() -> None:
    pace = Pace()
    for number in range(21):
        pace.finished(number * 0.2)
    assert pace.seconds(4.1) == pytest.approx(0.2)
    assert pace.seconds(64.0) == pytest.approx(60.0)
    pace.idle()
    assert pace.seconds(9999.0) == pytest.approx(0.2)


def test_a_record_has_activity_and_conditions() -> None:
    rank_reporter = open_reporter()
    idle = rank_reporter.gather(None, None, None)
    assert (idle.activity, idle.job_id, idle.step_range, idle.intake) == ("idle", None, None, None)
    assert idle.rss_bytes > 10**6
    busy = rank_reporter.gather((SAMPLE, 5), (3, 8), 0.5)
    assert (busy.activity, busy.job_id, busy.step, busy.steps) == ("denoising", SAMPLE.job_id, 5, 8)
    assert (busy.step_range, busy.step_s) == ((3, 8), 0.5)
    assert rank_reporter.gather((SAMPLE, 8), (3, 8), 0.5).activity == "decoding"
    rank_reporter.waiting = [Stuck()]
    stuck = rank_reporter.gather(None, (3, 8), 0.5)
    assert (stuck.activity, stuck.conditions) == ("waiting", (Stuck.condition,))


def test_costs_are_told_by_shape_once_all_are_measured() -> None:
    cost_model = CostModel(2, CostPrior(encode_steps=1, decode_steps=1))
    shape = Shape.of(PARAMETERS)
    cost_model.record(shape, 0, "encode", 0.25)
    for rank, step_s in enumerate((0.5, 1.0)):
        cost_model.record_step(shape, rank, step_s)
        assert cost_model.measured() == []  # a guess of the decode would be taken for a measurement
    cost_model.record(shape, 1, "decode", 4.0)
    (costs,) = cost_model.measured()
    assert (costs.frames, costs.width, costs.height, costs.guided) == (2, 64, 64, True)
    assert (costs.step_s, costs.encode_s, costs.decode_s) == ((0.5, 1.0), 0.375, 3.0)


# Through Redis.


@pytest.fixture
def log():
    handler = JobLogHandler(1)
    logging.getLogger().addHandler(handler)
    logging.getLogger("svdq").setLevel(logging.INFO)
    yield handler
    logging.getLogger("svdq").setLevel(logging.NOTSET)
    logging.getLogger().removeHandler(handler)


@pytest.fixture
def reporter() -> RankReporter:
    return open_reporter()


@pytest.fixture
def monitor(
    connection: redis.Redis, log: JobLogHandler, reporter: RankReporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(progress, "IDLE_RECORD_S", 0.3)
    monitor = ProgressMonitor(connection, reporter, log, CrashMarker(tmp_path, 0, 0), Pictures(connection, "group"))
    yield monitor
    monitor.close()


def the_rank(connection: redis.Redis) -> RankStatus | None:
    groups = read_groups(connection)
    return groups[0].ranks[0] if groups else None


def test_the_record_of_a_rank_follows_its_work_and_goes_with_it(connection, monitor: ProgressMonitor, until) -> None:
    until(lambda: the_rank(connection))
    enqueue(connection, JOB, SAMPLE.job_id)
    monitor.step(SAMPLE, 3)
    monitor.step(SAMPLE, 4)
    seen = until(lambda: (found := the_rank(connection)).job_id and found)
    assert (seen.step, seen.activity, seen.step_range) == (4, "denoising", (3, 8))
    assert seen.step_s is not None
    assert fetch(connection, SAMPLE.job_id).meta["step"] == 4
    assert fetch(connection, SAMPLE.job_id).meta["notice"] == "a notice"
    monitor.idle()
    until(lambda: the_rank(connection).activity == "idle")
    monitor.close()
    assert read_groups(connection) == []


def test_an_idle_rank_holds_no_sample(connection, monitor: ProgressMonitor, until) -> None:
    sample = replace(SAMPLE)
    freed = weakref.ref(sample)
    monitor.step(sample, 3)
    until(lambda: (found := the_rank(connection)) and found.job_id)
    monitor.idle()
    del sample
    until(lambda: freed() is None)
    assert the_rank(connection).step_range == (3, 8)


@pytest.mark.usefixtures("monitor")
def test_an_error_of_the_program_does_not_end_the_records(
    connection, reporter: RankReporter, until, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the thread, and with it cancellations and progress, until the rank was restarted."""
    status = IntakeStatus(worker="w")
    answers = iter([RuntimeError("dictionary changed size during iteration")])

    def answer() -> IntakeStatus:
        for error in answers:
            raise error
        return status

    reporter.group = answer
    until(lambda: (found := the_rank(connection)) and found.intake == status)
    assert "dictionary changed size" in caplog.text


@pytest.mark.usefixtures("monitor")
def test_rank_0_writes_its_record_each_second_while_others_work(connection, reporter: RankReporter, until) -> None:
    """Rank 0 may have done its part while others are at work: who reads its record must not find an old one."""
    status = IntakeStatus(worker="w", in_flight=("a",))
    reporter.group = lambda: status
    until(lambda: (found := the_rank(connection)) and found.intake == status)
    before = the_rank(connection).at
    status = IntakeStatus(worker="w", finished=1)
    until(lambda: the_rank(connection).intake == status)
    assert the_rank(connection).at > before


def test_only_steps_count_as_steps(monitor: ProgressMonitor, reporter: RankReporter) -> None:
    bare = replace(SAMPLE, step=-1, boundaries=(0, 0, 4, 10))
    encoded = replace(bare, step=0, tensors={"latents": torch.zeros(1)}, seconds={"encode": 1.0})

    def counted() -> int:
        before = reporter.steps_done[0]
        monitor.idle()
        return reporter.steps_done[0] - before

    monitor.step(bare, 0)
    assert counted() == 0, "its encode failed"
    monitor.step(bare, 0)
    for index in range(3):
        monitor.step(encoded, index)
    assert counted() == 3
    assert counted() == 0, "nothing was begun since"
    monitor.step(encoded, 0)
    monitor.step(encoded, 1)
    assert counted() == 2, "the third was canceled"
    monitor.step(replace(encoded, boundaries=(0, 0, 0, 10)), 0)
    assert counted() == 0, "it goes on elsewhere"
    alone = replace(encoded, boundaries=(0, 0, 10, 10))
    for index in range(8):
        monitor.step(alone, index)
    monitor.step(replace(alone, step=8), 8)
    assert reporter.steps_done[0] == 3 + 2 + 8
    assert counted() == 0, "a decode is no step"


def test_lines_about_a_job_are_in_its_log(connection, monitor: ProgressMonitor, until) -> None:
    other = "f" * 20
    for job_id in (SAMPLE.job_id, other):
        enqueue(connection, JOB, job_id)
    logger = logging.getLogger("svdq.test")
    logger.warning("Nobody's.")
    logger.warning("Took back %s, %s.", other, SAMPLE.job_id)
    monitor.step(SAMPLE, 3)
    logger.warning("Something of a library's.")  # in the step loop
    thread = threading.Thread(target=logger.warning, args=["Beside it."])
    thread.start()
    thread.join()
    try:
        raise ValueError("no good")
    except ValueError:
        logger.exception("It broke.")
    entries = until(lambda: (found := read_log(connection, SAMPLE.job_id)) and len(found) >= 3 and found)
    assert [entry.text.splitlines()[0] for entry in entries] == [
        f"Took back {other}, {SAMPLE.job_id}.",
        "Something of a library's.",
        "It broke.",
    ]
    assert entries[2].text.endswith("ValueError: no good")
    assert [entry.level for entry in entries] == ["WARNING", "WARNING", "ERROR"]
    assert entries[0].rank == 1
    assert len(read_log(connection, other)) == 1


def test_lines_logged_while_redis_is_away_come_later(log: JobLogHandler) -> None:
    logger = logging.getLogger("svdq.test")
    logger.warning("one %s", SAMPLE.job_id)
    taken = log.take()
    assert log.take() == {}
    logger.warning("two %s", SAMPLE.job_id)
    log.restore(taken)
    assert [entry.text[:3] for entry in log.take()[SAMPLE.job_id]] == ["one", "two"]
