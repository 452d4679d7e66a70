"""The GPUs that ranks will see, told by NVIDIA's tool: torch, which knows them too, takes seconds to import."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

#: Seconds for an answer: without NVIDIA's persistence mode each GPU is first woken up, which takes seconds.
TIMEOUT_S: Final = 120.0
#: What is there where a GPU is: NVIDIA's, WSL's, AMD's.
_DEVICES: Final = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_NAMES: Final = "import torch; [print(torch.cuda.get_device_name(n)) for n in range(torch.cuda.device_count())]"


def visible_gpus() -> list[str]:
    """Name the GPUs that the ranks will see as CUDA_VISIBLE_DEVICES does: numbers, or names of GPUs and MIG parts."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(len(gpu_names()))]
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
    """Give the most ranks that share a GPU, when all ranks of a machine take turns at its GPUs.

    Args:
        num_gpus: that they see; 0: they compute on processors.
        num_ranks: of all groups.
    """
    return math.ceil(num_ranks / num_gpus) if num_gpus else 1


def gpu_names() -> list[str]:
    """Name all GPUs of this machine as torch names them, such as "NVIDIA RTX A5000"."""
    listed = _said_by("nvidia-smi", "-L")
    if listed is not None:
        return re.findall(r"^GPU \d+: (.*?)(?: \(UUID: .*)?$", listed, re.MULTILINE)
    # A container may have the GPUs and not the tool.
    named = _said_by(sys.executable, "-P", "-c", _NAMES) if any(map(os.path.exists, _DEVICES)) else None
    return (named or "").splitlines()


def _said_by(*command: str) -> str | None:
    """Give what a command printed; None where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
