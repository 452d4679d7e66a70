"""Starts groups of ranks, passes on what is asked of them and ends with them. Knows no jobs, no torch.

Ctrl-C once means take no more jobs and finish those in flight, twice means stop now and put them back, three times
means end whatever it costs.
"""

import contextlib
import importlib.util
import logging
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.models.options import DEFAULTS, ComputeOptions
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.trace import trace_text
from svdq.producer.queue import server_url
from svdq.producer.settings import Settings
from svdq.producer.storage.temporary import sweep, temporary_name, write_file
from svdq.producer.timeparse import parse_future
from svdq.worker.launcher import rundir
from svdq.worker.launcher.compute_options import as_arguments
from svdq.worker.launcher.gpus import all_gpus, ranks_per_gpu, share_out, visible_gpus
from svdq.worker.launcher.group_process import GroupProcess
from svdq.worker.launcher.hosts import read_hosts
from svdq.worker.launcher.starting import StartingRecord

if TYPE_CHECKING:
    from svdq.worker.health.metrics import MetricsEndpoint

logger = logging.getLogger(__name__)

#: Ranks of a group on a machine without GPUs: as many as the reference machine has.
DEFAULT_CPU_RANKS = 7
#: Seconds between looks at the groups.
POLL_S = 0.1
#: Seconds that groups get to stop before they are killed; below what systemd and Kubernetes grant.
STOP_S = 20.0
#: The same when a person waits who has pressed Ctrl-C twice.
STOP_NOW_S = 5.0


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What `svdq worker` was asked for."""

    #: Number of ranks of a group; None: one for each visible GPU, or DEFAULT_CPU_RANKS.
    ranks: int | None = None
    #: Number of groups that share the queue.
    groups: int = 1
    #: Over how many hosts the group is, and HOST:PORT where they meet; this launcher has the ranks of its own.
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    #: auto, cpu or cuda.
    device: str = "auto"
    #: End when the queue is empty.
    burst: bool = False
    #: Where half-done videos are kept: local, storage or off.
    checkpoints: str = "local"
    #: When to stop, such as 06:00; None means never.
    until: str | None = None
    #: Shapes to be ready for, such as 1024x576x25.
    warmup: tuple[str, ...] = ()
    #: Where to write a Chrome trace at the end.
    trace: Path | None = None
    #: Port and address of this machine where metrics are served; None: they are not.
    metrics_port: int | None = None
    metrics_address: str = "127.0.0.1"
    #: How the ranks log: text or json.
    log_format: str = "text"
    #: How the UNet computes, the same on all ranks.
    compute: ComputeOptions = DEFAULTS


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended."""

    #: The first exit code of a group that is not 0, else 0.
    code: int
    #: What the groups were told to end by; "" when they ended by themselves.
    told_by: Literal["signal", "until", ""]
    #: Ranks of all groups.
    num_ranks: int


def launch(settings: Settings, options: LaunchOptions) -> Ending:
    """Run groups of ranks until they end.

    Raises:
        InputError: the settings, the options or the model cannot be used.
    """
    # Once, so that a group that is restarted in the morning does not go on until the next.
    until_s = parse_future(options.until, "--until", datetime.now().astimezone()).timestamp() if options.until else None
    gpus = [] if options.device == "cpu" else visible_gpus()
    if options.device == "cuda" and not gpus:
        raise InputError("--device cuda was asked for, but no NVIDIA GPU is visible; use --device cpu or auto.")
    if options.device != "cpu" and (failure := all_gpus().failure):
        logger.warning("The list of GPUs may not be complete: %s.", failure)
    for shape in options.warmup:
        VideoParameters.of_shape(shape)
    hosts = read_hosts(settings, options.nnodes, options.rdzv_endpoint, options.groups)
    if hosts is not None:
        logger.warning("%s", hosts.warning)
    # GPUs are shared out among the groups.
    ranks = options.ranks or (max(1, len(gpus) // options.groups) if gpus else DEFAULT_CPU_RANKS)
    # GPUs that are listed are used, or the ranks say why they cannot be.
    arguments = ["--device", "cuda" if gpus else options.device]
    arguments += ["--checkpoints", options.checkpoints]
    arguments += ["--until-s", str(until_s)] if until_s is not None else []
    arguments += ["--burst"] if options.burst else []
    arguments += ["--trace"] if options.trace is not None else []
    arguments += ["--ranks-per-gpu", str(ranks_per_gpu(len(gpus), ranks * options.groups))]
    arguments += ["--log-format", options.log_format]
    arguments += as_arguments(options.compute)
    for shape in options.warmup:
        arguments += ["--warmup", shape]
    groups: list[GroupProcess] = []
    with (
        _run_folder(settings.home / "run") as folder,
        # Before any rank starts: a port that is taken is said at once.
        _endpoint(settings, options) as endpoint,
        StartingRecord(settings, lambda: bool(groups) and all(group.is_ready for group in groups)),
    ):
        logger.info("%s", _what_starts(settings, options, ranks, len(gpus)))
        run_dirs = [Path(folder, f"group{number}") for number in range(options.groups)]
        is_named = not all(gpu.isdigit() for gpu in gpus)  # MIG instances, or GPUs that are left beside a lost one
        shares: Sequence[list[str] | None] = [None] * options.groups
        if gpus and (options.groups > 1 or is_named):
            shares = share_out(gpus, options.groups, ranks)
        for number, (run_dir, devices) in enumerate(zip(run_dirs, shares, strict=True)):
            run_dir.mkdir()
            groups.append(GroupProcess(settings, ranks, [*arguments, "--group", str(number)], run_dir, devices, hosts))
        if endpoint is not None:
            endpoint.serve(groups)
        watch = _Watch(groups, until_s)
        code = watch.run()
        if options.trace is not None and not _write_trace(options.trace, run_dirs):
            code = code or SvdqError.exit_code
        return Ending(code=code, told_by=watch.told_by, num_ranks=ranks * options.groups * options.nnodes)


def _what_starts(settings: Settings, options: LaunchOptions, ranks: int, num_gpus: int) -> str:
    """Say what is being started: loading torch and a model takes 10 s and more."""
    groups = f"{options.groups} groups of " if options.groups > 1 else ""
    each = " each" if options.groups > 1 else ""
    hosts = f" on this host, one of {options.nnodes}," if options.nnodes > 1 else ""
    device = f"{num_gpus} GPU{'s' * (num_gpus != 1)}" if num_gpus else "the processors"
    return (
        f"Starting {groups}{ranks} rank{'s' * (ranks != 1)}{each}{hosts} on {device} with the model {settings.model}; "
        "this takes some seconds."
    )


def _write_trace(path: Path, run_dirs: list[Path]) -> bool:
    """Write the trace of all ranks; where that fails after a night's work, the night's report is told all the same."""
    try:
        write_file(path, [trace_text(rundir.read_traces(run_dirs))])
    except InputError as error:
        logger.error("%s", error)
        return False
    return True


def _endpoint(
    settings: Settings, options: LaunchOptions
) -> "contextlib.AbstractContextManager[MetricsEndpoint | None]":
    """Serve metrics if they are asked for."""
    if options.metrics_port is None:
        return contextlib.nullcontext()
    if importlib.util.find_spec("prometheus_client") is None:
        raise InputError("--metrics-port needs the package prometheus_client; pip install 'svdq[worker]' brings it.")
    from svdq.worker.health.metrics import MetricsEndpoint

    return MetricsEndpoint(options.metrics_address, options.metrics_port, server_url(settings))


@contextlib.contextmanager
def _run_folder(parent: Path) -> Iterator[Path]:
    """Make a folder of this launcher's own for a block, and remove those of launchers that were killed."""
    parent.mkdir(parents=True, exist_ok=True)
    sweep(parent.iterdir(), abandoned_s=math.inf)
    folder = parent / temporary_name()
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Watch:
    """Waits for the end of running groups and passes on signals."""

    def __init__(self, groups: list[GroupProcess], until_s: float | None) -> None:
        self._groups = groups
        #: Seconds since the epoch at which the groups are told to stop.
        self._until_s = until_s
        #: Who ended them first.
        self.told_by: Literal["signal", "until", ""] = ""
        #: What to tell the ranks as soon as they listen.
        self._wish: signal.Signals | None = None
        self._kill_at: float | None = None

    def run(self) -> int:
        handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
            signal.SIGINT: self._on_interrupt,
            signal.SIGTERM: self._on_terminate,
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            while None in (codes := [group.poll() for group in self._groups]):
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    break
                if self._until_s is not None and time.time() >= self._until_s:
                    self.told_by = self.told_by or "until"
                    self._stop()
                if self._wish is not None:
                    for group in self._groups:
                        group.send_signal(self._wish)
                time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for group in self._groups:
                group.kill()
        return 0 if self._wish is not None else next((code for code in codes if code), 0)

    # Signal handlers set flags and nothing else.

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.told_by = self.told_by or "signal"
        if self._wish is None:
            self._wish = signal.SIGINT
        elif self._wish is signal.SIGINT:
            self._wish = signal.SIGTERM
            self._kill_at = time.monotonic() + STOP_NOW_S
        else:
            self._kill_at = time.monotonic()

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self.told_by = self.told_by or "signal"
        self._stop()

    def _stop(self) -> None:
        self._wish = signal.SIGTERM
        self._kill_at = self._kill_at or time.monotonic() + STOP_S
