"""The GPUs that ranks will see, as NVIDIA's tool lists them: torch, which knows them too, takes seconds to import."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

#: Seconds for an answer: without NVIDIA's persistence mode each GPU is first woken up, which takes seconds.
TIMEOUT_S: Final = 120.0
#: Seconds in which a killed program must have closed its pipes; one that hangs in a driver never does.
KILL_S: Final = 2.0
#: What is there where a GPU is: NVIDIA's, WSL's, AMD's.
_DEVICES: Final = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_NAMES: Final = "import torch; [print(torch.cuda.get_device_name(n)) for n in range(torch.cuda.device_count())]"
#: Lines of `nvidia-smi -L`: GPU 0: NVIDIA A100 (UUID: GPU-…), and indented MIG 1g.5gb Device 0: (UUID: MIG-…).
_GPU_LINE: Final = re.compile(r"GPU (\d+): (.*?)(?: \(UUID: (.*)\))?$")
_MIG_LINE: Final = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]*)\)$")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program said."""

    #: Its standard output, or what came of it before it failed.
    text: str
    #: Why it cannot be relied on, a clause; "" when it ended with 0.
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of this machine."""

    #: As torch names them, such as "NVIDIA RTX A5000".
    names: tuple[str, ...] = ()
    #: As CUDA_VISIBLE_DEVICES names what can be computed on: a number for a GPU, or the UUIDs of its MIG instances.
    devices: tuple[str, ...] = ()
    #: Why the listing may not be complete, a clause; "" when it is.
    failure: str = ""


@cache
def all_gpus() -> Gpus:
    """List the GPUs of this machine; asks once a process."""
    answer = ask("nvidia-smi", "-L")
    if answer is not None:
        return _parsed(answer)
    # A container may have the GPUs and not the tool.
    if not any(map(os.path.exists, _DEVICES)):
        return Gpus()
    answer = ask(sys.executable, "-P", "-c", _NAMES) or Answer(text="")
    names = tuple(answer.text.splitlines())
    return Gpus(names=names, devices=tuple(map(str, range(len(names)))), failure=answer.failure)


def _parsed(answer: Answer) -> Gpus:
    names: list[str] = []
    devices: list[list[str]] = []
    for line in answer.text.splitlines():
        if gpu := _GPU_LINE.match(line):
            number, name, uuid = gpu.groups()
            names.append(name)
            # When a GPU is lost, CUDA counts those that are left.
            devices.append([uuid if answer.failure and uuid else number])
        elif (mig := _MIG_LINE.match(line)) and devices:
            instances = [device for device in devices[-1] if device.startswith("MIG-")]
            devices[-1] = [*instances, mig[1]]
    flat = tuple(device for of_gpu in devices for device in of_gpu)
    return Gpus(names=tuple(names), devices=flat, failure=answer.failure)


def visible_gpus() -> list[str]:
    """Name the GPUs that the ranks will see as CUDA_VISIBLE_DEVICES does: by numbers or UUIDs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(all_gpus().devices)
    names = [name.strip() for name in visible.split(",")]
    # CUDA sees nothing from a -1 on.
    seen = names[: names.index("-1")] if "-1" in names else names
    return list(dict.fromkeys(name for name in seen if name))


def num_gpus() -> int:
    """Count the GPUs that the ranks will see."""
    return len(visible_gpus())


def share_out(gpus: Sequence[str], num_groups: int, num_ranks: int) -> list[list[str]]:
    """Give each group the GPUs of its ranks, which take turns at those that there are.

    Args:
        gpus: as `visible_gpus` names them; at least one.
        num_groups: that share them.
        num_ranks: of each group.
    """
    turns = [[gpus[(group * num_ranks + rank) % len(gpus)] for rank in range(num_ranks)] for group in range(num_groups)]
    # A GPU that CUDA is told of twice hides them all; ranks that share one count it by turns themselves.
    return [list(dict.fromkeys(turn)) for turn in turns]


def ranks_per_gpu(num_gpus: int, num_ranks: int) -> int:
    """Return the largest number of ranks that share a GPU when all ranks of a machine take turns at its GPUs.

    Args:
        num_gpus: that they see; 0: they compute on processors.
        num_ranks: of all groups.
    """
    return math.ceil(num_ranks / num_gpus) if num_gpus else 1


def ask(*command: str, timeout_s: float = TIMEOUT_S) -> Answer | None:
    """Give what a command printed, also when it failed; None where it is not installed.

    A command that hangs is killed with all that it has started, and not waited for.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError:
        return None
    program = os.path.basename(command[0])
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILL_S)
        return Answer(text="", failure=f"{program} did not answer within {timeout_s:.0f} s")
    if process.returncode == 0:
        return Answer(text=text)
    said = next((line.strip() for line in text.splitlines() if line.strip() and not _is_listing(line)), "")
    return Answer(text=text, failure=f"{program} ended with exit code {process.returncode}{said and f': {said[:200]}'}")


def _is_listing(line: str) -> bool:
    """Whether a line names a device and is not a complaint."""
    return bool(_GPU_LINE.match(line) or _MIG_LINE.match(line) or re.match(r"\d+, ", line))
