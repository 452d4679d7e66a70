"""A group of ranks: who am I in it, and how a stage is wired to its neighbours. Knows nothing of what the ranks make.

Samples go from rank to rank down a chain; reports go back from the last rank to rank 0.
"""

import os
import socket
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from svdq.pipeline.models.model import VideoModel
from svdq.pipeline.stage import Stage
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.channel import Channel, Listener, connect
from svdq.pipeline.transport.ports import Keeper, Monitor, Sink, Source
from svdq.pipeline.transport.transport import OnLost, Receiver, Sender


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


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's channels to its neighbours, None where it has no such neighbour; a rank alone has none at all."""

    #: From the rank before.
    upstream: Channel | None = None
    #: To the rank after.
    downstream: Channel | None = None
    #: From the last rank to rank 0: here on the last rank, ...
    returns: Channel | None = None
    #: ... and here on rank 0.
    reports: Channel | None = None


def join(place: Place, device: torch.device, *, init_method: str = "env://") -> Links:
    """Meet the other ranks and connect to the neighbours.

    Tensors go through NCCL when every rank has a GPU of its own. Several ranks on one GPU go through the host, since
    NCCL refuses two ranks on one device.
    """
    if place.num_ranks == 1:
        return Links()
    store, _, _ = next(iter(rendezvous(init_method, place.rank, place.num_ranks)))
    # Other users of the store (torchrun itself, NCCL) have keys of their own, and so has each life of the group: the
    # store outlives a restart, and with it the addresses of ranks that are gone.
    store = PrefixStore(f"svdq/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    nccl = device.type == "cuda" and place.local_num_ranks <= torch.cuda.device_count()
    if nccl:
        dist.init_process_group("nccl", store=store, rank=place.rank, world_size=place.num_ranks, device_id=device)
    # Who is connected to: every rank but 0 by the one before, rank 0 by the last for its reports.
    listener = Listener(store, f"rank{place.rank}", _address(place))
    following = (place.rank + 1) % place.num_ranks
    preceding = (place.rank - 1) % place.num_ranks
    outgoing = Channel(connect(store, f"rank{following}"), device, following if nccl and not place.last else None)
    incoming = Channel(listener.accept(), device, preceding if nccl and not place.first else None)
    return Links(
        upstream=None if place.first else incoming,
        downstream=None if place.last else outgoing,
        returns=outgoing if place.last else None,
        reports=incoming if place.first else None,
    )


def _address(place: Place) -> str:
    """Find the address for the other ranks to reach: loopback on one host, else the one that faces the master."""
    if place.local_num_ranks == place.num_ranks:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        return str(probe.getsockname()[0])


def build_stage(
    *,
    place: Place,
    links: Links,
    model: VideoModel,
    monitor: Monitor,
    tracer: Tracer,
    source: Source | None,
    sink: Sink | None,
    on_lost: OnLost,
    keeper: Keeper | None = None,
) -> Stage:
    """Make a rank's stage and wire it to its neighbours.

    Args:
        place: which rank this is.
        links: what `join` returned.
        model: with the parts that this rank needs.
        monitor: told of progress.
        tracer: records spans.
        source: on rank 0 only.
        sink: on the last rank only.
        on_lost: called from a thread when a neighbour is gone; should end the process, since the group is broken.
        keeper: keeps what is half done; None keeps nothing.
    """
    return Stage(
        rank=place.rank,
        num_ranks=place.num_ranks,
        model=model,
        monitor=monitor,
        tracer=tracer,
        source=source,
        sink=sink,
        upstream=Receiver(links.upstream, place.rank - 1, on_lost) if links.upstream else None,
        downstream=Sender(links.downstream, place.rank + 1, on_lost) if links.downstream else None,
        returns=Sender(links.returns, 0, on_lost) if links.returns else None,
        reports=Receiver(links.reports, place.num_ranks - 1, on_lost) if links.reports else None,
        keeper=keeper,
    )
