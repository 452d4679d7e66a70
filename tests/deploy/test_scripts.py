"""The scripts for cron, Slurm and SkyPilot: their commands exist, and the one for Slurm runs, with fake programs."""

import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.nightly

DEPLOY = Path(__file__).parents[2] / "deploy"
CheckCommand = Callable[[list[str]], None]


@pytest.mark.parametrize(
    ("number", "variables", "requeued"),
    [
        (signal.SIGUSR1, {}, ["scontrol requeue 77"]),  # as Slurm does three minutes before the end
        (signal.SIGUSR1, {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "4"}, ["scontrol requeue 77_4"]),
        (signal.SIGTERM, {}, []),  # at scancel, and at a preemption
    ],
)
def test_slurm_starts_a_worker_again_while_jobs_remain(
    check_command: CheckCommand,
    until: Callable[..., None],
    tmp_path: Path,
    number: signal.Signals,
    variables: dict[str, str],
    requeued: list[str],
) -> None:
    programs = {
        "svdq": "echo $@ >> calls; [ $1 = list ] && echo {} && exit\n"
        "trap 'exit 0' TERM; touch runs; while sleep 0.1; do :; done",
        "scontrol": "echo scontrol $@ >> calls",
        "squeue": "echo 2030-01-01T06:00:00",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}; {text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "TZ": "UTC"} | variables
    environment |= {"SVDQ_REDIS_URL": "redis://127.0.0.1:1/0", "SVDQ_STORAGE": str(tmp_path)}
    environment |= {"WORKER_OPTIONS": "--ranks 2 --device cpu"}
    script = subprocess.Popen(["bash", DEPLOY / "slurm/night.sbatch"], env=environment)
    until(lambda: (tmp_path / "runs").exists())
    script.send_signal(number)
    assert script.wait(60) == 0
    worker, *others = (tmp_path / "calls").read_text().splitlines()
    check_command(worker.split())
    assert "--until 2030-01-01T05:55:00+00:00" in worker  # the end that squeue gives
    assert worker.endswith("--ranks 2 --device cpu")
    [home] = re.findall(r"--report (\S+)/report.json", worker)
    assert not Path(home).exists(), "the folder of the node is removed"
    assert others == (["list --status queued --limit 1 --json", *requeued] if requeued else [])


def test_the_task_for_skypilot_calls_commands_of_ours(check_command: CheckCommand) -> None:
    task = yaml.safe_load((DEPLOY / "skypilot/night.yaml").read_text())
    commands = re.findall(r"\bsvdq/bin/svdq (.+)|^svdq (.+)", task["setup"] + task["run"], re.M)
    assert len(commands) == 2
    for setup, run in commands:
        check_command((setup or run).split())
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_the_crontab_calls_commands_of_ours(check_command: CheckCommand) -> None:
    lines = [line for line in (DEPLOY / "cron/crontab").read_text().splitlines() if re.match(r"#?\d+ \d+ \* \* ", line)]
    commands = [re.findall(r"\bsvdq (.*?)(?: 2>>.*)?$", line)[0] for line in lines]
    assert len(commands) == 2
    for command in commands:
        check_command(command.replace("$(date +\\%F)", "2027-01-31").split())


def test_no_example_deletes_videos() -> None:
    """People paste them as they are."""
    for path in [*DEPLOY.rglob("*"), *(DEPLOY.parent / "cli/systemd").rglob("*")]:
        if path.is_file() and path.suffix not in (".pyc", ".png"):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            active = [line for line in lines if not line.lstrip().startswith("#")]
            assert not [line for line in active if "svdq prune" in line or "svdq remove" in line], path
