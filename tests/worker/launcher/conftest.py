"""A stub of nvidia-smi, and programs that hold GPUs by its word."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from svdq.worker.launcher.gpus import all_gpus
from tests.worker.launcher.nvidia_smi import PutNvidiaSmi


@pytest.fixture
def put_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PutNvidiaSmi]:
    """Put a script in place of nvidia-smi; returns the file with a line for each call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def put(script: str) -> Path:
        program = folder / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" >> {folder / "calls"}\n{script}\n')
        program.chmod(0o755)
        all_gpus.cache_clear()
        return folder / "calls"

    yield put
    all_gpus.cache_clear()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Start a program that does nothing, in a folder, and return its process."""
    found: list[subprocess.Popen[bytes]] = []

    def start(folder: str, script: str) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / script).write_text("import time; time.sleep(600)")
        found.append(subprocess.Popen([sys.executable, script], cwd=tmp_path / folder))
        return found[-1].pid

    yield start
    for process in found:
        process.kill()
        process.wait()
