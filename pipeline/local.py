"""Ranks as processes of this machine, without torchrun: for `svdq bench`, comparisons and tests.

They connect through Unix sockets in a private folder; the failure of one process ends the others.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from svdq.pipeline import errors
from svdq.pipeline.device import choose_device
from svdq.pipeline.errors import SvdqError
from svdq.pipeline.transport.topology import Topology, join

#: What a rank does; called with its topology, its links, and the further arguments of `spawn_ranks`.
RankMain = Callable[..., None]


def spawn_ranks(
    num_ranks: int,
    main: RankMain,
    *args: Any,
    device: str = "cpu",
    replicas: bool = False,
) -> None:
    """Run `main(topology, links, *args)` in `num_ranks` processes, one torch thread each, and wait for all of them.

    `main` is a module-level function, since the new processes look it up by name. With `replicas` each process is a
    group of one, without links, and `local_rank` is its number.

    Raises:
        SvdqError: a rank raised one, or a subclass, which is raised here, or was ended by a signal.
        torch.multiprocessing.ProcessRaisedException: a rank raised anything else; the text has its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="svdq-") as folder:
        _start_fork_server([__name__, main.__module__])
        context = torch.multiprocessing.start_processes(  # type: ignore[attr-defined]
            _enter,
            (num_ranks, Path(folder), device, replicas, main, args),
            nprocs=num_ranks,
            join=False,
            daemon=True,  # an interrupt of this process alone ends them
            start_method="forkserver",
        )
        try:
            while not context.join():
                pass
        except (ProcessExitedException, ProcessRaisedException) as error:
            for path in Path(folder).glob("*.error"):
                kind: type[SvdqError] = getattr(errors, path.suffixes[0].removeprefix("."), SvdqError)
                raise kind(path.read_text(encoding="utf-8")) from None
            for rank, process in enumerate(context.processes):
                # The others are ended with SIGTERM.
                if process.exitcode < 0 and process.exitcode != -signal.SIGTERM:
                    raise SvdqError(
                        f"Rank {rank} was ended by {signal.Signals(-process.exitcode).name}; after SIGKILL check "
                        "whether the machine ran out of memory, and use fewer ranks or smaller videos."
                    ) from error
            raise


def _start_fork_server(modules: list[str]) -> None:
    """Start a fork server, which imports torch once for all ranks. It never initializes CUDA, so its children can."""
    multiprocessing.set_forkserver_preload(modules)
    before = os.environ.get("PYTHONSAFEPATH")
    # Otherwise the server imports modules from the current folder, such as a grp.py there.
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _enter(
    rank: int,
    num_ranks: int,
    folder: Path,
    device: str,
    replicas: bool,
    main: RankMain,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    topology = Topology(rank=rank, num_ranks=num_ranks, local_rank=rank)
    if replicas:
        topology = replace(topology, rank=0, num_ranks=1)
    try:
        links = join(topology, choose_device(device, topology.local_rank), folder=folder)
        main(topology, links, *args)
    except SvdqError as error:
        path = folder / f"rank{rank}.{type(error).__name__}.error"
        path.write_text(str(error), encoding="utf-8")
        sys.exit(1)


def exit_when_lost(reason: str) -> None:
    """End this process: a neighbor is gone, so the group is broken."""
    print(f"svdq: {reason}", file=sys.stderr)  # noqa: T201
    os._exit(1)
