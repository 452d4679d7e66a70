"""Lists the GPUs that ranks will see with NVIDIA's tool, since importing torch takes seconds, and tries one out."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Final

TIMEOUT_S: Final = 120.0  # seconds; without persistence mode, waking each GPU takes some
KILL_S: Final = 2.0  # seconds that a killed program gets to close its pipes; one that hangs in a driver never does
GPUS_BY_BUS: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # CUDA numbers GPUs as nvidia-smi, not the fastest first
PROBE_S: Final = 90.0  # seconds that a test computation may take, with the import of torch
_DEVICES: Final = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, WSL, AMD
_MEMORY: Final = ("nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits")
_CAPABILITY: Final = ("nvidia-smi", "--query-gpu=index,compute_cap", "--format=csv,noheader")
_COUNT: Final = "import torch; [print(number) for number in range(torch.cuda.device_count())]"
#: Lines of `nvidia-smi -L`: GPU 0: NVIDIA A100 (UUID: GPU-…), and indented MIG 1g.5gb Device 0: (UUID: MIG-…).
_GPU_LINE: Final = re.compile(r"GPU (\d+): .*?(?: \(UUID: (.*)\))?$")
_MIG_LINE: Final = re.compile(r"\s+MIG .*\(UUID: (MIG-[^)]*)\)$")
_LISTING: Final = re.compile(rf"{_GPU_LINE.pattern}|{_MIG_LINE.pattern}|\d+, ")  # no error message
_DEVICE: Final = re.compile(r"\d|GPU-|MIG-")  # the beginning of a device in CUDA_VISIBLE_DEVICES


@dataclass(frozen=True, kw_only=True)
class CommandOutput:
    """The standard output and error of a program."""

    text: str
    failure: str = ""  # why the output may be incomplete, a clause; "" when the program ended with 0


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of this machine."""

    devices: tuple[str, ...] = ()  # for CUDA_VISIBLE_DEVICES: number of a GPU, UUIDs of its MIG instances
    failure: str = ""  # why the list may be incomplete, a clause
    uuids: Mapping[str, str] = field(default_factory=dict)  # the UUIDs of whole GPUs by their numbers


@cache
def all_gpus() -> Gpus:
    """List the GPUs of this machine; runs the tool once per process."""
    answer = ask("nvidia-smi", "-L")
    if answer is not None:
        return _parsed(answer)
    # A container may have GPUs without the tool.
    if not any(map(os.path.exists, _DEVICES)):
        return Gpus()
    answer = ask(sys.executable, "-P", "-c", _COUNT) or CommandOutput(text="")
    return Gpus(devices=tuple(answer.text.splitlines()), failure=answer.failure)


def _parsed(answer: CommandOutput) -> Gpus:
    devices: list[list[str]] = []
    uuids: dict[str, str] = {}
    for line in answer.text.splitlines():
        if gpu := _GPU_LINE.match(line):
            number, uuid = gpu.groups()
            if uuid:
                uuids[number] = uuid
            # When a GPU is lost, CUDA counts those that are left.
            devices.append([uuid if answer.failure and uuid else number])
        elif (mig := _MIG_LINE.match(line)) and devices:
            instances = [device for device in devices[-1] if device.startswith("MIG-")]
            devices[-1] = [*instances, mig[1]]
    return Gpus(devices=tuple(device for of_gpu in devices for device in of_gpu), failure=answer.failure, uuids=uuids)


def memory_of_gpus() -> tuple[list[list[str]], str]:
    """Ask for the number, name, total and free memory of each GPU, in MiB, as text; and for why that failed, or ""."""
    answer = ask(*_MEMORY, timeout_s=20.0) or CommandOutput(text="")
    lines = [line.split(", ") for line in answer.text.splitlines()]
    return [line for line in lines if len(line) == 4 and line[0].isdigit()], answer.failure


def least_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs that the ranks will see; None: there are none, or not known."""
    answer = ask(*_CAPABILITY, timeout_s=20.0) or CommandOutput(text="")
    found = re.findall(r"^(\d+), (\d+)\.(\d+)$", answer.text, re.MULTILINE)
    return min(((int(major), int(minor)) for number, major, minor in found if is_visible(number)), default=None)


def visible_gpus() -> list[str]:
    """List the GPUs that the ranks will see, as values of CUDA_VISIBLE_DEVICES: numbers or UUIDs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return list(all_gpus().devices)
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores everything from the first name on that is no device, such as -1 or Slurm's NoDevFiles.
    return list(dict.fromkeys(takewhile(_DEVICE.match, names)))


def lasting_names(devices: Sequence[str]) -> list[str]:
    """Replace numbers of GPUs, which change when one is lost, by UUIDs, unless the user has CUDA number them."""
    uuids = {} if "CUDA_DEVICE_ORDER" in os.environ else all_gpus().uuids
    return [uuids.get(device, device) for device in devices]


def title(device: str) -> str:
    """Name a GPU for people, such as "GPU 3 (GPU-8f2d…)"."""
    numbers = [number for number, uuid in all_gpus().uuids.items() if uuid == device]
    return f"GPU {numbers[0]} ({device})" if numbers else f"GPU {device}"


def is_visible(number: str) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves ranks the GPU with a number of nvidia-smi."""
    return "CUDA_VISIBLE_DEVICES" not in os.environ or bool({number, all_gpus().uuids.get(number)} & {*visible_gpus()})


def probe(device: str, timeout_s: float = PROBE_S) -> str:
    """Compute a little on a GPU in a new process; return why that failed, a clause, or ""."""
    answer = ask(sys.executable, "-P", "-m", "svdq.worker.doctor", device, str(os.getpid()), timeout_s=timeout_s)
    if answer is None or not answer.failure:
        return ""
    lines = [line.strip() for line in answer.text.splitlines() if line.strip()]
    return lines[-1][:200].rstrip(".") if lines else answer.failure


def share_out(gpus: Sequence[str], num_groups: int, num_ranks: int) -> list[list[str]]:
    """Return the GPUs of each group; all ranks use `gpus`, at least one, in rotation."""
    turns = [[gpus[(group * num_ranks + rank) % len(gpus)] for rank in range(num_ranks)] for group in range(num_groups)]
    # CUDA hides all GPUs if one is named twice; `choose_device` rotates over the rest.
    return [list(dict.fromkeys(turn)) for turn in turns]


def ranks_per_gpu(num_gpus: int, num_ranks: int) -> int:
    """Return the largest number of ranks that share a GPU; 1 without GPUs. `num_ranks` counts all groups."""
    return math.ceil(num_ranks / num_gpus) if num_gpus else 1


def ask(*command: str, timeout_s: float = TIMEOUT_S) -> CommandOutput | None:
    """Run a command and return its output, also when it fails; None if it is not installed. Kills one that hangs."""
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
        return CommandOutput(text="", failure=f"{program} did not answer within {timeout_s:.0f} s")
    if process.returncode == 0:
        return CommandOutput(text=text)
    errors = (line.strip() for line in text.splitlines() if line.strip() and not _LISTING.match(line))
    said = f": {error[:200]}" if (error := next(errors, "")) else ""
    return CommandOutput(text=text, failure=f"{program} ended with exit code {process.returncode}{said}")
