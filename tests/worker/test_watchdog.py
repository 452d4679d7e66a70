"""A rank that makes no progress is reported and ended; one that is slow or idle is not."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.planning.costs import Shape
from svdq.worker.health.watchdog import Watchdog
from tests.pipeline.fakes import ListMonitor

PARAMETERS = SvdParameters(seed=1, steps=8, frames=2, width=64, height=64)
NEW = Sample(job_id="a-job", parameters=PARAMETERS, boundaries=(0, 10), step=-1)
SHAPE = Shape.of(PARAMETERS)
SAMPLE = replace(NEW, step=0, tensors={"latents": torch.zeros(1)})
#: Seconds between wake-ups in these tests; every wait is for an event, so a busy machine only makes them slower.
LOOK_S = 0.02
#: A bound that no test reaches.
NEVER_S = 1e6


class Dog:
    def __init__(self, *, shortest_bound_s: float = 5 * LOOK_S, first_bound_s: float = 5 * LOOK_S) -> None:
        self.stalled = threading.Event()
        self.threads_before = set(threading.enumerate())
        self.monitor = ListMonitor()
        self.watchdog = Watchdog(
            self.monitor, 3, first_bound_s, on_stall=self.stalled.set, look_s=LOOK_S, shortest_bound_s=shortest_bound_s
        )


def test_a_step_that_never_ends_is_reported_with_all_that_is_known(caplog: pytest.LogCaptureFixture) -> None:
    dog = Dog()
    dog.watchdog.step(SAMPLE, 2)
    assert dog.stalled.wait(60)
    report = caplog.text
    assert "Rank 3 makes no progress: step 3 of 8 of job a-job (64x64, 2 frames)" in report
    assert "none of this kind has been done yet" in report
    assert "in test_a_step_that_never_ends_is_reported_with_all_that_is_known" in report, "the stack of the step loop"


def test_a_decode_that_never_ends_is_called_one(caplog: pytest.LogCaptureFixture) -> None:
    dog = Dog()
    dog.watchdog.step(SAMPLE, 8)
    assert dog.stalled.wait(60)
    assert "the decode of job a-job" in caplog.text


def test_a_warm_up_that_never_ends_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    dog = Dog()
    dog.watchdog.warm_up(NEW)
    assert dog.stalled.wait(60)
    assert "the warm-up of job a-job (64x64, 2 frames)" in caplog.text
    assert dog.monitor.warmed == ["a-job"]


def test_it_sleeps_while_idle_and_watches_the_next_step() -> None:
    dog = Dog()
    (thread,) = set(threading.enumerate()) - dog.threads_before
    for _ in range(3):
        dog.watchdog.step(SAMPLE, 0)
        dog.watchdog.idle()
    wait_until_asleep(thread)
    assert not dog.stalled.is_set()
    dog.watchdog.step(SAMPLE, 0)
    assert dog.stalled.wait(60)


def wait_until_asleep(thread: threading.Thread) -> None:
    """Wait until a thread has not run for ten wake-ups."""
    status = Path(f"/proc/self/task/{thread.native_id}/status")
    before = ""
    for _ in range(300):
        switches = status.read_text().partition("voluntary_ctxt_switches")[2]
        if switches == before:
            return
        before = switches
        time.sleep(10 * LOOK_S)
    raise AssertionError("it never slept")


def test_a_step_may_take_many_times_as_long_as_the_slowest_of_its_kind() -> None:
    watchdog = Dog(first_bound_s=1800.0, shortest_bound_s=60.0).watchdog
    watchdog.slowest_s[SHAPE, "step"] = 0.1
    assert watchdog.bound_s((SHAPE, "step")) == 60.0
    assert watchdog.bound_s((SHAPE, "decode")) == 1800.0
    watchdog.slowest_s[SHAPE, "step"] = 7.0
    assert watchdog.bound_s((SHAPE, "step")) == 140.0


def test_each_step_is_measured_as_its_kind() -> None:
    watchdog = Dog(first_bound_s=NEVER_S).watchdog
    watchdog.step(NEW, 0)
    watchdog.step(SAMPLE, 0)
    watchdog.step(SAMPLE, 8)
    assert set(watchdog.slowest_s) == {(SHAPE, "encode"), (SHAPE, "step")}
    watchdog.idle()
    assert set(watchdog.slowest_s) == {(SHAPE, "encode"), (SHAPE, "step"), (SHAPE, "decode")}


def test_the_repeated_report_of_a_resumed_video_is_not_measured() -> None:
    """Its first step may compile for hours."""
    watchdog = Dog(first_bound_s=NEVER_S).watchdog
    watchdog.step(SAMPLE, 5)
    watchdog.step(replace(SAMPLE), 5)
    assert watchdog.slowest_s == {}
    watchdog.step(SAMPLE, 6)
    assert set(watchdog.slowest_s) == {(SHAPE, "step")}


def test_everything_is_passed_on() -> None:
    dog = Dog(first_bound_s=NEVER_S)
    dog.monitor.cancel_at = {"a-job": 2}
    for index in range(3):
        assert not dog.watchdog.canceled("a-job")
        dog.watchdog.step(SAMPLE, index)
    assert dog.watchdog.canceled("a-job")
    dog.watchdog.idle()
    assert dog.monitor.steps == [("a-job", 0), ("a-job", 1), ("a-job", 2)]
