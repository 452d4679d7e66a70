"""Errors that end a rank: a sentence or a traceback, and the process ends at once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from svdq.producer import keys
from tests.waiting import PATIENCE_S

#: A module that Python loads at its start. In ranks, the stage loop fails once while the next photo is waited for.
FAIL_WHILE_THE_STORAGE_IS_AWAY = """
import os, time
from pathlib import Path

if "RANK" in os.environ:
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
"""


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
    group.ranks()[0].send_signal(signal.SIGSEGV)
    group.ready(times=2)
    assert "Fatal Python error: Segmentation fault" in group.text
    assert "in run_rank" in group.text


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
