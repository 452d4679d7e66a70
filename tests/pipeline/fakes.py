"""Small real classes that stand in for the surroundings of a stage."""

import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from svdq.pipeline.loop.protocols import Checkpointer, Monitor, Report, Request, Sink, Source, Surroundings
from svdq.pipeline.loop.sample import Sample, sample_body
from svdq.pipeline.loop.stage import Stage
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Frames, ModelInfo, State, VideoModel
from svdq.pipeline.planning.binding import Components, Segment
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.planning.planner import Planner
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.links import Channel
from svdq.pipeline.transport.topology import Links, Topology

CPU = torch.device("cpu")


class CountingModel:
    """Counts steps in the latents; fails where it is told to."""

    sets = ()
    decoded = ("latents",)
    info = ModelInfo(name="counting", notice="", prior=CostPrior(encode_steps=0, decode_steps=0))

    def __init__(self) -> None:
        #: Seeds whose encode, a step, or decode raises an error.
        self.fail_encode: dict[int, Exception] = {}
        self.fail_step: dict[int, Exception] = {}
        self.fail_decode: dict[int, Exception] = {}
        #: seed -> step that yields NaN.
        self.nan: dict[int, int] = {}
        #: Frames that fit into memory when decoded at once, and the error of more.
        self.decodable_frames = 1000
        self.out_of_memory: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        self.chunk_sizes: list[int] = []
        self.num_encodes = 0
        #: Bytes by what takes them.
        self.taken: dict[str, int] = {}
        self.warmed: list[SvdParameters] = []
        #: The weight that is no number.
        self.broken = ""

    def complete(self, parameters: SvdParameters) -> SvdParameters:
        return parameters.model_copy(update={"frames": parameters.frames or 2})

    def segments(self, parameters: SvdParameters) -> tuple[Segment, ...]:
        return (Segment(component="counter", start=0, stop=parameters.steps),)

    def memory(self, parameters: SvdParameters) -> Mapping[str, int]:
        return self.taken

    def broken_weights(self) -> str:
        return self.broken

    def warm_up(self, parameters: SvdParameters) -> None:
        self.warmed.append(parameters)
        if (parameters.decode_chunk_size or parameters.num_frames) > self.decodable_frames:
            raise self.out_of_memory

    def lacks(self, components: str) -> bool:
        return False

    def embed(self, parameters: SvdParameters) -> dict[str, torch.Tensor]:
        return {}

    def encode(self, photo, parameters: SvdParameters) -> dict[str, torch.Tensor]:
        self.num_encodes += 1
        if parameters.seed in self.fail_encode:
            raise self.fail_encode[parameters.seed]
        return {"latents": torch.zeros(1, parameters.num_frames, 4, 8, 8), "image_latents": torch.ones(1, 4, 8, 8)}

    def denoiser(self, tensors, parameters: SvdParameters, step_costs: Sequence[float] = ()) -> "CountingDenoiser":
        return CountingDenoiser(self, parameters)

    def sound(self, tensors, parameters: SvdParameters) -> None:
        return None

    def decode(self, tensors, parameters: SvdParameters, decode_chunk_size: int) -> torch.Tensor:
        self.chunk_sizes.append(decode_chunk_size)
        if parameters.seed in self.fail_decode:
            raise self.fail_decode[parameters.seed]
        if decode_chunk_size > self.decodable_frames:
            raise self.out_of_memory
        count = int(tensors["latents"].max())
        shape = (parameters.num_frames, parameters.height, parameters.width, 3)
        return torch.full(shape, count % 256, dtype=torch.uint8)


class CountingDenoiser:
    def __init__(self, model: CountingModel, parameters: SvdParameters) -> None:
        self._model = model
        self._parameters = parameters

    def step(self, state: State, index: int) -> dict[str, torch.Tensor]:
        latents = state["latents"]
        seed = self._parameters.seed
        if seed in self._model.fail_step:
            raise self._model.fail_step[seed]
        assert bool((latents == index).all() | latents.isnan().all()), "steps are done once and in order"
        return {"latents": latents * float("nan") if self._model.nan.get(seed) == index else latents + 1}


class ListSource(Source):
    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = list(requests)
        #: Ids of jobs.
        self.taken: list[str] = []
        self.reports: dict[str, Report] = {}

    def take(self) -> Request | None:
        if not self._requests:
            return None
        self.taken.append(self._requests[0].job_id)
        return self._requests.pop(0)

    def ended(self, report: Report) -> None:
        assert report.job_id not in self.reports, "every sample ends once"
        self.reports[report.job_id] = report


class ListSink(Sink):
    def __init__(self) -> None:
        self.frames: dict[str, Frames] = {}
        #: Shapes of the tensors beside them.
        self.beside: dict[str, dict[str, tuple[int, ...]]] = {}
        self.closed = self.released = False

    def deliver(self, sample: Sample, frames: Frames, report: Callable[[Report], None]) -> None:
        self.frames[sample.job_id] = frames
        self.beside[sample.job_id] = {name: tuple(tensor.shape) for name, tensor in sample.tensors.items()}
        report(Report(job_id=sample.job_id, body=sample_body(sample), result={"written": True}))

    def release(self) -> None:
        self.released = True

    def close(self) -> None:
        self.closed = True


class ListMonitor(Monitor):
    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        #: job -> step at which it is canceled.
        self.cancel_at: dict[str, int] = {}
        self._now: dict[str, int] = {}
        self.warmed: list[str] = []

    def step(self, sample: Sample, index: int) -> None:
        self.steps.append((sample.job_id, index))
        self._now[sample.job_id] = index

    def warm_up(self, sample: Sample) -> None:
        self.warmed.append(sample.job_id)

    def canceled(self, job_id: str) -> bool:
        return job_id in self.cancel_at and self._now.get(job_id, 0) >= self.cancel_at[job_id]


def request(seed: int, *, steps: int = 5, frames: int = 4) -> Request:
    parameters = SvdParameters(seed=seed, steps=steps, frames=frames, width=64, height=64)
    return Request(job_id=f"job-{seed}", parameters=parameters, photo=None, job={"name": f"photo-{seed}"})


class ListCheckpointer(Checkpointer):
    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def save(self, sample: Sample) -> None:
        self.samples.append(sample)


class Alone:
    """A rank alone, with a model that counts, run to its end."""

    def __init__(
        self,
        model: CountingModel,
        requests: Sequence[Request],
        *,
        keep_every_s: float = 30.0,
        upscaler: Any = None,
        gives_way: Callable[["Alone"], bool] = lambda _: False,
    ) -> None:
        self.checkpointer = ListCheckpointer()
        self.source = ListSource(requests)
        self.sink = ListSink()
        self.monitor = ListMonitor()
        surroundings = Surroundings(
            on_lost=print,
            source=self.source,
            sink=self.sink,
            monitor=self.monitor,
            checkpointer=self.checkpointer,
            tracer=Tracer(on=True),
            gives_way=lambda _: gives_way(self),
        )
        alone = Topology(rank=0, num_ranks=1)
        self.stage = Stage(alone, Links(), model, surroundings, keep_every_s=keep_every_s, upscaler=upscaler)


class ListPlanner(Planner):
    """Follows a list of assignments, and records the work that is reported."""

    def __init__(self, num_ranks: int, assignments: Sequence[tuple[int, ...]]) -> None:
        super().__init__(num_ranks)
        self._assignments = assignments
        #: (rank, index, unit) of finished work, and indices of ended samples.
        self.work: list[tuple[int, int, int]] = []
        self.ended_samples: list[int] = []

    def admit(self, index: int, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        return self._assignments[index]

    def wait_s(self, now: float) -> float:
        return 0.0

    def finished(self, index: int, rank: int, unit: int, now: float) -> None:
        self.work.append((rank, index, unit))

    def ended(self, index: int) -> None:
        self.ended_samples.append(index)


class Chain:
    """Ranks as threads of this process, connected by real sockets."""

    def __init__(
        self,
        models: Sequence[VideoModel],
        requests: Sequence[Request],
        assignments: Sequence[tuple[int, ...]] = (),
        sink: Sink | None = None,
        planner: Planner | None = None,
        components: Sequence[Components] = (),
    ) -> None:
        self.num_ranks = len(models)
        self.source = ListSource(requests)
        self.sink = sink or ListSink()
        #: Follows the assignments, unless another planner is given, which the stages use.
        self.planner = ListPlanner(len(models), assignments)
        self._stage_planner = planner or self.planner
        self._components = components
        self.monitors = [ListMonitor() for _ in models]
        self.checkpointers = [ListCheckpointer() for _ in models]
        self.tracers = [Tracer(on=True) for _ in models]
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        #: The link from each rank to the next one; from the last rank to rank 0.
        self.pairs = [socket.socketpair() for _ in models] if len(models) > 1 else []
        self.stages = [self._stage(rank, model) for rank, model in enumerate(models)]
        self._threads = [threading.Thread(target=stage.run, daemon=True) for stage in self.stages]

    def _stage(self, rank: int, model: VideoModel) -> Stage:
        is_first, is_last = rank == 0, rank == self.num_ranks - 1
        links = Links()
        if self.pairs:
            links = Links(incoming=Channel(self.pairs[rank - 1][1], CPU), outgoing=Channel(self.pairs[rank][0], CPU))
        surroundings = Surroundings(
            on_lost=self.lost.put,
            source=self.source if is_first else None,
            sink=self.sink if is_last else None,
            monitor=self.monitors[rank],
            checkpointer=self.checkpointers[rank],
            tracer=self.tracers[rank],
        )
        topology = Topology(rank=rank, num_ranks=self.num_ranks)
        return Stage(topology, links, model, surroundings, planner=self._stage_planner, components=self._components)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        for pair in self.pairs:
            for end in pair:
                end.close()

    def run(self) -> None:
        self.start()
        self.join()
        assert self.lost.empty()
