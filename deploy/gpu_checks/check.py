"""What all sections share: the options, the report, and the commands of svdq that they run."""

import argparse
import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image

from gpu_checks.report import Report
from svdq.worker.launcher.gpus import is_visible, memory_of_gpus, visible_gpus

#: Bytes of GPU memory that each process takes besides its tensors.
CONTEXT_BYTES = 700 * 2**20
T = TypeVar("T")


class Check:
    """One run of the check. Each worker has its own home and queue."""

    def __init__(self, report: Report, folder: Path, options: argparse.Namespace) -> None:
        """Prepare the sections; `folder` is for files that later sections or runs need."""
        self.report = report
        self.folder = folder
        self.options = options
        self.on_gpu = options.device == "cuda"
        self.device = ["--device", options.device]

    @property
    def model(self) -> str:
        """The model of Stable Video Diffusion; the published sizes with random weights are written at the first use."""
        if self.options.model:
            return str(self.options.model)
        import torch

        from gpu_checks.full_size import COMPONENTS, write_full_size_model

        folder = self.folder / "full-size"
        write_once(folder, lambda new: write_full_size_model(new, torch.float16, components=COMPONENTS))
        return str(folder)

    def attempt(self, what: str, measure: Callable[[], T]) -> T | None:
        """Measure one thing, or return what an earlier run in the folder measured; a failure is a row, and None."""
        path = self.folder / "measured.json"
        done = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if what not in done:
            try:
                done[what] = measure()
            except Exception as error:  # noqa: BLE001 - the rest of the section may work
                self.report.judge(what, f"failed: {error}", "", False)
                return None
            path.write_text(json.dumps(done, indent=2), encoding="utf-8")
        found: T = done[what]
        return found

    def measure_parts(self, name: str, *arguments: object) -> list[dict[str, Any]]:
        """Measure parts of a model; return the rows that could be measured, also if the time limit ended the run.

        Rows of an earlier run in the same folder are kept. Each that could not be measured is a row of the report.
        """
        path = self.folder / f"{name}.json"
        command = ["gpu_checks.model_parts", *self.device, "--repeats", self.options.repeats]
        try:
            self.report.run(*command, *arguments, "--json", path)
        except RuntimeError as error:
            if not path.exists():
                raise
            self.report.fail(str(error))
        for row in self._rows(name):
            if row["failure"]:
                chosen = ("part", "component", "dtype", "compiled", "approximate", "offload", "decode_chunk_size")
                words = [str(row[field]) for field in chosen if row[field] not in (None, "off", [])]
                self.report.judge(f"{name}: {' '.join(words)}", f"failed: {row['failure']}", "", False)
        if not (rows := self.measured(name)):
            raise RuntimeError("nothing could be measured")
        return rows

    def measured(self, name: str) -> list[dict[str, Any]]:
        """Return the rows that were measured for a section, in this run or an earlier one."""
        return [row for row in self._rows(name) if not row["failure"]]

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / f"{name}.json"
        rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        return rows

    def row(self, part: str, chunk_size: int | None = None) -> dict[str, Any] | None:
        """Return the first row of a part from the section `model`."""
        wanted = (part, chunk_size)
        return next((row for row in self.measured("model") if (row["part"], row["decode_chunk_size"]) == wanted), None)

    def ranks_that_fit(self) -> tuple[int, int]:
        """Return the number of ranks that the cards can hold, at least two, and the number of cards."""
        wanted, step, gpus = self.options.ranks, self.row("step"), self.num_gpus
        # Of nvidia-smi: torch would hold a context on each card from here on.
        free_mib = [int(row[3]) for row in memory_of_gpus()[0] if row[3].isdigit() and is_visible(row[0])]
        if not gpus or gpus >= wanted or step is None or not free_mib:
            return wanted, gpus
        # Each rank warms up for a decode of all frames at once, and the first one also has the encoder.
        encode, decode = self.row("encode"), self.row("decode", self.options.frames)
        peak = max(step["peak_bytes"], decode["peak_bytes"] if decode else 0)
        free = min(free_mib) * 2**20 - (encode["weight_bytes"] if encode else 0)
        return max(2, min(wanted, gpus * int(free // (step["weight_bytes"] + peak + CONTEXT_BYTES)))), gpus

    @property
    def num_gpus(self) -> int:
        """The number of cards; 0 for a run on processors."""
        return len(visible_gpus()) if self.on_gpu else 0

    @contextlib.contextmanager
    def home(self, name: str, model: str | None = None) -> Iterator[dict[str, str]]:
        """Make a home, and yield the environment of its commands; its Redis is stopped at the end."""
        home = self.folder / name
        shutil.rmtree(home, ignore_errors=True)  # left by a killed run
        ours = {"SVDQ_HOME": str(home), "SVDQ_MODEL": model or self.model}
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "compiled")
        # The user's settings are for other queues.
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SVDQ_")} | ours
        try:
            yield environment
        finally:
            self.report.run("svdq.cli", "redis", "stop", environment=environment, least_s=30)

    def render(
        self,
        name: str,
        photos: Sequence[Path],
        video: Sequence[object],
        *worker: object,
        model: str | None = None,
        beside: Callable[[Path], None] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Queue photos and render them with a worker.

        Args:
            name: of its home.
            photos: with different names.
            video: options of `svdq submit`.
            *worker: options of `svdq worker`.
            model: in place of the check's model.
            beside: called in a thread with the folder of the videos while the worker runs.

        Returns:
            The sidecar of each video by its photo's name.
        """
        with self.home(name, model) as environment:
            outputs = Path(environment["SVDQ_HOME"], "storage", "outputs")
            submit = ["submit", *photos, *video, "--seed", 1, "--format", "png"]
            self.report.run("svdq.cli", *submit, environment=environment)
            if beside is not None:
                threading.Thread(target=beside, args=[outputs], daemon=True).start()
            self.report.run("svdq.cli", "worker", "--burst", *self.device, *worker, environment=environment)
        sidecars = [json.loads(path.read_text(encoding="utf-8")) for path in outputs.glob("*.json")]
        found = {sidecar["job"]["name"]: sidecar for sidecar in sidecars}
        if missing := sorted({photo.stem for photo in photos} - set(found)):
            raise RuntimeError(f"no video was made of {', '.join(missing)}")
        if len(sidecars) > len(photos):
            raise RuntimeError(f"{len(sidecars)} videos were made of {len(photos)} photos")
        return found


def write_once(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a model into a folder, unless an earlier run has written all of it."""
    whole = folder.with_name(f"{folder.name}-is-whole")
    if not whole.exists():
        write(folder)
        whole.touch()


def frames_of(sidecar: Mapping[str, Any]) -> Any:
    """Read the frames of a video: (F, H, W, 3), uint8."""
    (folder,) = sidecar["outputs"]
    return np.stack([np.asarray(PIL.Image.open(path)) for path in sorted(Path(folder).glob("*.png"))])


def pixel_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return the largest difference of any pixel between two videos, from 0 to 255."""
    frames, others = frames_of(one), frames_of(other)
    return int(np.abs(frames.astype(int) - others).max()) if frames.shape == others.shape else 255
