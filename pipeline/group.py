"""A group of ranks: who am I in it, and how a stage is wired to its neighbours. Knows nothing of what the ranks make.

Samples go from rank to rank down a chain; reports go back from the last rank to rank 0.
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
    place: Place, device: torch.device, *, folder: Path, book: AddressBook | None = None, facts: str = ""
) -> Links:
    """Connect to the neighbours; waits while the other ranks load their models.

    Args:
        place: which rank this is.
        device: this rank's.
        folder: of this group's ranks on this host, which only this user can enter: for Unix sockets and their names.
        book: where ranks of several hosts find each other; not needed on one host.
        facts: what rank 0 is to know of this one.

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
