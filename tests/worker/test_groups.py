"""Groups on one queue, as `svdq worker --groups` starts them: they share the work, end together, and idle for free."""

import re
import signal
import time

import psutil
import pytest

pytestmark = pytest.mark.slow

SIMULATED = "simulated:step_ms=50"
MEASURED_S = 10.0  # seconds over which the processor time of an idle group is measured


def test_groups_share_a_queue_and_each_job_is_done_once(site) -> None:
    job_ids = [site.submit(steps=10) for _ in range(16)]
    group = site.start(1, "--groups", "2", "--burst", "--metrics-port", "0", model=SIMULATED, wait=False)
    assert group.end() == 0, group.text
    assert re.search(r"http://127\.0\.0\.1:[1-9]\d*/metrics", group.text), "the free port that was taken"
    assert site.states(job_ids) == ["finished"] * 16
    sidecars = site.sidecars()
    assert sorted(sidecar["job_id"] for sidecar in sidecars) == sorted(job_ids)
    assert len({sidecar["group"]["pid"] for sidecar in sidecars}) == 2


@pytest.mark.long
def test_one_ctrl_c_drains_all_groups(site, until, no_processes_left) -> None:
    group = site.start(1, "--groups", "2", model=SIMULATED).ready(times=2)
    processes = psutil.Process(group.process.pid).children(recursive=True)
    job_ids = [site.submit(steps=20) for _ in range(12)]
    until(lambda: site.states(job_ids).count("started") >= 2, lambda: group.text)
    group.send_signal(signal.SIGINT)
    assert group.end() == 0, group.text
    assert set(site.states(job_ids)) == {"finished", "queued"}
    no_processes_left(processes)


@pytest.mark.long
def test_an_idle_group_takes_a_few_hundredths_of_a_core(site) -> None:
    group = site.start(3, model="simulated:step_ms=1")
    (video,) = site.wait([site.submit(steps=2)])
    assert video.status == "finished"
    time.sleep(3)  # until what follows the last video is done
    launcher = psutil.Process(group.process.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    before_s = sum(sum(process.cpu_times()[:2]) for process in processes)
    num_commands, at = site.connection.info("stats")["total_commands_processed"], time.monotonic()
    time.sleep(MEASURED_S)
    used_s = sum(sum(process.cpu_times()[:2]) for process in processes) - before_s
    num_commands = site.connection.info("stats")["total_commands_processed"] - num_commands
    # Hundreds of groups share one Redis. Commands inside scripts are not counted here.
    assert num_commands < 60 * (time.monotonic() - at)
    assert all(process.is_running() for process in processes)
    assert used_s < 0.05 * MEASURED_S
