"""Ranks as processes of this machine, without torchrun: for `svdq bench`, comparisons and tests.

They meet through a file and talk over the loopback interface; one process that fails ends the others.
"""

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing

from svdq.pipeline.group import Place, choose_device, join

#: What a rank does: its place, its links, and whatever else was passed to `spawn_ranks`.
RankMain = Callable[..., None]


def spawn_ranks(num_ranks: int, main: RankMain, *args: Any, device: str = "cpu") -> None:
    """Run `main(place, links, *args)` in `num_ranks` processes, one torch thread each, and wait for all of them.

    Args:
        num_ranks: K.
        main: a module-level function, since it is looked up by name in the new processes.
        args: passed on.
        device: cpu, cuda or auto.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; the text holds its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="svdq-") as folder:
        meeting = f"file://{folder}/rendezvous"
        # A fork server imports torch once for all ranks; it never touches CUDA, so that its children may.
        multiprocessing.set_forkserver_preload([__name__, main.__module__])
        torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
            _enter, (num_ranks, meeting, device, main, args), nprocs=num_ranks, start_method="forkserver"
        )


def _enter(rank: int, num_ranks: int, meeting: str, device: str, main: RankMain, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    place = Place(rank=rank, num_ranks=num_ranks, local_rank=rank, local_num_ranks=num_ranks)
    main(place, join(place, choose_device(device, place), init_method=meeting), *args)


def exit_when_lost(reason: str) -> None:
    """End this process: a neighbour is gone, and a broken chain makes nothing."""
    print(f"svdq: {reason}", file=sys.stderr)  # noqa: T201
    os._exit(1)
