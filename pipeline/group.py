"""A group of ranks: who am I in it, and how a stage is wired to its neighbours. Knows nothing of what the ranks make.

Samples go from rank to rank down a chain; reports go back from the last rank to rank 0.
"""

import os
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from svdq.pipeline.model import VideoModel
from svdq.pipeline.stage import Monitor, Sink, Source, Stage
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport import NO_TIMEOUT, OnLost, Receiver, Sender, Wire


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process stands in its group."""

    #: 0 takes jobs in.
    rank: int
    #: K; rank K-1 writes videos.
    num_ranks: int
    #: The process's number on its host: chooses its GPU.
    local_rank: int
    #: How many processes of the group are on its host.
    local_num_ranks: int

    @classmethod
    def from_torchrun(cls) -> Self:
        """Read what torchrun tells its processes; a process that torchrun did not start is a group of one."""
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            num_ranks=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_num_ranks=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """Whether this is the last rank; a rank alone is both."""
        return self.rank == self.num_ranks - 1


def choose_device(wanted: str, place: Place) -> torch.device:
    """Turn auto, cpu or cuda into this rank's device; ranks take turns when there are more of them than GPUs."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def join(place: Place, device: torch.device, *, init_method: str = "env://") -> Wire | None:
    """Meet the other ranks; None for a rank alone.

    Several ranks on one GPU move tensors through gloo, since NCCL refuses two ranks on one device.
    """
    if place.num_ranks == 1:
        return None
    own_gpu_each = device.type == "cuda" and place.local_num_ranks <= torch.cuda.device_count()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if own_gpu_each else "gloo",
        init_method=init_method,
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=NO_TIMEOUT,
    )
    return Wire(device, payload_backend="nccl" if own_gpu_each else "gloo")


def build_stage(
    *,
    place: Place,
    wire: Wire | None,
    model: VideoModel,
    monitor: Monitor,
    tracer: Tracer,
    source: Source | None,
    sink: Sink | None,
    on_lost: OnLost,
) -> Stage:
    """Make a rank's stage and wire it to its neighbours.

    Args:
        place: which rank this is.
        wire: what `join` returned.
        model: with the parts that this rank needs.
        monitor: told of progress.
        tracer: records spans.
        source: on rank 0 only.
        sink: on the last rank only.
        on_lost: called from a thread when a neighbour is gone; should end the process, since the group is broken.
    """
    upstream = downstream = returns = reports = None
    if wire is not None:
        upstream = None if place.first else Receiver(wire, place.rank - 1, on_lost)
        downstream = None if place.last else Sender(wire, place.rank + 1, on_lost)
        returns = Sender(wire, 0, on_lost) if place.last else None
        reports = Receiver(wire, place.num_ranks - 1, on_lost) if place.first else None
    return Stage(
        rank=place.rank,
        num_ranks=place.num_ranks,
        model=model,
        monitor=monitor,
        tracer=tracer,
        source=source,
        sink=sink,
        upstream=upstream,
        downstream=downstream,
        returns=returns,
        reports=reports,
    )


def leave(wire: Wire | None) -> None:
    """Part from the other ranks after a complete run: nobody goes while a neighbour may still read a last message."""
    if wire is not None:
        dist.barrier()
        dist.destroy_process_group()
