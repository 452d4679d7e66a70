"""The topology of a group: which rank this process is, and how its stage is connected to its neighbours.

Samples go from rank to rank down the chain; reports go back from the last rank to rank 0.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from svdq.pipeline.binding import Components
from svdq.pipeline.models.base import VideoModel
from svdq.pipeline.plan import Planner
from svdq.pipeline.protocols import Checkpointer, Monitor, Sink, Source
from svdq.pipeline.stage import Stage
from svdq.pipeline.trace import Tracer
from svdq.pipeline.transport import rendezvous
from svdq.pipeline.transport.address_book import AddressBook, FolderBook, address_among_hosts
from svdq.pipeline.transport.channel import Channel
from svdq.pipeline.transport.transport import OnLost, Receiver, Sender


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Which rank of its group a process is."""

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
        """Read torchrun's environment; a process that torchrun did not start is a group of one."""
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
    #: On rank 0: what each rank reports of itself, rank 0 first.
    rank_info: tuple[str, ...] = ()


def join(
    topology: Topology, device: torch.device, *, folder: Path, book: AddressBook | None = None, rank_info: str = ""
) -> Links:
    """Connect to the neighbours; waits while other ranks load their models.

    Args:
        topology: which rank this is.
        device: this rank's.
        folder: of this group's ranks on this host, which only this user can enter: for Unix sockets and their names.
        book: where ranks of several hosts find each other; not needed on one host.
        rank_info: what this rank reports to rank 0.

    Raises:
        OSError: the other ranks have ended.
    """
    if topology.num_ranks == 1:
        return Links(rank_info=(rank_info,))
    book, address = _meeting_place(topology, folder, book)
    ring = rendezvous.close_ring(book, topology.rank, topology.num_ranks, address, rank_info)
    outgoing, incoming = Channel(ring.following, device), Channel(ring.preceding, device)
    return Links(
        upstream=None if topology.first else incoming,
        downstream=None if topology.last else outgoing,
        returns=outgoing if topology.last else None,
        reports=incoming if topology.first else None,
        rank_info=ring.rank_info if topology.first else (),
    )


def agree(
    topology: Topology,
    rank_info: str,
    decide: Callable[[tuple[str, ...]], str],
    *,
    folder: Path,
    book: AddressBook | None = None,
) -> str:
    """Return what rank 0 decides from what all ranks tell, before they load their models.

    Args:
        topology: which rank this is.
        rank_info: what this rank reports to rank 0.
        decide: called on rank 0 alone, with what the ranks tell, rank 0 first.
        folder: as for `join`.
        book: as for `join`.

    Raises:
        OSError: the other ranks have ended.
    """
    if topology.num_ranks == 1:
        return decide((rank_info,))
    book, address = _meeting_place(topology, folder, book)
    return rendezvous.agree(book, topology.rank, topology.num_ranks, address, rank_info, decide)


def _meeting_place(topology: Topology, folder: Path, book: AddressBook | None) -> tuple[AddressBook, str]:
    """Return where the ranks find each other, and where this one listens."""
    if topology.local_num_ranks == topology.num_ranks:
        return FolderBook(folder), str(folder / f"rank{topology.rank}.sock")
    assert book is not None
    elsewhere = (topology.rank - topology.local_rank + topology.local_num_ranks) % topology.num_ranks
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return book, address_among_hosts(book, topology.rank, elsewhere, *master)


def build_stage(
    *,
    topology: Topology,
    links: Links,
    model: VideoModel,
    monitor: Monitor,
    tracer: Tracer,
    source: Source | None,
    sink: Sink | None,
    on_lost: OnLost,
    device: torch.device | None = None,
    checkpointer: Checkpointer | None = None,
    planner: Planner | None = None,
    components: Sequence[Components] = (),
) -> Stage:
    """Create a rank's stage and connect it to its neighbours.

    Args:
        topology: which rank this is.
        links: what `join` returned.
        model: with the parts that this rank needs.
        monitor: receives progress.
        tracer: records spans.
        source: on rank 0 only.
        sink: on the last rank only.
        on_lost: called from a thread when a neighbour is gone; should end the process, since the group is broken.
        device: of this rank; None: the processor.
        checkpointer: keeps unfinished samples; None keeps nothing.
        planner: decides on rank 0 who does what; None: fair shares, and the last rank decodes.
        components: on rank 0 the denoising components of each rank; none: all ranks have all.
    """
    return Stage(
        rank=topology.rank,
        num_ranks=topology.num_ranks,
        model=model,
        monitor=monitor,
        tracer=tracer,
        device=device,
        source=source,
        sink=sink,
        planner=planner,
        components=components,
        upstream=Receiver(links.upstream, topology.rank - 1, on_lost) if links.upstream else None,
        downstream=Sender(links.downstream, topology.rank + 1, on_lost) if links.downstream else None,
        returns=Sender(links.returns, 0, on_lost) if links.returns else None,
        reports=Receiver(links.reports, topology.num_ranks - 1, on_lost) if links.reports else None,
        checkpointer=checkpointer,
    )
