"""A process's rank in its group, and the connection of its stage to the neighbouring ranks.

Samples go from rank to rank down the chain; reports go back from the last rank to rank 0.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from svdq.pipeline.models.model import VideoModel
from svdq.pipeline.stage import Stage
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport.address_book import AddressBook, FolderBook, address_among_hosts
from svdq.pipeline.transport.channel import Channel
from svdq.pipeline.transport.ports import Keeper, Monitor, Sink, Source
from svdq.pipeline.transport.rendezvous import close_ring
from svdq.pipeline.transport.transport import OnLost, Receiver, Sender


@dataclass(frozen=True, kw_only=True)
class Place:
    """The rank of a process, and its host."""

    #: Rank 0 takes jobs.
    rank: int
    #: Number of ranks K; rank K-1 writes videos.
    num_ranks: int
    #: The process's number on its host, which selects its GPU.
    local_rank: int
    #: Number of the group's processes on this host.
    local_num_ranks: int

    @classmethod
    def from_torchrun(cls) -> Self:
        """Read torchrun's environment variables; a process without them is a group of one."""
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


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's channels to its neighbours, None for missing neighbours; a single rank has none."""

    #: From the previous rank.
    upstream: Channel | None = None
    #: To the next rank.
    downstream: Channel | None = None
    #: From the last rank to rank 0: set on the last rank.
    returns: Channel | None = None
    #: From the last rank to rank 0: set on rank 0.
    reports: Channel | None = None
    #: On rank 0: the information that each rank sent, rank 0 first.
    facts: tuple[str, ...] = ()


def join(
    place: Place, device: torch.device, *, folder: Path, book: AddressBook | None = None, facts: str = ""
) -> Links:
    """Connect to the neighbours; waits while other ranks load their models.

    Args:
        place: this rank.
        device: this rank's.
        folder: shared by this group's ranks on this host and private to this user: for Unix sockets and their names.
        book: address book for ranks on several hosts; not needed on one host.
        facts: information about this rank for rank 0.

    Raises:
        OSError: the other ranks have ended.
    """
    if place.num_ranks == 1:
        return Links(facts=(facts,))
    if place.local_num_ranks == place.num_ranks:
        book, address = FolderBook(folder), str(folder / f"rank{place.rank}.sock")
    else:
        assert book is not None
        elsewhere = (place.rank - place.local_rank + place.local_num_ranks) % place.num_ranks
        master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        address = address_among_hosts(book, place.rank, elsewhere, *master)
    ring = close_ring(book, place.rank, place.num_ranks, address, facts)
    outgoing, incoming = Channel(ring.following, device), Channel(ring.preceding, device)
    return Links(
        upstream=None if place.first else incoming,
        downstream=None if place.last else outgoing,
        returns=outgoing if place.last else None,
        reports=incoming if place.first else None,
        facts=ring.facts if place.first else (),
    )


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
    """Create a rank's stage and connect it to its neighbours.

    Args:
        place: this rank.
        links: the result of `join`.
        model: with the parts that this rank needs.
        monitor: receives progress.
        tracer: records spans.
        source: on rank 0 only.
        sink: on the last rank only.
        on_lost: called from a thread when a neighbour is gone; should end the process, since the group is broken.
        keeper: saves unfinished samples; None saves nothing.
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
