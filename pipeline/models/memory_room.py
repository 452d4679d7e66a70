"""How much memory a rank has for its work, as it tells rank 0 of it when the ranks meet. Knows no models."""

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from svdq.pipeline.models.memory_plan import Room

#: What a process on a GPU needs besides tensors: memory that the allocator has cut into pieces fits no large one. A
#: guess; nobody has measured it. CUDA's own context is not in it: that is gone already when a rank looks at what is
#: free.
RESERVE_BYTES = 500_000_000


def look(device: torch.device, limit: int | None) -> dict[str, Any]:
    """Look what there is, after the model is loaded; see `rooms_of`. JSON.

    Args:
        device: where the rank computes.
        limit: bytes that the user grants each rank, in place of what the device has.
    """
    if limit is not None:
        return {"limit": limit, "device": _name(device)}
    if device.type != "cuda":
        # The memory of a host is shared, swapped and mapped: there is no saying what fits.
        return {"device": _name(device)}
    free, _ = torch.cuda.mem_get_info(device)
    properties: Any = torch.cuda.get_device_properties(device)
    return {
        "device": _name(device),
        "gpu": f"{socket.gethostname()}/{getattr(properties, 'uuid', device.index)}",
        "free": free,
        # The allocator's own, used or not; what other processes hold is in neither.
        "held": torch.cuda.memory_reserved(device),
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def rooms_of(facts: Sequence[Mapping[str, Any]]) -> list[Room]:
    """Make rooms out of what `look` found on each rank, rank 0 first.

    Ranks on one GPU have together what is free for one of them and what all of them hold. The one that looked last
    saw the least.
    """
    rooms = [
        Room(capacity=fact["limit"], ranks=(rank,)) for rank, fact in enumerate(facts) if fact.get("limit") is not None
    ]
    gpus: dict[str, list[int]] = {}
    for rank, fact in enumerate(facts):
        if fact.get("gpu"):
            gpus.setdefault(fact["gpu"], []).append(rank)
    for ranks in gpus.values():
        free = min(facts[rank]["free"] for rank in ranks)
        held = sum(facts[rank]["held"] for rank in ranks)
        rooms.append(Room(capacity=free + held - RESERVE_BYTES * len(ranks), ranks=tuple(ranks)))
    return rooms
