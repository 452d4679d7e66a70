"""Starts a group of ranks through torchrun, passes signals on to it and ends with it. Knows no jobs; imports no torch.

torchrun runs in a session of its own, so that Ctrl-C in the terminal reaches this process only: once means take no more
jobs and finish those in flight, twice means stop now. torchrun restarts the group when a rank dies.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from svdq.pipeline.errors import InputError
from svdq.producer.settings import Settings
from svdq.worker import rundir

#: Ranks of a group on a machine without GPUs: as many as the reference machine has.
DEFAULT_CPU_RANKS = 7
#: How often torchrun restarts a group before it gives up: a rank that dies once a minute keeps a night going.
MAX_RESTARTS = 1000
#: Seconds between looks at the group.
POLL_S = 0.1
#: Seconds that a group gets to stop before it is killed; below what systemd and Kubernetes grant.
STOP_S = 20.0


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What `svdq worker` was asked for."""

    #: Number of ranks; None: one for each visible GPU, or DEFAULT_CPU_RANKS.
    ranks: int | None = None
    #: auto, cpu or cuda.
    device: str = "auto"
    #: End when the queue is empty.
    burst: bool = False


def num_gpus() -> int:
    """Count the GPUs that the ranks will see, without importing torch: NVIDIA's tool lists them a line each."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in {"", "-1"}])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S607
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def launch(settings: Settings, options: LaunchOptions) -> int:
    """Run a group of ranks until it ends; return its exit code.

    Raises:
        InputError: the settings or the model cannot be used.
    """
    gpus = 0 if options.device == "cpu" else num_gpus()
    if options.device == "cuda" and gpus == 0:
        raise InputError("--device cuda was asked for, but no NVIDIA GPU is visible; use --device cpu or auto.")
    ranks = options.ranks if options.ranks is not None else gpus or DEFAULT_CPU_RANKS
    with tempfile.TemporaryDirectory(prefix="svdq-run-") as folder:
        return _Group(settings, options, ranks, Path(folder)).run()


class _Group:
    """A running torchrun and what is asked of it."""

    def __init__(self, settings: Settings, options: LaunchOptions, ranks: int, run_dir: Path) -> None:
        self._run_dir = run_dir
        #: What to tell the ranks as soon as they listen.
        self._wish: signal.Signals | None = None
        self._told: set[tuple[int, signal.Signals]] = set()
        self._kill_at: float | None = None
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", str(MAX_RESTARTS), "-m", "svdq.worker"]
        command += ["--device", options.device, "--run-dir", str(run_dir)]
        if options.burst:
            command.append("--burst")
        self._process = subprocess.Popen(
            command,
            env=_environment(settings),
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )

    def run(self) -> int:
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self._on_interrupt,
            signal.SIGTERM: self._on_terminate,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            while (code := self._process.poll()) is None:
                self._tell()
                self._give_up_if_broken()
                time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._kill()
        self._raise_error()
        return 0 if self._wish is not None else code

    # Signal handlers set flags and nothing else.

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._wish is None:
            self._wish = signal.SIGINT
        else:
            self._kill_at = time.monotonic()

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._wish = signal.SIGTERM
        self._kill_at = self._kill_at or time.monotonic() + STOP_S

    def _tell(self) -> None:
        """Pass on what was asked for to every rank that listens and has not been told: those of a restart, too."""
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill()
        if self._wish is None:
            return
        for pid in rundir.read_pids(self._run_dir).values():
            if (pid, self._wish) not in self._told:
                self._told.add((pid, self._wish))
                _signal(pid, self._wish)

    def _give_up_if_broken(self) -> None:
        """End a group that has said why it cannot run: a model that is not there is not mended by restarts."""
        if rundir.read_error(self._run_dir) is not None:
            self._kill()

    def _raise_error(self) -> None:
        sentence = rundir.read_error(self._run_dir)
        if sentence is not None:
            raise InputError(sentence)

    def _kill(self) -> None:
        """End whatever is left of the group; its jobs are taken again by the next one."""
        pids = [self._process.pid, *rundir.read_pids(self._run_dir).values()]
        if self._process.poll() is None:
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            self._process.wait()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _environment(settings: Settings) -> dict[str, str]:
    """Give the ranks the settings of this process, flags included, and one thread each."""
    environment = {
        **os.environ,
        "SVDQ_HOME": str(settings.home),
        "SVDQ_STORAGE": settings.storage,
        "SVDQ_MODEL": settings.model,
        "SVDQ_MAX_PIXELS": str(settings.max_pixels),
        # Unset, torchrun sets it with a warning; our ranks set their threads themselves.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if settings.redis_url is not None:
        environment["SVDQ_REDIS_URL"] = settings.redis_url
    return environment


def _die_with_parent() -> None:
    """Have the kernel end torchrun (and it its ranks) when this process is killed, so that no group is orphaned."""
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def check_model(name: str) -> None:
    """Check before seven ranks start that a model folder has what a StableVideoDiffusionPipeline has.

    Raises:
        InputError: it has not.
    """
    folder = Path(name)
    if name == "preview" or name.startswith("simulated") or not (folder.exists() or name.startswith((".", "/", "~"))):
        return
    for part in ("model_index.json", "unet/config.json", "vae/config.json", "image_encoder/config.json"):
        if not (folder / part).exists():
            raise InputError(
                f"The model folder {name!r} has no {part}; SVDQ_MODEL must name a folder or hub id of a "
                "StableVideoDiffusionPipeline."
            )
