"""An idle group costs next to nothing."""

import time

import psutil
import pytest

WINDOW_S = 30.0  # seconds over which the processor time is measured


@pytest.mark.long
def test_an_idle_group_takes_a_few_hundredths_of_a_core(site) -> None:
    group = site.start(3, model="simulated:step_ms=1")
    (video,) = site.wait([site.submit(steps=2)])
    assert video.status == "finished"
    time.sleep(3)  # until what follows the last video is done
    launcher = psutil.Process(group.process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    before_s = sum(_cpu_s(process) for process in processes)
    num_commands, at = site.connection.info("stats")["total_commands_processed"], time.monotonic()
    time.sleep(WINDOW_S)
    used_s = sum(_cpu_s(process) for process in processes) - before_s
    num_commands = site.connection.info("stats")["total_commands_processed"] - num_commands
    # Hundreds of groups share one Redis. Commands inside scripts are not counted here.
    assert num_commands < 60 * (time.monotonic() - at)
    assert all(process.is_running() for process in processes)
    assert used_s < 0.05 * WINDOW_S


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
