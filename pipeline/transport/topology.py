"""The topology of a group: which rank this process is, and how it is connected to its neighbors.

Samples go from rank to rank down the chain; reports go back from the last rank to rank 0.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.transport import rendezvous
from svdq.pipeline.transport.channel import Channel


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Which rank of its group a process is."""

    #: Rank 0 takes jobs.
    rank: int
    #: Number of ranks K; rank K-1 writes videos.
    num_ranks: int
    #: The process's number on this host, which selects its GPU; replicas of a bench are rank 0 each.
    local_rank: int

    @classmethod
    def from_torchrun(cls) -> Self:
        """Read torchrun's environment; a process that torchrun did not start is a group of one.

        Raises:
            InputError: the ranks are on several hosts.
        """
        environment = os.environ
        if environment.get("LOCAL_WORLD_SIZE") != environment.get("WORLD_SIZE"):
            raise InputError("A group runs on one host; start one on each host, and they share the queue.")
        return cls(
            rank=int(environment.get("RANK", "0")),
            num_ranks=int(environment.get("WORLD_SIZE", "1")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
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


def join(topology: Topology, device: torch.device, *, folder: Path, rank_info: str = "") -> Links:
    """Connect to the neighbors; waits while other ranks load their models.

    Args:
        topology: which rank this is.
        device: of this rank.
        folder: of this group's ranks, which only this user can enter.
        rank_info: what this rank reports to rank 0.

    Raises:
        OSError: the other ranks have ended.
    """
    if topology.num_ranks == 1:
        return Links(rank_info=(rank_info,))
    ring = rendezvous.close_ring(folder, topology.rank, topology.num_ranks, rank_info)
    return Links(
        incoming=Channel(ring.preceding, device),
        outgoing=Channel(ring.following, device),
        rank_info=ring.rank_info if topology.first else (),
    )


def agree(topology: Topology, rank_info: str, decide: Callable[[tuple[str, ...]], str], *, folder: Path) -> str:
    """Return what rank 0 decides from the information of all ranks, before they load their models.

    `decide` is called on rank 0 alone, with the `rank_info` of all ranks in order; `folder` is that of `join`.

    Raises:
        OSError: the other ranks have ended.
    """
    if topology.num_ranks == 1:
        return decide((rank_info,))
    return rendezvous.agree(folder, topology.rank, topology.num_ranks, rank_info, decide)
