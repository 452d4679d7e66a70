"""Runs and measures a group of ranks on this machine, fed from memory, without Redis or files."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.multiprocessing
from PIL import Image
from pydantic import TypeAdapter
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from svdq.pipeline import errors
from svdq.pipeline.errors import SvdqError
from svdq.pipeline.loop.protocols import Report, Request, Sink, Source, Surroundings
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.loop.stage import Stage
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Frames, Role
from svdq.pipeline.planning.binding import Components
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.topology import Links, Topology, join
from svdq.pipeline.video_parameters import VideoParameters
from svdq.worker.bench.figures import RankMeasurements
from svdq.worker.device import choose_device

IDLE_S = 0.5  # seconds between two bursts


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The videos of a run, and the ranks that render them."""

    models: tuple[ResolvedModel, ...]  # model of each rank; they differ if a rank is slower
    parameters: VideoParameters  # of every video, without defaults; the seed counts up
    components: tuple[Components, ...] = ()  # the components of each rank, if ranks are bound to some
    in_rounds: bool = False  # whether the only rank holds one expert at a time
    bursts: tuple[int, ...]  # numbers of videos that are supplied at once, each after all before it have ended
    device: str = "cpu"  # cpu, cuda or auto


def run_loop(workload: Workload) -> list[RankMeasurements]:
    """Run the workload with one rank per model; return the measurements of each."""
    num_ranks = len(workload.models)
    with tempfile.TemporaryDirectory(prefix="svdq-bench-") as folder:
        spawn_ranks(num_ranks, _rank_main, workload, folder, device=workload.device)
        logs = [Path(folder, f"rank{rank}.json").read_bytes() for rank in range(num_ranks)]
    return [TypeAdapter(RankMeasurements).validate_json(log) for log in logs]


def _rank_main(topology: Topology, links: Links, workload: Workload, folder: str) -> None:
    device = choose_device(workload.device, topology.rank)
    role = replace(Role.of_rank(topology.rank), in_rounds=workload.in_rounds)
    if workload.components:
        role = replace(role, components=workload.components[topology.rank])
    resolved = workload.models[topology.rank]
    model = open_model(resolved, role, device, dtype_for(resolved, device))
    workload = replace(workload, parameters=model.complete(workload.parameters))
    source = _BurstSource(workload) if topology.first else None
    sink = _TimingSink() if topology.last else None
    tracer = Tracer(on=True)
    surroundings = Surroundings(on_lost=exit_when_lost, source=source, sink=sink, tracer=tracer)
    stage = Stage(topology, links, model, surroundings, device=device, components=workload.components)
    stage.warm_up(workload.parameters)
    stage.run()
    log = RankMeasurements(
        spans=tracer.spans,
        finished_s=sink.finished_s if sink else [],
        failures=source.failures if source else [],
        rss_mb=psutil.Process().memory_info().rss / 2**20,
        gpu_mb=torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None,
    )
    Path(folder, f"rank{topology.rank}.json").write_bytes(TypeAdapter(RankMeasurements).dump_json(log))


class _BurstSource(Source):
    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._bursts = list(workload.bursts[::-1])
        self._seeds: list[int] = []  # those left of the present burst
        # Reports come from another thread.
        self._num_in_flight = 0
        self._changed = threading.Condition()
        self._photo = Image.effect_noise((workload.parameters.width, workload.parameters.height), 64).convert("RGB")
        self.failures: list[str] = []

    def take(self) -> Request | None:
        while not self._seeds and self._bursts:
            with self._changed:
                self._changed.wait_for(lambda: self._num_in_flight == 0)
            time.sleep(IDLE_S)
            self._seeds = list(range(self._bursts.pop()))[::-1]
        if not self._seeds:
            return None
        seed = self._seeds.pop()
        with self._changed:
            self._num_in_flight += 1
        return Request(
            job_id=f"sample-{seed}-{len(self._bursts)}",
            parameters=self._workload.parameters.model_copy(update={"seed": seed}),
            photo=self._photo,
            num_waiting=len(self._seeds),
        )

    def ended(self, report: Report) -> None:
        if report.failure is not None:
            self.failures.append(report.failure)
        with self._changed:
            self._num_in_flight -= 1
            self._changed.notify()


class _TimingSink(Sink):
    def __init__(self) -> None:
        self.finished_s: list[float] = []

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        self.finished_s.append(time.time())
        report(Report.of(sample))


def spawn_ranks(num_ranks: int, main: Callable[..., None], *args: Any, device: str = "cpu") -> None:
    """Run `main(topology, links, *args)`, a module-level function, in `num_ranks` processes with one torch thread each.

    Raises SvdqError if a rank raised one, which is raised here, or was ended by a signal, and
    torch.multiprocessing.ProcessRaisedException if a rank raised anything else; the text has its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="svdq-") as folder, contextlib.ExitStack() as ending:
        # A fork server imports torch once for all ranks, and leaves CUDA to them.
        multiprocessing.set_forkserver_preload([__name__, main.__module__])
        # Otherwise it imports modules from the current folder, such as a grp.py there.
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            with _interrupts_afterwards():  # a rank whose start is interrupted would be known to nobody
                context = torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
                    _enter,
                    (num_ranks, Path(folder), device, main, args),
                    nprocs=num_ranks,
                    join=False,
                    start_method="forkserver",
                )
                ending.callback(_end, context.processes)
        finally:
            if before is None:
                del os.environ["PYTHONSAFEPATH"]
        try:
            while not context.join():
                pass
        except (ProcessExitedException, ProcessRaisedException) as error:
            for path in Path(folder).glob("*.error"):
                kind: type[SvdqError] = getattr(errors, path.suffixes[0].removeprefix("."), SvdqError)
                raise kind(path.read_text(encoding="utf-8")) from None
            for rank, process in enumerate(context.processes):
                # The others are ended with SIGTERM.
                if process.exitcode < 0 and process.exitcode != -signal.SIGTERM:
                    raise SvdqError(
                        f"Rank {rank} was ended by {signal.Signals(-process.exitcode).name}; after SIGKILL check "
                        "whether the machine ran out of memory, and use fewer ranks or smaller videos."
                    ) from error
            raise


@contextlib.contextmanager
def _interrupts_afterwards() -> Iterator[None]:
    """Have signals that raise KeyboardInterrupt raise it only after a block; in the main thread."""
    signals = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is signal.default_int_handler]
    arrived: list[int] = []
    for each in signals:
        signal.signal(each, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for each in signals:
            signal.signal(each, signal.default_int_handler)
    if arrived:
        raise KeyboardInterrupt


def _end(processes: Sequence[BaseProcess]) -> None:
    """End ranks, before what they share is removed."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()


def _enter(
    rank: int, num_ranks: int, folder: Path, device: str, main: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    topology = Topology(rank=rank, num_ranks=num_ranks)
    try:
        links = join(topology, choose_device(device, rank), folder=folder)
        main(topology, links, *args)
    except SvdqError as error:
        path = folder / f"rank{rank}.{type(error).__name__}.error"
        path.write_text(str(error), encoding="utf-8")
        sys.exit(1)


def exit_when_lost(reason: str) -> None:
    """End this process: a neighbor is gone, so the group is broken."""
    print(f"svdq: {reason}", file=sys.stderr)  # noqa: T201
    os._exit(1)
