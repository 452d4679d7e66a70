"""The topology of a group: which rank this process is, and how it is connected to its neighbors.

Samples go from rank to rank down the chain; reports go back from the last rank to rank 0.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from svdq.pipeline.transport import rendezvous
from svdq.pipeline.transport.address_book import AddressBook, FolderBook, address_among_hosts
from svdq.pipeline.transport.channel import Channel


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
    """A rank's channels to its neighbors; a single rank has none."""

    #: From the rank before; on rank 0 from the last rank, for reports.
    incoming: Channel | None = None
    #: To the next rank; on the last rank to rank 0.
    outgoing: Channel | None = None
    #: On rank 0: what each rank reports of itself, rank 0 first.
    rank_info: tuple[str, ...] = ()


def join(
    topology: Topology, device: torch.device, *, folder: Path, book: AddressBook | None = None, rank_info: str = ""
) -> Links:
    """Connect to the neighbors; waits while other ranks load their models.

    Args:
        topology: which rank this is.
        device: of this rank.
        folder: of this group's ranks on this host, which only this user can enter: for Unix sockets and their names.
        book: where ranks of several hosts find each other; not needed on one host.
        rank_info: what this rank reports to rank 0.

    Raises:
        OSError: the other ranks have ended.
    """
    if topology.num_ranks == 1:
        return Links(rank_info=(rank_info,))
    book, address = _rendezvous(topology, folder, book)
    ring = rendezvous.close_ring(book, topology.rank, topology.num_ranks, address, rank_info)
    return Links(
        incoming=Channel(ring.preceding, device),
        outgoing=Channel(ring.following, device),
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
    """Return what rank 0 decides from the information of all ranks, before they load their models.

    `decide` is called on rank 0 alone, with the `rank_info` of all ranks in order; `folder` and `book` are those of
    `join`.

    Raises:
        OSError: the other ranks have ended.
    """
    if topology.num_ranks == 1:
        return decide((rank_info,))
    book, address = _rendezvous(topology, folder, book)
    return rendezvous.agree(book, topology.rank, topology.num_ranks, address, rank_info, decide)


def _rendezvous(topology: Topology, folder: Path, book: AddressBook | None) -> tuple[AddressBook, str]:
    """Return where the ranks find each other, and where this one listens."""
    if topology.local_num_ranks == topology.num_ranks:
        return FolderBook(folder), str(folder / f"rank{topology.rank}.sock")
    assert book is not None
    elsewhere = (topology.rank - topology.local_rank + topology.local_num_ranks) % topology.num_ranks
    master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return book, address_among_hosts(book, topology.rank, elsewhere, *master)
