"""Names the programs that hold memory of the GPUs, by NVIDIA's tool and the processes' own words."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from svdq.pipeline.models.compute.memory import size_text
from svdq.worker.launcher.gpus import all_gpus, ask, is_visible

#: Held memory that is worth a word: a desktop and an idle program take less.
LEAST_BYTES = 1 << 30
#: As XML, since the lists for other formats leave out what only draws, such as games.
_USERS: Final = ("nvidia-smi", "-q", "-x")


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


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """The memory of a GPU, and who holds it."""

    uuid: str
    total_bytes: int
    free_bytes: int
    users: tuple[GpuUser, ...]  # programs that hold much of it, besides svdq
    svdq_bytes: int  # what processes of svdq hold
    is_listed: bool  # whether the tool lists any process; in a container it does not

    @property
    def number(self) -> str:
        """Its number, as nvidia-smi has it; its UUID if that is not known."""
        return _number_of(self.uuid)


def users_of_gpus() -> Iterator[GpuUser]:
    """Yield the programs that hold much memory of the GPUs that ranks will see, besides svdq's own."""
    for memory in memory_by_user():
        if is_visible(memory.number):
            yield from memory.users


def memory_by_user() -> list[GpuMemory]:
    """Ask for the memory of each GPU and who holds it; nothing of what the tool does not know."""
    answer = ask(*_USERS, timeout_s=20.0)
    _, begin, text = answer.text.partition("<?xml") if answer is not None else ("", "", "")  # after warnings
    try:
        log = ElementTree.fromstring(begin + text)  # noqa: S314 - of the driver's own tool
    except ElementTree.ParseError:
        return []
    found = []
    for gpu in log.iter("gpu"):
        uuid, memory = gpu.findtext("uuid", ""), gpu.find("fb_memory_usage")
        total, free = (_bytes_of(memory, name) if memory is not None else None for name in ("total", "free"))
        if total is None or free is None:
            continue
        users, svdq_bytes = dict[int, GpuUser](), 0  # one that computes and draws may be there twice
        for process in gpu.iter("process_info"):
            pid, held = process.findtext("pid", ""), _bytes_of(process, "used_memory")
            if held is None or not pid.isdigit():
                continue
            program = _program(int(pid), process.findtext("process_name", ""))
            if program is None:
                svdq_bytes += held
            elif held >= LEAST_BYTES:
                users[int(pid)] = GpuUser(gpu=_number_of(uuid), pid=int(pid), program=program, num_bytes=held)
        found.append(
            GpuMemory(
                uuid=uuid,
                total_bytes=total,
                free_bytes=free,
                users=tuple(users.values()),
                svdq_bytes=svdq_bytes,
                is_listed=gpu.find(".//process_info") is not None,
            )
        )
    return found


def _bytes_of(element: ElementTree.Element, name: str) -> int | None:
    """Return a number such as "24564 MiB"; None for N/A."""
    found = re.fullmatch(r"(\d+) MiB", element.findtext(name, "").strip())
    return int(found[1]) << 20 if found else None


def _number_of(uuid: str) -> str:
    return next((number for number, of in all_gpus().uuids.items() if of == uuid), uuid)


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
    program = first.replace("\\", "/")  # of Windows, run by Wine
    return " ".join(filter(None, [Path(program).name, script and Path(script).name]))
