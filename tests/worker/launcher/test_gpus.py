"""The GPUs that a worker finds, with a stub of nvidia-smi on PATH, and what it does when they cannot be used."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from svdq.cli.worker import warn_of_other_programs
from svdq.pipeline.errors import UnavailableError
from svdq.producer import keys
from svdq.producer.processes import is_running
from svdq.worker import doctor
from svdq.worker.cards import Cards
from svdq.worker.device import choose_device
from svdq.worker.launcher.gpus import all_gpus, ask, lasting_names, probe, title, visible_gpus
from tests.faults.arena import INJECTION
from tests.waiting import wait_until
from tests.worker.launcher.nvidia_smi import PutNvidiaSmi, nvidia_smi_of

TWO = 'echo "GPU 0: RTX A5000 (UUID: GPU-a)"; echo "GPU 1: RTX A5000 (UUID: GPU-b)"'
#: What it prints when one of three has fallen off the bus.
LOST = """
echo "GPU 0: RTX A5000 (UUID: GPU-a)"
echo "Unable to determine the device handle for GPU 0000:04:00.0: GPU is lost.  Reboot the system to recover this GPU"
echo "GPU 2: RTX A5000 (UUID: GPU-c)"
exit 15
"""
MIG = """
echo "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-a)"
echo "  MIG 3g.20gb     Device  0: (UUID: MIG-1111)"
echo "  MIG 3g.20gb     Device  1: (UUID: MIG-2222)"
echo "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-b)"
"""


@pytest.mark.parametrize(
    ("script", "devices"),
    [
        (TWO, ["0", "1"]),
        (f"{TWO}; echo warning: something >&2", ["0", "1"]),
        (LOST, ["GPU-a", "GPU-c"]),
        (MIG, ["MIG-1111", "MIG-2222", "1"]),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", []),
    ],
)
def test_gpus_are_listed_by_nvidias_tool_once(put_nvidia_smi: PutNvidiaSmi, script: str, devices: list[str]) -> None:
    calls = put_nvidia_smi(script)
    assert visible_gpus() == devices
    assert len(calls.read_text().splitlines()) == 1
    assert bool(all_gpus().failure) == ("exit" in script)


def test_a_tool_that_hangs_is_killed_with_its_children(put_nvidia_smi: PutNvidiaSmi, tmp_path: Path) -> None:
    """A child that keeps the pipe open was waited for without end."""
    put_nvidia_smi(f"sleep 3600 & echo $! > {tmp_path / 'child'}; sleep 3600")
    started = time.monotonic()
    answer = ask("nvidia-smi", "-L", timeout_s=1.0)
    assert time.monotonic() - started < 60
    assert answer is not None
    assert answer.failure == "nvidia-smi did not answer within 1 s"
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: is_running(child) is False)


def test_a_gpu_keeps_its_name_when_another_one_is_lost(
    put_nvidia_smi: PutNvidiaSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA then gives its number to another one."""
    put_nvidia_smi(TWO)
    assert lasting_names(visible_gpus()) == ["GPU-a", "GPU-b"]
    assert [title(device) for device in ("GPU-b", "MIG-1111", "5")] == ["GPU 1 (GPU-b)", "GPU MIG-1111", "GPU 5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert lasting_names(visible_gpus()) == ["GPU-b", "GPU-a"]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert lasting_names(visible_gpus()) == ["1", "0"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which computes")
def test_a_gpu_that_cannot_compute_is_told_from_one_that_hangs() -> None:
    assert re.search("not compiled with CUDA|NVIDIA driver", probe("0"))
    assert "did not answer within 0 s" in probe("0", timeout_s=0.1)


def findings() -> dict[str, tuple[str, str]]:
    return {found.subject: (found.level, found.text) for found in doctor.check_machine()}


def test_doctor_shows_the_gpus_that_are_left_and_why_one_is_not(put_nvidia_smi: PutNvidiaSmi) -> None:
    put_nvidia_smi("echo '0, RTX A5000, 24564, 24000'; echo 'GPU 1 is lost'; exit 15")
    found = findings()
    assert found["GPU 0"] == ("ok", "RTX A5000, 24 GiB, 23 GiB free")
    assert found["GPUs"] == ("warn", "nvidia-smi ended with exit code 15: GPU 1 is lost")


def test_only_the_gpus_that_ranks_will_see_decide_what_fits(put_nvidia_smi: PutNvidiaSmi, monkeypatch) -> None:
    """A small one for the desktop, which the user leaves out."""
    memory = 'echo "0, RTX 4090, 24564, 24000"; echo "1, GT 1030, 2048, 1500"'
    put_nvidia_smi(f'case "$*" in -L) {TWO};; *) {memory};; esac')
    both = Cards.here()
    assert both is not None
    assert (both.number, both.name) == (2, "GT 1030")
    for visible in ("0", "GPU-a"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert Cards.here() == Cards(number=1, total_bytes=24564 * 2**20, name="RTX 4090")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert Cards.here() is None


def test_the_program_that_holds_a_card_is_named(put_nvidia_smi: PutNvidiaSmi, started: Callable[..., int]) -> None:
    """ComfyUI keeps its models; a desktop's little memory and svdq's own ranks are not worth a word."""
    comfyui, other, own = started("ComfyUI", "main.py"), started("work", "train.py"), started("svdq", "svdq-rank.py")
    python, ended = "/usr/bin/python3", 2**22 + 1  # above the largest process id of Linux
    of_second: dict[int, tuple[object, str]] = {
        other: (2048, python), own: (20480, python), 1: (300, "Xorg"), 2: ("N/A", "gnome-shell"),
        ended: (3000, "C:\\Games\\game.exe"),
    }  # fmt: skip
    put_nvidia_smi(nvidia_smi_of((24564, 10000, {comfyui: (14336, python)}), (24564, 2000, of_second)))
    found = [(each.subject, each.text, each.advice) for each in doctor.check_machine() if each.level == "warn"]
    program = f"{Path(sys.executable).name} train.py"
    assert found[:3] == [
        (
            "GPU 0",
            f"ComfyUI (process {comfyui}) holds 15.0 GB, and keeps its models there while it is idle",
            f'press its "Free model and node cache", or end it (`kill {comfyui}`)',
        ),
        ("GPU 1", f"{program} (process {other}) holds 2.1 GB", f"end it (`kill {other}`)"),
        ("GPU 1", f"game.exe (process {ended}) holds 3.1 GB", f"end it (`kill {ended}`)"),
    ]
    assert len([subject for subject, *_ in found if subject.startswith("GPU")]) == 3


def test_a_worker_names_it_when_it_starts(
    put_nvidia_smi: PutNvidiaSmi, started: Callable[..., int], caplog: pytest.LogCaptureFixture
) -> None:
    pid = started("ComfyUI", "main.py")
    put_nvidia_smi(f"echo a warning >&2; {nvidia_smi_of((24564, 24000, {}), (24564, 10000, {pid: (14336, 'python')}))}")
    warn_of_other_programs()
    [said] = caplog.messages
    assert said.startswith(f"GPU 1: ComfyUI (process {pid}) holds 15.0 GB, and keeps its models there while it is idle")


def test_doctor_does_not_call_a_broken_driver_no_gpus(put_nvidia_smi: PutNvidiaSmi) -> None:
    put_nvidia_smi("echo 'NVIDIA-SMI has failed'; exit 9")
    assert findings()["GPUs"] == ("fail", "nvidia-smi ended with exit code 9: NVIDIA-SMI has failed")
    put_nvidia_smi("exit 0")
    assert findings()["GPUs"][0] == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("through", ["svdq worker", pytest.param("torchrun", marks=pytest.mark.long)])
def test_gpus_that_torch_cannot_use_are_not_replaced_by_processors(
    site, put_nvidia_smi: PutNvidiaSmi, through: str
) -> None:
    """As with a PyTorch without CUDA, or one with CUDA and no driver, as on the machines of these tests."""
    calls = put_nvidia_smi(TWO)
    if through == "svdq worker":
        done = site.run("svdq", "worker", "--burst")
        assert len(calls.read_text().splitlines()) == 1, "each call may take seconds a GPU"
    else:
        done = site.run("torchrun", "--nproc-per-node", 1, "--log-dir", site.folder / "log", "-m", "svdq.worker")
    said = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(said) == 1, done.stderr
    reason = "(Torch not compiled with CUDA enabled|Found no NVIDIA driver on your system.*)"
    assert re.match(rf"Error: PyTorch cannot use a GPU here \({reason}\); install", said[0])
    assert done.returncode == (2 if through == "svdq worker" else 1), done.stderr
    assert "Ready" not in done.stderr


@pytest.mark.long
def test_a_group_goes_on_without_a_gpu_that_has_failed(site, tmp_path: Path, until) -> None:
    """Also when torchrun would start it again and again for hours; without any GPU it ends."""
    faults = {"PYTHONPATH": str(INJECTION), "FAULTS_AT": "device", "FAULTS_FOLDER": str(tmp_path)}
    group = site.start(2, "--device", "cuda", model="simulated:step_ms=50", CUDA_VISIBLE_DEVICES="4,6", **faults)
    jobs = [site.submit(seed=seed, steps=20) for seed in range(6)]
    until(lambda: "finished" in site.states(jobs), lambda: group.text)
    (tmp_path / "6").touch()
    assert [view.status for view in site.wait(jobs)] == ["finished"] * 6, group.text
    assert "GPU 6 has failed (it is broken). The group goes on with 1 rank;" in group.text
    assert "Ready with 1 rank" in group.text
    assert site.connection.hlen(keys.CRASHES) == 0, "it was no job's fault"
    sentence = "has failed (it is broken); `svdq worker` tries it again at its next start."
    until(lambda: sentence in site.run("svdq", "status").stdout)

    (tmp_path / "4").touch()
    site.submit(steps=20)
    assert group.end() == UnavailableError.exit_code
    ended = "Error: No GPU is left. GPU 6 has failed (it is broken). GPU 4 has failed (it is broken)."
    assert ended in group.text


@pytest.mark.long
@pytest.mark.nightly
def test_a_rank_whose_driver_hangs_is_left_behind(site, tmp_path: Path, until) -> None:
    """Such a process ends on no signal, and torchrun waits for it for ever."""
    faults = {"PYTHONPATH": str(INJECTION), "FAULTS_AT": "device", "FAULTS_FOLDER": str(tmp_path)}
    group = site.start(2, "--device", "cuda", model="simulated:step_ms=50", CUDA_VISIBLE_DEVICES="4,6", **faults)
    jobs = [site.submit(seed=seed, steps=20) for seed in range(6)]
    until(lambda: "finished" in site.states(jobs), lambda: group.text)
    os.mkfifo(tmp_path / "6")
    until(lambda: any(rank.status() == psutil.STATUS_DISK_SLEEP for rank in group.ranks()))
    assert [view.status for view in site.wait(jobs)] == ["finished"] * 6, group.text
    assert "The group goes on with 1 rank;" in group.text


@pytest.mark.parametrize(("rank", "expected"), list(enumerate(["MIG-1111", "MIG-2222", "MIG-1111"])))
def test_ranks_get_one_mig_instance_each(monkeypatch: pytest.MonkeyPatch, rank: int, expected: str) -> None:
    """CUDA computes on the first one that a process is told of, and on no other."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1111, MIG-2222")
    assert visible_gpus() == ["MIG-1111", "MIG-2222"]
    assert choose_device("cpu", rank).type == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


#: Imports a rank's module without torch, and prints the settings of torch's allocator.
IMPORT = """
import contextlib, os, runpy, sys
sys.modules["torch"] = None
with contextlib.suppress(ImportError):
    runpy.run_module("svdq.worker", run_name="imported")
print(*sorted(f"{name}={value}" for name, value in os.environ.items() if "ALLOC_CONF" in name))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_of_gpu_memory_can_grow_unless_the_user_says_otherwise(monkeypatch, name) -> None:
    """Before torch is imported, which reads it."""

    def settings() -> str:
        return subprocess.run([sys.executable, "-c", IMPORT], stdout=subprocess.PIPE, text=True, check=True).stdout

    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert settings() == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert settings() == f"{name}=max_split_size_mb:64\n"
