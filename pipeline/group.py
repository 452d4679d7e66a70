"""A group of ranks: who am I in it, and how a stage is wired to its neighbours. Knows nothing of what the ranks make.

Samples go from rank to rank down a chain; reports go back from the last rank to rank 0.
"""

import os
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model import VideoModel
from svdq.pipeline.stage import Stage
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.channel import Channel
from svdq.pipeline.transport.meeting import address_among_hosts, meet
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


def check_device(wanted: str) -> None:
    """Check that there is such a device.

    Raises:
        InputError: a GPU is wanted, and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda was asked for, but PyTorch sees no GPU here; use --device cpu or auto.")


def choose_device(wanted: str, place: Place) -> torch.device:
    """Turn auto, cpu or cuda into this rank's device; ranks take turns when there are more of them than GPUs.

    Raises:
        InputError: a GPU is wanted, and there is none.
    """
    check_device(wanted)
    if wanted == "cpu" or not torch.cuda.is_available():
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
    #: On rank 0: what each rank told of itself, rank 0 first.
    facts: tuple[str, ...] = ()


def join(
    place: Place,
    device: torch.device,
    *,
    facts: str = "",
    init_method: str = "env://",
) -> Links:
    """Meet the other ranks and connect to the neighbours.

    Args:
        place: which rank this is.
        device: this rank's.
        facts: what rank 0 is to know of this one.
        init_method: how the store is found, in torch's words.

    Raises:
        OSError: the other ranks have ended, or the host that keeps their addresses has.
    """
    if place.num_ranks == 1:
        return Links(facts=(facts,))
    try:
        store, _, _ = next(iter(rendezvous(init_method, place.rank, place.num_ranks)))
        met = meet(store, place.rank, place.num_ranks, _address(place, store))
        # The store outlives a restart of the group: what stands there must be of this life alone.
        own_store = PrefixStore(f"svdq/{met.word}", store)
        told = _tell(own_store, place, facts)
    except dist.DistError as error:
        raise ConnectionError(f"torchrun's store does not answer: {str(error).partition(chr(10))[0]}") from error
    outgoing = Channel(met.following, device)
    incoming = Channel(met.preceding, device)
    return Links(
        upstream=None if place.first else incoming,
        downstream=None if place.last else outgoing,
        returns=outgoing if place.last else None,
        reports=incoming if place.first else None,
        facts=told,
    )


def _tell(store: Store, place: Place, facts: str) -> tuple[str, ...]:
    """Tell rank 0 about this rank; rank 0 waits for what all have told."""
    store.set(f"facts{place.rank}", facts)
    ranks = range(place.num_ranks) if place.first else ()
    return tuple(store.get(f"facts{rank}").decode() for rank in ranks)


def _address(place: Place, store: Store) -> str:
    """Find the address of this host that the other ranks reach: the loopback when none is on another host."""
    if place.local_num_ranks == place.num_ranks:
        return "127.0.0.1"
    elsewhere = (place.rank - place.local_rank + place.local_num_ranks) % place.num_ranks
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return address_among_hosts(store, place.rank, elsewhere, *master)


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
