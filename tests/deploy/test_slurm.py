"""deploy/slurm/night.sbatch under a real Slurm where there is one, and under a stand-in that sends the same signals."""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy/slurm/night.sbatch"
#: A `svdq` that says what it is called with. It works until it is stopped, or ends at once without jobs.
SVDQ = """#!/bin/bash
echo "$@" >> {folder}/calls
case $1 in
worker)
  while [[ $1 != --report ]]; do shift; done
  echo $$ > {folder}/pid
  trap 'echo stopped >> {folder}/calls; sleep 1; finish' TERM
  report=$2
  finish() {{
    printf '{{\\n  "finished": %s,\\n  "x": 1\\n}}\\n' "$(cat {folder}/finished)" > "$report"
    exit "$(cat {folder}/code)"
  }}
  while [[ -e {folder}/works ]]; do sleep 0.1; done
  finish ;;
list) cat {folder}/queued ;;
esac
"""


class Night:
    """What the fake `svdq` does, and what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        (bin_folder / "svdq").write_text(SVDQ.format(folder=folder))
        (bin_folder / "svdq").chmod(0o755)
        self.set(finished=0, code=0, queued="", works=False)
        self.environment = {
            **os.environ,
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "SVDQ_REDIS_URL": "redis://127.0.0.1:1/0",
            "SVDQ_STORAGE": str(folder),
        }

    def set(self, *, finished: int, code: int, queued: str, works: bool) -> None:
        for name, value in (("finished", finished), ("code", code), ("queued", queued)):
            (self.folder / name).write_text(str(value))
        (self.folder / "works").touch() if works else (self.folder / "works").unlink(missing_ok=True)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def works(self) -> bool:
        return any(call.startswith("worker") for call in self.calls)


@pytest.fixture
def night(tmp_path: Path) -> Night:
    return Night(tmp_path)


@pytest.fixture
def stand_in(night: Night) -> Callable[..., "subprocess.Popen[bytes]"]:
    """Run the script as Slurm's daemon does, with a `scontrol` and a `squeue` that do nothing."""
    for name, does in (
        ("scontrol", f'echo "scontrol $@" >> {night.folder}/calls'),
        ("squeue", "echo 2030-01-01T06:00:00"),
    ):
        (night.folder / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
        (night.folder / "bin" / name).chmod(0o755)

    def run(**environment: str) -> "subprocess.Popen[bytes]":
        with open(night.folder / "out", "w") as out:
            return subprocess.Popen(
                ["bash", SCRIPT],
                env=night.environment | {"SLURM_JOB_ID": "77", "TZ": "UTC"} | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    return run


def test_the_worker_is_called_with_options_that_it_has(
    night: Night, stand_in: Callable[..., "subprocess.Popen[bytes]"], check_command: Callable[[list[str]], None]
) -> None:
    assert stand_in(WORKER_OPTIONS="--ranks 2 --device cpu").wait(60) == 0
    [call] = night.calls
    check_command(call.split())
    assert "--until 2030-01-01T05:55:00+00:00" in call  # five minutes before the end that squeue gives
    assert call.endswith("--ranks 2 --device cpu")
    home = re.search(r"--report (\S+)/report.json", call)
    assert home is not None
    assert not Path(home[1]).exists(), "the node's folder is removed"


def test_the_end_is_that_of_the_job(night: Night, stand_in: Callable[..., "subprocess.Popen[bytes]"]) -> None:
    assert stand_in(SLURM_JOB_END_TIME=str(int(time.time()) + 3600)).wait(60) == 0
    assert stand_in(SLURM_JOB_END_TIME=str(int(time.time()) + 100)).wait(60) == 0
    assert ["--until" in call for call in night.calls] == [True, False]


@pytest.mark.parametrize(
    ("finished", "code", "queued", "comes_back"),
    [(3, 0, "{}\n", True), (3, 0, "", False), (0, 0, "{}\n", False), (3, 1, "{}\n", False)],
)
def test_it_comes_back_while_jobs_remain(
    night: Night,
    stand_in: Callable[..., "subprocess.Popen[bytes]"],
    finished: int,
    code: int,
    queued: str,
    comes_back: bool,
) -> None:
    night.set(finished=finished, code=code, queued=queued, works=False)
    assert stand_in().wait(60) == code
    assert ("scontrol requeue 77" in night.calls) == comes_back


def test_a_signal_is_passed_on_and_waited_for(
    night: Night, stand_in: Callable[..., "subprocess.Popen[bytes]"], until: Callable[..., None]
) -> None:
    night.set(finished=0, code=0, queued="{}\n", works=True)
    script = stand_in()
    until(lambda: (night.folder / "pid").exists())
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 0
    assert night.calls[1:] == ["stopped", "list --status queued --limit 1 --json", "scontrol requeue 77"]


@pytest.mark.parametrize("name", ["SVDQ_REDIS_URL", "SVDQ_STORAGE"])
def test_what_is_missing_is_named(night: Night, stand_in: Callable[..., "subprocess.Popen[bytes]"], name: str) -> None:
    script = stand_in(**{name: ""})
    assert script.wait(60) != 0
    assert name in (night.folder / "out").read_text()
    assert night.calls == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path, until: Callable[..., None]) -> Iterator[dict[str, str]]:
    """A Slurm of this machine alone: munge, controller and one node."""
    programs = [shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("munged", "slurmctld", "slurmd", "sbatch")]
    if None in programs or os.geteuid() != 0:
        pytest.skip("needs slurmctld, slurmd, slurm-client and munge, and root")
    folder = Path(subprocess.run(["mktemp", "-d", "/tmp/slurm-XXXXXX"], capture_output=True, text=True).stdout.strip())
    folder.chmod(0o755)
    for name in ("munge", "state", "spool", "run"):
        (folder / name).mkdir(mode=0o755 if name == "run" else 0o700)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={free_port()}
SlurmdPort={free_port()}
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
MpiDefault=none
SchedulerParameters=sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
    )
    environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    munge = ["munged", "--foreground", f"--key-file={folder}/munge.key", f"--socket={folder}/run/munge.sock"]
    munge += [
        f"--pid-file={folder}/run/munge.pid",
        f"--log-file={folder}/munge/log",
        f"--seed-file={folder}/munge/seed",
    ]
    daemons = [subprocess.Popen([*munge, "--force"], stderr=subprocess.DEVNULL)]
    try:
        until(lambda: (folder / "run/munge.sock").exists())
        for program in ("slurmctld", "slurmd"):
            daemons.append(subprocess.Popen([program, "-D", "-c"], env=environment, stderr=subprocess.DEVNULL))

        def is_idle() -> bool:
            shown = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
            return shown.stdout.strip() == "idle"

        until(is_idle)
        yield environment
        subprocess.run(["scancel", "--full", "--state=RUNNING"], env=environment, capture_output=True)
        subprocess.run(["scancel", "--state=PENDING"], env=environment, capture_output=True)
        until(is_idle)
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
def test_under_slurm_it_is_stopped_before_the_end_and_comes_back(
    night: Night, slurm: dict[str, str], until: Callable[..., None]
) -> None:
    """Two minutes are allowed, so the signal comes at once, and every run is requeued until nothing is left."""
    night.set(finished=0, code=0, queued="{}\n", works=True)
    environment = night.environment | slurm | {"PATH": f"{night.folder}/bin:{slurm['PATH']}"}

    def run(*arguments: str) -> str:
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    log = night.folder / "job.log"
    options = ["--gpus-per-node=0", "--cpus-per-task=1", "--time=2", f"--output={log}"]
    job = run("sbatch", "--parsable", *options, str(SCRIPT))
    show = lambda: run("scontrol", "show", "job", job)  # noqa: E731
    until(lambda: "Jobs remain" in (log.read_text() if log.exists() else ""), lambda: f"{show()}\n{night.calls}")
    until(lambda: "Restarts=1" in show(), show)
    assert night.calls[1] == "stopped"
    # Slurm starts it again after a minute or two: nobody need wait for that.
    night.set(finished=3, code=0, queued="", works=False)
    run("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: "JobState=COMPLETED" in show(), show)
    assert [call.split()[0] for call in night.calls].count("worker") == 2


def test_the_task_for_skypilot_calls_commands_of_ours(check_command: Callable[[list[str]], None]) -> None:
    task = yaml.safe_load((ROOT / "deploy/skypilot/night.yaml").read_text())
    assert {"resources", "envs", "setup", "run"} <= task.keys()
    assert task["secrets"] == {"SVDQ_REDIS_URL": "", "HF_TOKEN": ""}
    assert task["resources"]["use_spot"] is True
    assert task["envs"]["SVDQ_STORAGE"].startswith("s3://")
    commands = re.findall(r"\bsvdq/bin/svdq (.+)|^svdq (.+)", task["setup"] + task["run"], re.M)
    assert len(commands) == 2
    for setup, run in commands:
        check_command((setup or run).split())
    worker = commands[1][1].split()
    assert "--burst" in worker
    assert worker[worker.index("--checkpoints") + 1] == "storage"
    for script in (task["setup"], task["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
