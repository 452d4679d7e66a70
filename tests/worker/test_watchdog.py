"""A rank that stands still is reported and ended; one that is slow, idle or was paused is not."""

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Sample
from svdq.worker.health.watchdog import Watchdog
from tests.pipeline.fakes import ListMonitor

PARAMETERS = VideoParameters(seed=1, steps=8, frames=2, width=64, height=64)
NEW = Sample(job_id="a-job", parameters=PARAMETERS, boundaries=(0, 8), step=0)
SAMPLE = replace(NEW, tensors={"latents": torch.zeros(1)})
#: Seconds between looks in these tests; every wait is for an event, so a busy machine only makes them slower.
LOOK_S = 0.02
#: So many looks that a machine would have to stand still for minutes, but the watchdog not.
NEVER_S = 1e6


class Dog:
    def __init__(self, *, shortest_bound_s: float = 5 * LOOK_S, first_bound_s: float = 5 * LOOK_S) -> None:
        self.stalled = threading.Event()
        self.monitor = ListMonitor()
        self.watchdog = Watchdog(
            self.monitor,
            3,
            first_bound_s,
            on_stall=self.stalled.set,
            look_s=LOOK_S,
            shortest_bound_s=shortest_bound_s,
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


def test_it_is_asleep_while_idle_and_awake_again_with_the_next_step() -> None:
    dog = Dog(first_bound_s=NEVER_S)
    for _ in range(3):
        dog.watchdog.step(SAMPLE, 0)
        dog.watchdog.idle()
        wait_until_asleep(dog.watchdog)
    assert not dog.stalled.is_set()
    dog.watchdog.step(replace(SAMPLE, parameters=PARAMETERS.model_copy(update={"frames": 3})), 0)
    assert dog.watchdog._is_awake


def wait_until_asleep(watchdog: Watchdog) -> None:
    deadline = threading.Event()
    for _ in range(3000):
        if not watchdog._is_awake:
            return
        deadline.wait(0.01)
    raise AssertionError("it never slept")


def test_a_step_may_take_many_times_as_long_as_the_slowest_and_each_kind_has_its_own() -> None:
    dog = Dog(first_bound_s=NEVER_S)
    watchdog = dog.watchdog
    watchdog.step(SAMPLE, 0)
    watchdog.step(SAMPLE, 1)
    watchdog.step(SAMPLE, 8)  # the decode: the first of its kind
    (step_kind,) = watchdog._slowest_s
    assert step_kind[1] == "step"
    assert watchdog._bound_s(step_kind) < NEVER_S
    assert watchdog._bound_s((step_kind[0], "decode")) == NEVER_S
    watchdog._slowest_s[step_kind] = 7.0
    assert watchdog._bound_s(step_kind) == 140.0
    watchdog.idle()


def test_the_first_step_has_the_time_of_a_first_one_whatever_came_before_it() -> None:
    """It may compile for hours; neither an encode nor the word that a video is taken up again tells of that."""
    watchdog = Dog(first_bound_s=NEVER_S).watchdog
    watchdog.step(NEW, 0)
    watchdog.step(SAMPLE, 0)
    watchdog.step(replace(SAMPLE, job_id="b-job", step=5), 5)
    (encode_kind, step_kind) = watchdog._slowest_s
    assert (encode_kind[1], step_kind[1]) == ("encode", "step")
    again = Dog(first_bound_s=NEVER_S).watchdog
    again.step(SAMPLE, 5)
    again.step(replace(SAMPLE), 5)
    assert again._work is not None
    assert again._bound_s(again._work.kind) == NEVER_S


def test_everything_is_passed_on() -> None:
    dog = Dog(first_bound_s=NEVER_S)
    dog.monitor.cancel_at = {"a-job": 2}
    for index in range(3):
        assert not dog.watchdog.cancelled("a-job")
        dog.watchdog.step(SAMPLE, index)
    assert dog.watchdog.cancelled("a-job")
    dog.watchdog.idle()
    assert dog.monitor.steps == [("a-job", 0), ("a-job", 1), ("a-job", 2)]


PROGRAM = """
import os, sys
import torch
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.sample import Sample
from svdq.worker.health.watchdog import Watchdog
from tests.pipeline.fakes import ListMonitor

parameters = VideoParameters(seed=1, steps=8, frames=2, width=64, height=64)
sample = Sample(job_id="j", parameters=parameters, boundaries=(0, 8), step=0, tensors={"latents": torch.zeros(1)})
watchdog = Watchdog(
    ListMonitor(), 0, float(sys.argv[1]), on_stall=lambda: os._exit(1), look_s=1.0, shortest_bound_s=2.5
)
watchdog.step(sample, 0)
print("in the step", flush=True)
sys.stdin.readline()
watchdog.step(sample, 1)
print(watchdog._slowest_s.popitem()[1], flush=True)
"""


def start(first_bound_s: float) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(first_bound_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in the step\n"
    return process


@pytest.mark.slow
def test_a_process_that_stands_still_ends_with_1() -> None:
    with start(first_bound_s=1.5) as process:
        assert process.wait(60) == 1


@pytest.mark.slow
def test_a_process_that_was_paused_has_nothing_to_report() -> None:
    with start(first_bound_s=2.5) as process:
        os.kill(process.pid, signal.SIGSTOP)
        threading.Event().wait(6)  # longer than any bound of its
        os.kill(process.pid, signal.SIGCONT)
        output, errors = process.communicate("go on\n", timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert float(output) < 4, "the pause is not taken for the time of a step"
