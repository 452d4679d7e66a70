"""Runs and measures a group of ranks on this machine, fed from memory, without Redis or files.

Efficiency is the ideal time between finished videos, (T*t + E + D) / K for equal ranks, divided by the measured one in
steady state: after the first videos have filled the pipeline and the shares have settled.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from PIL import Image

from svdq.pipeline.bench.report import RankLog
from svdq.pipeline.device import choose_device
from svdq.pipeline.local import exit_when_lost, spawn_ranks
from svdq.pipeline.models.base import Frames, Part
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.protocols import Report, Request
from svdq.pipeline.sample import Sample
from svdq.pipeline.topology import Links, Topology, build_stage
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.message import sample_body


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a run."""

    #: Model of each rank; they differ if a rank is slower.
    models: tuple[str, ...]
    #: Parameters of every video; only the seed differs, counting up.
    parameters: VideoParameters
    #: Number of videos.
    num_samples: int
    #: cpu, cuda or auto.
    device: str = "cpu"
    #: Whether all ranks warm up before the first video.
    warm: bool = True


def run_loop(workload: Workload, *, replicas: bool = False) -> list[RankLog]:
    """Run the workload with one rank per model, and return the log of each rank.

    Args:
        workload: the work.
        replicas: each rank renders every K-th video as a whole, instead of a range of steps of each video.
    """
    with tempfile.TemporaryDirectory(prefix="svdq-bench-") as folder:
        spawn_ranks(
            len(workload.models),
            _rank_main,
            workload,
            folder,
            device=workload.device,
            replicas=replicas,
        )
        return [
            RankLog(**json.loads(Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")))
            for rank in range(len(workload.models))
        ]


def _rank_main(topology: Topology, links: Links, workload: Workload, folder: str) -> None:
    device = choose_device(workload.device, topology.local_rank)
    parts = Part.of_rank(topology.rank)
    number = topology.local_rank
    model = open_model(workload.models[number], parts, device, dtype_for(device))
    replicas = topology.num_ranks < len(workload.models)
    numbers = range(number, workload.num_samples, len(workload.models)) if replicas else range(workload.num_samples)
    feed = _Feed(workload, numbers) if topology.first else None
    drain = _Drain() if topology.last else None
    monitor = _MemoryMonitor()
    tracer = Tracer(topology.rank, on=True)
    stage = build_stage(
        topology=topology,
        links=links,
        model=model,
        monitor=monitor,
        tracer=tracer,
        source=feed,
        sink=drain,
        device=device,
        on_lost=exit_when_lost,
    )
    if workload.warm:
        stage.warm_up(workload.parameters)
    cpu_before_s = time.process_time()
    stage.run()
    cpu_s = time.process_time() - cpu_before_s
    monitor.note()
    log = RankLog(
        spans=[(span.name, span.job_id, span.start_s, span.end_s) for span in tracer.spans],
        events=tracer.events(),
        finished_s=drain.finished_s if drain else [],
        started_s=feed.started_s if feed else None,
        failures=feed.failures if feed else [],
        cpu_s=cpu_s,
        rss_mb=monitor.rss_mb,
        gpu_mb=torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None,
    )
    Path(folder, f"rank{number}.json").write_text(json.dumps(asdict(log)), encoding="utf-8")


class _Feed:
    """A source with an endless supply of videos."""

    def __init__(self, workload: Workload, numbers: range) -> None:
        self._workload = workload
        self._numbers = list(reversed(numbers))
        self._photo = Image.effect_noise((workload.parameters.width, workload.parameters.height), 64).convert("RGB")
        self.started_s: float | None = None
        self.failures: list[str] = []

    def take(self) -> Request | None:
        if self.started_s is None:
            self.started_s = time.time()
        if not self._numbers:
            return None
        number = self._numbers.pop()
        parameters = self._workload.parameters.model_copy(update={"seed": number})
        return Request(
            job_id=f"sample-{number}",
            parameters=parameters,
            photo=self._photo,
            num_waiting=len(self._numbers),
        )

    def take_if_ready(self) -> Request | None:
        return self.take()

    def prefetch_next(self) -> None:
        pass

    def ended(self, report: Report) -> None:
        if report.failure is not None:
            self.failures.append(report.failure)


class _Drain:
    """A sink that records the time and drops the frames."""

    def __init__(self) -> None:
        self.finished_s: list[float] = []

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        self.finished_s.append(time.time())
        report(Report(job_id=sample.job_id, body=sample_body(sample), result={}))

    def release(self) -> None:
        pass

    def close(self) -> None:
        pass


class _MemoryMonitor:
    """Records resident memory at every hundredth sample."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._latest = ""
        self._num_seen = 0
        self.rss_mb: list[float] = []

    def step(self, sample: Sample, index: int) -> None:
        if sample.job_id != self._latest:
            self._latest = sample.job_id
            self._num_seen += 1
            if self._num_seen % 100 == 0:
                self.note()

    def note(self) -> None:
        self.rss_mb.append(self._process.memory_info().rss / 2**20)

    def warm_up(self, sample: Sample) -> None:
        pass

    def idle(self) -> None:
        pass

    def canceled(self, job_id: str) -> bool:
        return False
