"""The results, the time limit, and the commands of svdq that sections run."""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import psutil

PHOTO = Path(__file__).parents[2] / "docs" / "demo" / "photo.jpg"
TASK_S = 480.0  # that one command may take: what hangs must not take the time of all others again and again
STOP_S = 30.0  # that stopping Redis may take after the end, too


class OutOfTime(Exception):  # noqa: N818 - no failure
    """The time of the whole check is over."""


class Check:
    """One run of the check on what earlier runs have left in its folder."""

    def __init__(self, folder: Path, device: str, total_s: float, where: str) -> None:
        """Read the results of earlier runs."""
        self.folder = folder
        self.on_gpu = device == "cuda"
        self.device = ["--device", device]
        self._end = time.monotonic() + total_s
        self._path = folder / "results.json"
        folder.mkdir(parents=True, exist_ok=True)
        #: Of each task that has ended, where it ran and its figures by what they are: measured, wanted, good.
        self._tasks: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self._tasks = json.loads(self._path.read_text(encoding="utf-8"))
        self._where = where
        self._writing = threading.Lock()
        self._task = threading.local()  # the figures of the task that a thread does

    def task(self, name: str, do: Callable[[], object]) -> None:
        """Do a task, unless an earlier run has; a failure is a figure. Raises OutOfTime if there is no time."""
        if name in self._tasks:
            return
        if time.monotonic() >= self._end:
            raise OutOfTime
        self._task.figures = {}
        try:
            do()
        except OutOfTime:
            raise
        except Exception as error:  # noqa: BLE001 - the other tasks may work
            self.figure(name, f"failed: {error or type(error).__name__}", good=False)
        with self._writing:
            self._tasks[name] = {"where": self._where, "figures": self._task.figures}
            self._write()

    def figure(self, what: str, measured: object, wanted: object = "", *, good: bool | None = None) -> None:
        """Add a figure to the task with what it should be; `good` is None if nothing is required."""
        self._task.figures[what] = {"measured": str(measured), "wanted": str(wanted), "good": good}
        print(f"{what}: {measured}" + (f"; wanted: {wanted}" if wanted != "" else ""), flush=True)  # noqa: T201

    def forget_failed(self) -> None:
        """Forget the tasks of which something failed or was not as wanted, and all videos."""
        for name, task in list(self._tasks.items()):
            if any(figure["good"] is False for figure in task["figures"].values()):
                del self._tasks[name]
        for home in self.folder.glob("home-*"):
            shutil.rmtree(home)
        self._write()

    def finish(self) -> int:
        """Write the table; return 1 if something failed or is not as wanted, else 0."""
        self._write()
        bad = [what for what, figure in self._all() if figure["good"] is False]
        print(f"Not as wanted: {'; '.join(bad)}." if bad else "All that was measured is as wanted.")  # noqa: T201
        print(f"All figures: {self.folder / 'results.md'}")  # noqa: T201
        return 1 if bad else 0

    @property
    def log(self) -> Path:
        """The log of this thread, log.txt of the first one."""
        thread = threading.current_thread()
        name = "log.txt" if thread is threading.main_thread() else f"log-{thread.name}.txt"
        return self.folder / name

    def _all(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for task in self._tasks.values():
            yield from task["figures"].items()

    def _write(self) -> None:
        """Write both files of results."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._tasks, indent=2), encoding="utf-8")
        new.replace(self._path)  # a machine that is taken back leaves the old file or the new one
        lines = [*dict.fromkeys(task["where"] for task in self._tasks.values())]
        lines += ["", "| what | measured | wanted | reached |", "|---|---|---|---|"]
        for what, figure in self._all():
            mark = {True: "yes", False: "**no**", None: ""}[figure["good"]]
            lines.append(f"| {what} | {figure['measured'].replace('|', '/')} | {figure['wanted']} | {mark} |")
        (self.folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def run(
        self,
        module: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        least_s: float = 1.0,
        limit_s: float = TASK_S,
    ) -> None:
        """Run a module in the time that is left, at least `least_s` and at most `limit_s`; its output goes to a log.

        Raises:
            OutOfTime: it was ended because the time of the whole check is over.
            RuntimeError: it failed, or took longer than a command may.
        """
        left_s = max(least_s, min(limit_s, self._end - time.monotonic()))
        command = [sys.executable, "-m", module, *map(str, arguments)]
        path = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        with self.log.open("ab+") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            # `timeout` kills the command's ranks, too.
            timed = ["/usr/bin/timeout", "--signal=KILL", str(left_s), *command]
            started = time.monotonic()
            code = subprocess.run(
                timed, check=False, stdout=log, stderr=subprocess.STDOUT, env={**(environment or os.environ), **path}
            ).returncode
            if code == -signal.SIGKILL and time.monotonic() >= self._end:
                raise OutOfTime
            if code == -signal.SIGKILL and time.monotonic() >= started + left_s:
                raise RuntimeError(f"`{module}` took longer than {left_s:.0f} s")
            if code != 0:
                log.seek(max(0, log.tell() - 2000))
                last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise RuntimeError(f"`{module}` ended with exit code {code}: {last[:200]}")

    @contextlib.contextmanager
    def home(self, name: str, model: str) -> Iterator[dict[str, str]]:
        """Yield the environment of commands with a home and queue of their own; stop its Redis at the end."""
        ours = {"SVDQ_HOME": str(self.folder / f"home-{name}"), "SVDQ_MODEL": model}
        ours["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "compiled")
        # The user's settings are for other queues.
        environment = {each: text for each, text in os.environ.items() if not each.startswith("SVDQ_")} | ours
        try:
            yield environment
        finally:
            self.run("svdq.cli", "redis", "stop", environment=environment, least_s=STOP_S)

    def render(
        self,
        name: str,
        model: str,
        jobs: Sequence[Sequence[object]],
        *worker: object,
        num_videos: int,
        kill_after: int | None = None,
        limit_s: float = TASK_S,
    ) -> list[dict[str, Any]]:
        """Render videos with a worker; one that was interrupted in an earlier run goes on with its queue.

        Args:
            name: of its home.
            model: of the worker.
            jobs: arguments of each `svdq submit`.
            *worker: options of `svdq worker`.
            num_videos: of all jobs.
            kill_after: number of videos after which a rank is killed with kill -9; None: none is.
            limit_s: seconds that the worker may take.

        Returns:
            The sidecars, in the order in which the videos ended.
        """
        with self.home(name, model) as environment:
            home = Path(environment["SVDQ_HOME"])
            outputs, submitted, killed = home / "storage" / "outputs", home / "submitted", home / "killed"
            if not submitted.exists():
                for job in jobs:
                    self.run("svdq.cli", "submit", *job, "--seed", 1, "--format", "png", environment=environment)
                submitted.touch()
            if kill_after is not None and not killed.exists():
                threading.Thread(target=_kill_rank, args=[home, kill_after, killed], daemon=True).start()
            if len(list(outputs.glob("*.json"))) < num_videos:
                command = ["worker", "--burst", *self.device, *worker]
                self.run("svdq.cli", *command, environment=environment, limit_s=limit_s)
            if kill_after is not None and not killed.exists():
                raise RuntimeError("no rank could be killed")
        sidecars = [json.loads(path.read_text(encoding="utf-8")) for path in outputs.glob("*.json")]
        if len(sidecars) != num_videos:
            raise RuntimeError(f"{len(sidecars)} videos were made in place of {num_videos}")
        return sorted(sidecars, key=lambda sidecar: str(sidecar["finished_at"]))


def _kill_rank(home: Path, num_videos: int, killed: Path) -> None:
    """Wait until so many videos are written, then kill a rank of the home with kill -9 and write its pid."""
    outputs = home / "storage" / "outputs"
    while len(list(outputs.glob("*.json"))) < num_videos:
        time.sleep(0.05)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("svdq rank") and process.environ()["SVDQ_HOME"] == str(home):
                process.send_signal(signal.SIGKILL)
                killed.write_text(str(process.pid), encoding="utf-8")
                return


_WRITING: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write a model into a folder, unless this run or an earlier one has written all of it; return the folder."""
    whole = folder.with_name(f"{folder.name}-is-whole")
    with _WRITING[folder]:
        if not whole.exists():
            write(folder)
            whole.touch()
    return folder


def frames_of(sidecar: Mapping[str, Any]) -> Any:
    """Read the frames of a video: (F, H, W, 3), uint8."""
    folder = next(path for path in map(Path, sidecar["outputs"]) if path.is_dir())
    return np.stack([np.asarray(PIL.Image.open(path)) for path in sorted(folder.glob("*.png"))])


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return the largest difference of any pixel between two videos, from 0 to 255; 255 for other sound."""
    sounds = [[Path(path).read_bytes() for path in each["outputs"] if path.endswith(".wav")] for each in (one, other)]
    frames, others = frames_of(one), frames_of(other)
    if frames.shape != others.shape or sounds[0] != sounds[1]:
        return 255
    return int(np.abs(frames.astype(int) - others).max())


def psnr(frames: Any, others: Any) -> float:
    """Return the peak signal-to-noise ratio of frames to others in dB, uint8; infinite for the same."""
    error = float(np.mean((frames.astype(float) - others) ** 2))
    return float(10 * np.log10(255**2 / error)) if error else math.inf
