"""Tensors from GPU to GPU through NCCL: a process group of two for each pair of neighbours. Knows no messages.

A group for each link, since all that goes through one group waits for what went before it: a rank would not receive
the next sample while it sends one. Whoever calls has seen to it that the other side calls at the same time.

Of the two links of a rank one works at a time: NCCL warns of several communicators at once on one GPU. Ranks are a
chain, so they never wait in a circle.
"""

import threading
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from svdq.pipeline.errors import InputError


class DeviceLink:
    """One direction between two ranks, each with a device of its own."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device, turn: threading.Lock) -> None:
        """Make it.

        Args:
            group: of this rank and the other one.
            peer: the other one's rank among all.
            device: this rank's.
            turn: held by the link of a rank that works.
        """
        self._group = group
        self._peer = peer
        self._device = device
        self._turn = turn

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Send tensors, in the order in which they are received; returns when they are read and may change."""
        with self._turn:
            for tensor in tensors:
                dist.send(tensor.contiguous(), self._peer, group=self._group)
            self._wait()

    def receive(self, tensors: Iterable[Tensor]) -> None:
        """Receive into tensors; returns when all are there."""
        with self._turn:
            for tensor in tensors:
                dist.recv(tensor, self._peer, group=self._group)
            self._wait()

    def _wait(self) -> None:
        # NCCL's calls only put work on a stream; until it is done, what is sent must not change, and no side may end.
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def connect(
    backend: str, store: Store, rank: int, num_ranks: int, device: torch.device
) -> tuple[DeviceLink | None, DeviceLink | None]:
    """Connect a chain of ranks, and send one number along it, so that what does not work shows now.

    Args:
        backend: nccl; gloo does the same on processors.
        store: of this life of the group alone.
        rank: this one.
        num_ranks: K; all of them call this.
        device: this rank's, no other rank's.

    Returns:
        The links from the rank before and to the rank after, None where there is no such rank.

    Raises:
        InputError: the backend does not work here.
    """
    try:
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, device_id=device_id)
        # Every rank makes all of them, in one order, also those that it is not in.
        groups = [dist.new_group([before, before + 1]) for before in range(num_ranks - 1)]
        turn = threading.Lock()
        upstream = DeviceLink(groups[rank - 1], rank - 1, device, turn) if rank > 0 else None
        downstream = DeviceLink(groups[rank], rank + 1, device, turn) if rank < num_ranks - 1 else None
        number = torch.zeros(1, device=device)
        if upstream is not None:
            upstream.receive([number])
        if downstream is not None:
            downstream.send([number + 1])
    except (RuntimeError, ValueError) as error:  # DistError is one; ValueError: this torch has no such backend
        reason = str(error).strip().partition("\n")[0][:200]
        raise InputError(
            f"{backend.upper()} does not work between the GPUs of this group ({reason}); use --transport host, or look "
            "with NCCL_DEBUG=INFO at what is wrong."
        ) from error
    return upstream, downstream
