"""The scripts for cron, Slurm and SkyPilot: their commands exist, and the one for Slurm runs, with fake programs."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
#: A `svdq` that records its calls. `worker` runs until SIGTERM if there is a file `works`; `list` prints `queued`.
SVDQ = """#!/bin/bash
echo "$@" >> {folder}/calls
[[ $1 = list ]] && exec cat {folder}/queued
while [[ $1 != --report ]]; do shift; done
trap 'echo stopped >> {folder}/calls; rm {folder}/works' TERM
touch {folder}/runs
while [[ -e {folder}/works ]]; do sleep 0.1; done
printf '{{\\n  "finished": %s,\\n  "x": 1\\n}}\\n' "$(cat {folder}/finished)" > "$2"
exit "$(cat {folder}/code)"
"""

CheckCommand = Callable[[list[str]], None]


@pytest.fixture
def start_sbatch(tmp_path: Path) -> Callable[..., "subprocess.Popen[bytes]"]:
    """Run the script as Slurm's daemon does, with fake programs."""
    programs = {
        "svdq": SVDQ.format(folder=tmp_path),
        "scontrol": f'#!/bin/sh\necho "scontrol $@" >> {tmp_path}/calls\n',
        "squeue": "#!/bin/sh\necho 2030-01-01T06:00:00\n",
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(finished: int = 0, code: int = 0, queued: str = "", **more: str) -> "subprocess.Popen[bytes]":
        for name, value in {"finished": finished, "code": code, "queued": queued}.items():
            (tmp_path / name).write_text(str(value))
        environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "TZ": "UTC"}
        environment |= {"SVDQ_REDIS_URL": "redis://127.0.0.1:1/0", "SVDQ_STORAGE": str(tmp_path)}
        return subprocess.Popen(["bash", DEPLOY / "slurm/night.sbatch"], env=environment | more)

    return start


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_slurm_starts_a_worker_until_five_minutes_before_the_end_of_the_job(
    start_sbatch: Callable[..., "subprocess.Popen[bytes]"], check_command: CheckCommand, tmp_path: Path
) -> None:
    assert start_sbatch(WORKER_OPTIONS="--ranks 2 --device cpu").wait(60) == 0
    assert start_sbatch(SLURM_JOB_END_TIME=str(int(time.time()) + 100)).wait(60) == 0  # too late for --until
    first, second = calls(tmp_path)
    check_command(first.split())
    assert "--until 2030-01-01T05:55:00+00:00" in first  # the end that squeue gives
    assert first.endswith("--ranks 2 --device cpu")
    assert "--until" not in second
    [home] = re.findall(r"--report (\S+)/report.json", first)
    assert not Path(home).exists(), "the folder of the node is removed"


@pytest.mark.parametrize(
    ("finished", "code", "queued", "comes_back"),
    [(3, 0, "{}\n", True), (3, 0, "", False), (0, 0, "{}\n", False), (3, 1, "{}\n", False)],
)
def test_slurm_starts_the_script_again_while_jobs_remain(
    start_sbatch: Callable[..., "subprocess.Popen[bytes]"],
    tmp_path: Path,
    finished: int,
    code: int,
    queued: str,
    comes_back: bool,
) -> None:
    assert start_sbatch(finished, code, queued).wait(60) == code
    assert ("scontrol requeue 77" in calls(tmp_path)) == comes_back


def test_a_signal_of_slurm_reaches_the_worker_which_is_waited_for(
    start_sbatch: Callable[..., "subprocess.Popen[bytes]"], until: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "works").touch()
    script = start_sbatch(queued="{}\n")
    until(lambda: (tmp_path / "runs").exists())
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 0
    assert calls(tmp_path)[1:] == ["stopped", "list --status queued --limit 1 --json", "scontrol requeue 77"]


def test_the_task_for_skypilot_calls_commands_of_ours(check_command: CheckCommand) -> None:
    task = yaml.safe_load((DEPLOY / "skypilot/night.yaml").read_text())
    commands = re.findall(r"\bsvdq/bin/svdq (.+)|^svdq (.+)", task["setup"] + task["run"], re.M)
    assert len(commands) == 2
    for setup, run in commands:
        check_command((setup or run).split())
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_the_crontab_calls_commands_of_ours(check_command: CheckCommand) -> None:
    lines = [line for line in (DEPLOY / "cron/crontab").read_text().splitlines() if re.match(r"\d+ \d+ \* \* ", line)]
    commands = [re.findall(r"\bsvdq (.*?)(?: 2>>.*)?$", line)[0] for line in lines]
    assert len(commands) == 2
    for command in commands:
        check_command(command.replace("$(date +\\%F)", "2027-01-31").split())
