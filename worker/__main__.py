"""One rank of a group as a process: `torchrun --nproc-per-node 7 -m svdq.worker`, as `svdq worker` starts it, too."""

import gc

# torch's modules make hundreds of thousands of objects, and none of them is garbage: to look through them again and
# again takes a third of the processor time of a start.
gc.disable()

import os

# Pieces of memory that are free between others cannot be used without it. The name is that which all supported versions
# of torch read, when they are imported.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

from svdq.producer.processes import PARENT_PID, die_with_parent, name_process

if __name__ == "__main__" and PARENT_PID in os.environ:
    # A kill of `svdq worker` ends torchrun, too. Imports take seconds, so the kernel is asked before them.
    follow_parent = die_with_parent(parent=int(os.environ[PARENT_PID]))
    if follow_parent is not None:
        follow_parent()

import faulthandler
import logging
import sys
import time
from pathlib import Path
from typing import Any

import click

from svdq.pipeline.errors import SvdqError, reason_of
from svdq.pipeline.imports import plain_imports
from svdq.producer.text import printable
from svdq.worker import run_folder
from svdq.worker.config import RankConfig, RunConfig, rank_options, read_config
from svdq.worker.health.rank_log import JobLogHandler, start_logging
from svdq.worker.launcher.gpus import visible_gpus
from svdq.worker.run_folder import check_home

logger = logging.getLogger("svdq.worker")

RELOAD_S = 10.0  # seconds before a group that was restarted tries to start again
KILLED_WITHIN_S = 5.0  # seconds in which the launcher kills a group that has recorded an error


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), hidden=True)
@rank_options
def main(run_dir: Path | None, **options: Any) -> None:
    """Run one rank of a group under torchrun; settings come from SVDQ_ variables and svdq.toml."""
    rank = int(os.environ.get("RANK", "0"))
    name_process(f"svdq rank {rank}")
    restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if run_dir is not None and restart_count > 0:
        run_folder.write_restart(run_dir, restart_count)
    log_format = "text"
    exit_code = 0
    try:
        # `svdq worker` has resolved everything, and left it in the run folder.
        run_config = None if run_dir is None else read_config(run_dir)
        config = RankConfig(**options) if run_config is None else run_config.rank
        log_format = config.log_format
        log = start_logging(log_format, rank, config.group)
        logging.getLogger("rq.worker").setLevel(logging.WARNING)
        for name in ("aiobotocore", "botocore"):
            logging.getLogger(name).setLevel(logging.WARNING)  # else a line for each place of credentials
        if sys.stderr is not None:  # the shell's `2>&-` closes it
            # So that a crash in native code says where it was. The stacks of running threads may crash faulthandler
            # itself, before it comes to the one that crashed.
            faulthandler.enable(all_threads=False)
        with plain_imports():
            _run(run_config or _resolve_here(config), restart_count, log, run_dir)
    except SvdqError as error:
        exit_code = error.exit_code
        ready = None if run_dir is None else run_folder.last_ready(run_dir)
        if restart_count > 0 or (ready is not None and ready < restart_count):  # it may have worked before a rest
            # The cause may be temporary, such as memory that another program uses, or a server that is away.
            if run_dir is None or ready is not None:
                logger.warning("%s The group worked before, so it tries again in %.0f s.", error, RELOAD_S)
            else:
                run_folder.write_failure(run_dir, restart_count, str(error))
            time.sleep(RELOAD_S)
        elif run_dir is not None:
            # Every rank fails in the same way; the launcher prints the sentence once.
            run_folder.write_error(run_dir, error)
            time.sleep(KILLED_WITHIN_S)  # torchrun would print a line about a rank that ends by itself
        elif log_format == "json":
            logger.critical("%s", error)
        else:
            click.echo(printable(f"Error: {error}"), err=True)  # noqa: TID251 - escaped here
    except Exception as error:
        logger.critical("An unexpected error ends this rank.", exc_info=True)
        exit_code = 1
        if run_dir is not None:
            run_folder.write_failure(run_dir, restart_count, f"{type(error).__name__}: {reason_of(error)}")
    logging.shutdown()
    # Not through the interpreter's end, which waits for threads: one may wait for the storage.
    os._exit(exit_code)


def _resolve_here(rank: RankConfig) -> RunConfig:
    """Do what a launcher does, under a plain torchrun; every rank of a host finds the same."""
    # Ranks of a launcher need neither.
    from svdq.pipeline.models.names.model_names import resolve
    from svdq.producer.settings_loader import load_settings

    settings = load_settings()
    model = resolve(settings.model, on_gpus=rank.device != "cpu" and bool(visible_gpus()), dtype=rank.dtype)
    return RunConfig(rank=rank.model_copy(update={"weights": settings.weights}), settings=settings, model=model)


def _run(run_config: RunConfig, restart_count: int, log: JobLogHandler, run_dir: Path | None) -> None:
    # Not before, since torch and what it needs may be installed wrongly.
    from svdq.pipeline.transport.topology import Topology
    from svdq.worker.queue.crashes import CrashMarker, folder_without_launcher
    from svdq.worker.rank import Rank
    from svdq.worker.startup import RankProcess, Signals

    gc.freeze()
    gc.enable()
    topology = Topology.from_torchrun()
    home = run_config.settings.home
    check_home(home)
    marker = CrashMarker(run_dir or folder_without_launcher(home), restart_count, topology.rank)
    signals = Signals(on_stop=marker.mark_clean_exit)
    if run_dir is not None:
        run_folder.write_pid(run_dir, topology.rank)
        if restart_count > 0:
            run_folder.await_permission(run_dir, restart_count)
    process = RankProcess(run=run_config, topology=topology, signals=signals, marker=marker, log=log, run_dir=run_dir)
    Rank(process).run()


if __name__ == "__main__":
    main()
