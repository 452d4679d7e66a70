"""Checks whether this machine can render: GPUs and their memory, torch, ffmpeg."""

import importlib.util
from collections.abc import Iterator

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.media.ffmpeg import ffmpeg_version
from svdq.producer.doctor import Finding
from svdq.worker.launcher.gpus import Answer, ask

_QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
#: Largest number of seconds that the query may take.
QUERY_S = 20.0


def check_machine() -> Iterator[Finding]:
    """Check GPUs, torch and ffmpeg; a machine without GPUs renders on its CPU."""
    answer = ask(*_QUERY, timeout_s=QUERY_S) or Answer(text="")
    lines = [line.split(", ") for line in answer.text.splitlines()]
    rows = [line for line in lines if len(line) == 4 and line[0].isdigit()]
    for index, name, total, free in rows:
        yield Finding(subject=f"GPU {index}", level="ok", text=f"{name}, {_gib(total)}, {_gib(free)} free")
    if answer.failure:
        advice = "see `dmesg`; a GPU that is lost needs a reset or a reboot"
        yield Finding(subject="GPUs", level="warn" if rows else "fail", text=answer.failure, advice=advice)
    elif not rows:
        yield Finding(subject="GPUs", level="ok", text="none; videos are rendered on the processors")
    if rows and importlib.util.find_spec("torch") is not None:
        yield from _torch()
    yield _ffmpeg()


def _gib(mebibytes: str) -> str:
    """Format a size from nvidia-smi, which is "[N/A]" for a GPU that uses the host's memory."""
    return f"{int(mebibytes) / 1024:.0f} GiB" if mebibytes.isdigit() else "memory unknown"


def _torch() -> Iterator[Finding]:
    """Check that torch can use the GPUs."""
    import torch

    if not torch.cuda.is_available():
        yield Finding(
            subject="torch",
            level="warn",
            text=f"torch {torch.__version__} cannot use the GPUs",
            advice="install a CUDA build of torch and a driver that is new enough for it",
        )


def _ffmpeg() -> Finding:
    try:
        return Finding(subject="ffmpeg", level="ok", text=ffmpeg_version())
    except UnavailableError as error:
        sentence, _, advice = str(error).partition("; ")
        can_render = importlib.util.find_spec("torch") is not None
        return Finding("ffmpeg", "fail" if can_render else "warn", sentence, advice.rstrip("."))
