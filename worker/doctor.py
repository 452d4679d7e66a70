"""Whether this machine can render: its GPUs and their memory, torch, ffmpeg. Imports torch only when it is there."""

import importlib.util
import subprocess
from collections.abc import Iterator

from svdq.pipeline.errors import UnavailableError
from svdq.pipeline.ffmpeg import ADVICE, ffmpeg_version
from svdq.producer.doctor import Finding

_QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits"]


def check_machine() -> Iterator[Finding]:
    """Check GPUs, torch and ffmpeg; a machine without GPUs renders on its processors."""
    gpus = _gpus()
    for index, name, total, free in gpus:
        yield Finding(subject=f"GPU {index}", level="ok", text=f"{name}, {_gib(total)}, {_gib(free)} free")
    if not gpus:
        yield Finding(subject="GPUs", level="ok", text="none; videos are rendered on the processors")
    if gpus and importlib.util.find_spec("torch") is not None:
        yield from _torch()
    yield _ffmpeg()


def _gpus() -> list[tuple[str, str, str, str]]:
    """Ask NVIDIA's tool for index, name, memory and free memory (MiB) of every GPU."""
    try:
        listed = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in listed.stdout.splitlines()] if listed.returncode == 0 else []
    return [(row[0], row[1], row[2], row[3]) for row in rows if len(row) == 4]


def _gib(mebibytes: str) -> str:
    """Write what NVIDIA's tool says of memory; a GPU that shares the host's has "[N/A]"."""
    return f"{int(mebibytes) / 1024:.0f} GiB" if mebibytes.isdigit() else "memory unknown"


def _torch() -> Iterator[Finding]:
    """Say whether torch can use the GPUs that there are."""
    import torch

    if not torch.cuda.is_available():
        yield Finding(
            subject="torch",
            level="warn",
            text=f"torch {torch.__version__} cannot use the GPUs",
            advice="install a torch that is built for CUDA, and a driver that is new enough for it",
        )


def _ffmpeg() -> Finding:
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        return Finding(subject="ffmpeg", level="warn", text="imageio-ffmpeg is not installed", advice=ADVICE)
    try:
        return Finding(subject="ffmpeg", level="ok", text=ffmpeg_version())
    except UnavailableError as error:
        sentence, _, advice = str(error).partition("; ")
        return Finding(subject="ffmpeg", level="fail", text=sentence, advice=advice.rstrip("."))
