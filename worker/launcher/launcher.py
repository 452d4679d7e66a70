"""Starts groups of ranks, passes signals on to them, and ends with them. Does not import torch.

The first Ctrl-C makes groups take no more jobs and finish those in flight, the second makes them stop now and return
their jobs to the queue, the third kills them.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Final, Literal

import redis

from svdq.pipeline.errors import InputError, SvdqError, how_to_install
from svdq.pipeline.models.families import parameters_of
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.trace import trace_text
from svdq.producer import keys
from svdq.producer.connection import server_url, session
from svdq.producer.files import write_file
from svdq.producer.pauses import is_freed
from svdq.producer.settings import Settings
from svdq.producer.text import count, parse_future
from svdq.producer.threads import beside
from svdq.worker import run_folder
from svdq.worker.config import RankConfig, RunConfig, check_ranks, free_host_bytes
from svdq.worker.launcher.gpus import all_gpus, lasting_names, ranks_per_gpu, share_out, visible_gpus
from svdq.worker.launcher.group_process import STOP_START_S, GroupProcess
from svdq.worker.launcher.resting import resting_groups
from svdq.worker.outages import connect

logger = logging.getLogger(__name__)

MAX_DEFAULT_CPU_RANKS = 7  # most ranks of a group without GPUs by default
POLL_S = 0.1
STOP_S, STOP_NOW_S = 20.0, 5.0  # seconds to stop, and after a second Ctrl-C; systemd and Kubernetes grant more


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The options of `svdq worker` that concern the launcher."""

    ranks: int | None = None  # of a group; None: one for each visible GPU, or core up to MAX_DEFAULT_CPU_RANKS
    groups: int = 1
    until: str | None = None  # when to stop, such as 06:00
    metrics_port: int | None = None  # None: metrics are not served
    rank: RankConfig = field(default_factory=RankConfig)  # the launcher fills in the rest
    #: By the number of ranks, the free bytes of a GPU that each waits for while another program holds them; 0: none.
    least_free: Callable[[int], int] = lambda num_ranks: 0


#: What ended a run; "" where its groups ended by themselves.
EndedBy = Literal["signal", "until", ""]


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended."""

    code: int  # the first exit code of a group that is not 0, else 0
    ended_by: EndedBy
    burst: bool
    until_s: float | None = None  # --until, in seconds since the epoch


def launch(settings: Settings, model: ResolvedModel, options: LaunchOptions, groups: list[GroupProcess]) -> Ending:
    """Run groups of ranks, which it adds to `groups`, until they end.

    Raises an InputError if the settings or the options cannot be used.
    """
    # Parsed once: a group that is restarted in the morning must not continue until the next one.
    until_s = None
    if options.until is not None:
        until_s = parse_future(options.until, "--until", datetime.now().astimezone()).timestamp()
    device = options.rank.device
    gpus = [] if device == "cpu" else visible_gpus()
    if device == "cuda" and not gpus:
        raise InputError("--device cuda was asked for, but no NVIDIA GPU is visible; use --device cpu or auto.")
    if device != "cpu" and (failure := all_gpus().failure):
        logger.warning("The list of GPUs may not be complete: %s.", failure)
    for shape in options.rank.warmup:
        parameters_of(model).of_shape(shape)
    ranks = options.ranks or default_ranks(len(gpus), options.groups)
    check_ranks(options.rank, model, ranks, on_gpus=bool(gpus))
    config = options.rank.model_copy(
        update={
            # Listed GPUs are used, or the ranks say why they cannot be.
            "device": "cuda" if gpus else device,
            "num_groups": options.groups,
            "record_trace": settings.trace is not None,
            "ranks_per_gpu": ranks_per_gpu(len(gpus), ranks * options.groups),
            "host_memory": options.rank.host_memory
            if options.rank.host_memory is not None
            else free_host_bytes() // options.groups,
        }
    )

    def refreshed(before: RunConfig) -> RunConfig:
        """Look again at the files of the model and at the free host memory, which may have changed."""
        found = resolve(settings.model, on_gpus=bool(gpus), dtype=options.rank.dtype)
        rank = before.rank
        if options.rank.host_memory is None:
            rank = rank.model_copy(update={"host_memory": free_host_bytes() // options.groups})
        return before.model_copy(update={"model": found, "rank": rank})

    with (
        run_folder.parent_folder(settings.home) as parent,
        # Before any rank starts, so that a port that is taken is reported at once.
        _endpoint(settings, options, groups),
        resting_groups(settings, model, groups),
    ):
        with session(settings) as connection:
            freed = is_freed(connection, socket.gethostname())
        started = count(ranks, "rank")
        if options.groups > 1:
            started = f"{options.groups} groups of {started} each"
        where = count(len(gpus), "GPU") if gpus else "the processors"
        if freed:
            logger.info("The GPUs are free for other programs: no ranks start until `svdq resume`.")
        else:
            logger.info("Starting %s on %s with the model %s; this takes some seconds.", started, where, settings.model)
        need = options.least_free(ranks) if gpus else 0
        shares = share_out(lasting_names(gpus), options.groups, ranks) if gpus else [None] * options.groups
        for number, devices in enumerate(shares):
            of_group = config.model_copy(update={"group": str(number)})
            run_config = RunConfig(rank=of_group, settings=settings, model=model)
            folder = Path(parent, f"group{number}")
            groups.append(GroupProcess(ranks, folder, run_config, devices, refreshed, is_freed=freed, need=need))
        supervisor = _Supervisor(groups, until_s)
        code = supervisor.run()
        if settings.trace is not None:
            try:
                write_file(settings.trace, [trace_text(run_folder.read_traces([group.run_dir for group in groups]))])
            except InputError as error:  # the run is reported in any case
                logger.error("%s", error)
                code = code or SvdqError.exit_code
        return Ending(code=code, ended_by=supervisor.ended_by, burst=options.rank.burst, until_s=until_s)


def default_ranks(num_gpus: int, num_groups: int) -> int:
    """Return the number of ranks of each group; groups share the GPUs, or the cores."""
    cores = os.cpu_count() or 1
    return max(1, (num_gpus or min(cores, MAX_DEFAULT_CPU_RANKS * num_groups)) // num_groups)


def _endpoint(
    settings: Settings, options: LaunchOptions, groups: Sequence[GroupProcess]
) -> contextlib.AbstractContextManager[object]:
    if options.metrics_port is None:
        return contextlib.nullcontext()
    try:
        from svdq.worker.launcher.metrics import serve_metrics
    except ImportError as error:
        raise InputError(
            f"--metrics-port needs prometheus_client, which is not installed; {how_to_install('metrics')}."
        ) from error

    return serve_metrics(settings.metrics_address, options.metrics_port, server_url(settings), groups)


class _Supervisor:
    def __init__(self, groups: list[GroupProcess], until_s: float | None) -> None:
        self._groups = groups
        self._until_s = until_s
        self.ended_by: EndedBy = ""
        self._signal: signal.Signals | None = None  # also sent to later ranks
        self._kill_at: float | None = None
        self._signaled_at: float | None = None

    def run(self) -> int:
        """Wait; return the first exit code that is not 0, or 0 after a signal."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as with nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            while None in (codes := [group.poll() for group in self._groups]):
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    break
                if self._until_s is not None and time.time() >= self._until_s:
                    self.ended_by = self.ended_by or "until"
                    self._stop()
                if self._signal is not None:
                    self._pass_on(self._signal)
                time.sleep(POLL_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for group in self._groups:
                group.kill()
        if self._signal is not None:
            return 0
        code = next((code for code in codes if code), 0)
        if code >= 0:
            return code
        logger.error("torchrun was ended by signal %d; the next worker takes its jobs back.", -code)
        return 128 - code  # as shells report it

    def _pass_on(self, number: signal.Signals) -> None:
        """Send a signal to the groups; those that start hold no jobs, and are stopped, or killed after a while."""
        now = time.monotonic()
        self._signaled_at = self._signaled_at or now
        for group in self._groups:
            group.send_signal(signal.SIGTERM if group.is_starting else number)
            if group.is_starting and now >= self._signaled_at + STOP_START_S:
                group.kill()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ended_by = self.ended_by or "signal"
        if number in (signal.SIGTERM, signal.SIGHUP):  # the second when its terminal closes
            self._stop()
        elif self._signal is None:
            self._signal = signal.SIGINT
        elif self._signal is signal.SIGINT:
            self._signal = signal.SIGTERM
            self._kill_at = time.monotonic() + STOP_NOW_S
        else:
            self._kill_at = time.monotonic()

    def _stop(self) -> None:
        self._signal = signal.SIGTERM
        self._kill_at = self._kill_at or time.monotonic() + STOP_S


RENEW_S: Final = 4.0  # less than half of `keys.STARTING_TTL_S`


def starting_record(
    settings: Settings, model: ResolvedModel, groups: Sequence[GroupProcess]
) -> contextlib.AbstractContextManager[None]:
    """Keep the record of this launcher during a block or until its groups are ready at two looks, in a thread.

    `groups` may grow. Without a record for a moment, another group would fail a job that only these groups can make:
    ranks are ready shortly before they say what they can make, and one may be killed between the two.
    """
    url = server_url(settings)

    def keep(ended: threading.Event) -> None:
        name = f"{socket.gethostname()}:{os.getpid()} {model.family or '-'} {model.name}"
        was_ready = False
        with connect(url) as connection:
            while not ended.is_set():
                is_ready = bool(groups) and all(each.is_resting or not each.is_starting for each in groups)
                if is_ready and was_ready:
                    break
                was_ready = is_ready
                with contextlib.suppress(redis.RedisError), connection.pipeline() as pipeline:
                    now, _ = connection.time()
                    pipeline.zadd(keys.STARTING, {name: now + keys.STARTING_TTL_S})
                    pipeline.zremrangebyscore(keys.STARTING, "-inf", now)
                    pipeline.expire(keys.STARTING, keys.STARTING_TTL_S)
                    pipeline.execute()
                ended.wait(RENEW_S)
            with contextlib.suppress(redis.RedisError):
                connection.zrem(keys.STARTING, name)

    return beside(keep, "starting")  # the record expires if it does not end in time
