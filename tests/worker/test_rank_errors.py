"""Errors that end a rank: a sentence or a traceback, and the process ends at once."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from svdq.producer import keys
from tests.waiting import PATIENCE_S

#: A module that Python loads at its start. In ranks, which are forks, the stage loop fails once while the next photo is
#: waited for.
FAIL_WHILE_THE_STORAGE_IS_AWAY = """
import os, time
from pathlib import Path

def install():
    if "RANK" not in os.environ:
        return
    from svdq.worker.intake.source import Intake

    take, failed = Intake.take, Path(__file__).with_name("failed")

    def take_or_fail(intake):
        if failed.exists():
            return take(intake)
        intake._num_taken += 1
        intake._wake.set()
        while intake.condition is None:
            time.sleep(0.01)
        failed.touch()
        raise RuntimeError("a fault of the stage loop")

    Intake.take = take_or_fail

os.register_at_fork(after_in_child=install)
"""


#: The same: ranks fail or hang while they import what they need.
NEVER_START = """
import importlib.abc, os, sys, time

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "svdq.worker.startup":
            if os.environ["HOW"] == "hang":
                time.sleep(1000)
            if os.environ["HOW"] == "kill":
                os.kill(os.getpid(), 9)
            raise IndexError("index 24 is out of bounds")

def install():
    if "RANK" in os.environ:
        sys.modules.pop("svdq.worker.startup")
        sys.meta_path.insert(0, Finder())

os.register_at_fork(after_in_child=install)
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "said"), [("raise", " (IndexError: index 24 is out of bounds)"), ("kill", "")])
def test_what_can_never_work_is_not_restarted_for_ever(site, how: str, said: str) -> None:
    (site.folder / "sitecustomize.py").write_text(NEVER_START)
    done = site.run("svdq", "worker", "--ranks", 2, "--device", "cpu", "--burst", HOW=how, PYTHONPATH=str(site.folder))
    assert done.returncode == 1
    sentence = done.stderr.splitlines()[-1]
    assert sentence.startswith(f"Error: The worker cannot start: its ranks have failed 3 times{said}; ")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_worker_that_starts_is_stopped_in_seconds(site, number: signal.Signals, until) -> None:
    (site.folder / "sitecustomize.py").write_text(NEVER_START)
    group = site.start(2, wait=False, HOW="hang", PYTHONPATH=str(site.folder))
    until(lambda: len(group.ranks()) == 2)
    begin = time.monotonic()
    group.process.send_signal(number)
    assert group.end() == 0, group.text
    assert time.monotonic() - begin < 8  # 5 s, and what the machine does meanwhile


@pytest.mark.long
def test_a_rank_ends_though_a_thread_waits_for_the_storage(site, until) -> None:
    """It waited for that thread, kept its leases, and its neighbors did not notice."""
    (site.folder / "sitecustomize.py").write_text(FAIL_WHILE_THE_STORAGE_IS_AWAY)
    job = site.submit()
    inputs = Path(site.settings.storage) / "inputs"
    inputs.rename(inputs.with_name("away"))
    group = site.start(1, model="simulated:step_ms=1", PYTHONPATH=str(site.folder), wait=False)
    group.ready(times=2)
    assert group.text.count("RuntimeError: a fault of the stage loop") == 1
    assert "An unexpected error ends this rank." in group.text
    inputs.with_name("away").rename(inputs)
    assert site.wait([job])[0].status == "finished"
    assert not site.connection.exists(keys.CRASHES)


@pytest.mark.long
def test_a_crash_in_native_code_leaves_its_stack_in_the_log(site) -> None:
    group = site.start(1)
    # While threads are started, the kernel may give the signal to one that has no stack of Python yet.
    assert site.wait([site.submit()])[0].status == "finished"
    group.ranks()[0].send_signal(signal.SIGSEGV)
    group.ready(times=2)
    assert "Fatal Python error: Segmentation fault" in group.text
    assert "worker/rank.py" in group.text


@pytest.mark.long
def test_a_worker_runs_with_a_closed_stderr(site) -> None:
    """The shell's `2>&-` closes it."""
    command = [sys.executable, "-m", "svdq.cli", "worker", "--ranks", "1", "--device", "cpu", "--burst"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "-", *command],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S * 2,
        env=site.environment(SVDQ_MODEL="simulated:step_ms=1"),
    )
    assert done.returncode == 0
    assert "It ended because the queue was empty." in done.stdout


def rank(site, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run one rank, as torchrun does, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "svdq.worker", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S * 2,
        cwd=site.folder,
        env=site.environment(**environment),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "exit_code", "sentence"),
    [
        ({"SVDQ_MAX_ATTEMPTS": "none"}, 2, "Error: The setting SVDQ_MAX_ATTEMPTS "),
        ({"SVDQ_HOME": "elsewhere"}, 3, "Error: The folder "),
        ({"SVDQ_MODEL": "/nowhere"}, 2, "Error: There is no model folder '/nowhere'"),
    ],
)
def test_without_a_launcher_a_wrong_setting_is_one_sentence(
    site, environment: dict[str, str], exit_code: int, sentence: str
) -> None:
    (site.folder / "elsewhere").mkdir()
    (site.folder / "elsewhere" / "run").touch()  # so it is no folder
    done = rank(site, **environment)
    assert done.returncode == exit_code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_restarted_rank_tries_again_whatever_is_missing(site) -> None:
    """Its launcher would end the run for good; torchrun starts it again."""
    done = rank(site, SVDQ_MAX_ATTEMPTS="none", TORCHELASTIC_RESTART_COUNT="1")
    assert done.returncode == 2
    assert "The group worked before, so it tries again in 10 s." in done.stderr
