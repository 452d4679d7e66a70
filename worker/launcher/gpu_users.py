"""Names the programs that hold memory of the GPUs, by NVIDIA's tool and the processes' own words."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from svdq.pipeline.models.compute.memory import size_text
from svdq.worker.launcher.gpus import all_gpus, ask, is_visible

#: Held memory that is worth a word: a desktop and an idle program take less.
LEAST_BYTES = 1 << 30
_USERS = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")


@dataclass(frozen=True, kw_only=True)
class GpuUser:
    """A process that holds memory of a GPU."""

    gpu: str  # its number, as nvidia-smi has it; its UUID if that is not known
    pid: int
    program: str
    num_bytes: int

    def __str__(self) -> str:
        held = f"{self.program} (process {self.pid}) holds {size_text(self.num_bytes)}"
        return f"{held}, and keeps its models there while it is idle" if self.program == "ComfyUI" else held

    @property
    def advice(self) -> str:
        """How to have the memory, as a clause."""
        how = 'press its "Free model and node cache", or ' if self.program == "ComfyUI" else ""
        return f"{how}end it (`kill {self.pid}`)"


def users_of_gpus() -> Iterator[GpuUser]:
    """Yield the programs that hold much memory of the GPUs that ranks will see, besides svdq's own."""
    answer = ask(*_USERS, timeout_s=20.0)
    numbers = {uuid: number for number, uuid in all_gpus().uuids.items()} if answer is not None else {}
    for line in answer.text.splitlines() if answer is not None else ():
        uuid, pid, mebibytes, *name = line.split(", ", 3) if line.count(", ") >= 2 else ("", "", "")
        if not (pid.isdigit() and mebibytes.isdigit()):
            continue
        gpu, program = numbers.get(uuid, uuid), _program(int(pid), "".join(name))
        if int(mebibytes) << 20 >= LEAST_BYTES and is_visible(gpu) and program is not None:
            yield GpuUser(gpu=gpu, pid=int(pid), program=program, num_bytes=int(mebibytes) << 20)


def _program(pid: int, name: str) -> str | None:
    """Return what people call the program of a process, of which the tool says a `name`; None for svdq."""
    words: list[str] = []
    folder = ""
    with contextlib.suppress(OSError):  # it has ended
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    with contextlib.suppress(OSError):  # another user's
        folder = os.readlink(f"/proc/{pid}/cwd")
    if any("svdq" in word for word in words):
        return None
    if any("comfyui" in each.lower() for each in (*words, folder, name)):
        return "ComfyUI"
    first, *others = words if any(words) else [name or "a program"]
    script = next((each for each in others if each.endswith(".py")), "")
    return " ".join(filter(None, [Path(first).name, script and Path(script).name]))
