"""One rank of a group as a process, which `svdq worker` starts by torchrun."""

import gc

# torch's modules make hundreds of thousands of objects, and none of them is garbage: to look through them again and
# again takes a third of the processor time of a start.
gc.disable()

import os

# Pieces of memory that are free between others cannot be used without it. The name is that which all supported versions
# of torch read, when they are imported.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

from svdq.producer.processes import PARENT_PID, die_with_parent

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

import click

from svdq.pipeline.errors import SvdqError
from svdq.pipeline.transport.topology import Topology
from svdq.worker import run_folder
from svdq.worker.health.rank_log import JobLogHandler, start_logging
from svdq.worker.queue.crashes import CrashMarker
from svdq.worker.rank import run_rank
from svdq.worker.run_folder import RunConfig, check_home
from svdq.worker.startup import RankProcess, Signals

gc.freeze()
gc.enable()

logger = logging.getLogger("svdq.worker")

RELOAD_S = 10.0  # seconds before a group that was restarted tries to start again
KILLED_WITHIN_S = 5.0  # seconds in which the launcher kills a group that has recorded an error


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), required=True)
def main(run_dir: Path) -> None:
    """Run one rank of a group; `svdq worker` has resolved everything, and left it in the run folder."""
    run_config, topology = run_folder.read_config(run_dir), Topology.from_torchrun()
    restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    log = start_logging(run_config.rank.log_format, topology.rank, run_config.rank.group)
    logging.getLogger("rq.worker").setLevel(logging.WARNING)
    if sys.stderr is not None:  # the shell's `2>&-` closes it
        # So that a crash in native code says where it was. The stacks of running threads may crash faulthandler itself,
        # before it comes to that of the crash.
        faulthandler.enable(all_threads=False)
    exit_code = 0
    try:
        _run(run_config, topology, restart_count, log, run_dir)
    except SvdqError as error:
        exit_code = error.exit_code
        if restart_count > 0:
            # The cause may be temporary, such as memory that another program uses, or a server that is away.
            logger.warning("%s The group worked before, so it tries again in %.0f s.", error, RELOAD_S)
            time.sleep(RELOAD_S)
        else:
            # Every rank fails in the same way; the launcher prints the sentence once.
            run_folder.write_error(run_dir, error)
            time.sleep(KILLED_WITHIN_S)  # torchrun would print a line about a rank that ends by itself
    except Exception:
        logger.critical("An unexpected error ends this rank.", exc_info=True)
        exit_code = 1
    logging.shutdown()
    # Not through the interpreter's end, which waits for threads: one may wait for the storage.
    os._exit(exit_code)


def _run(run_config: RunConfig, topology: Topology, restart_count: int, log: JobLogHandler, run_dir: Path) -> None:
    check_home(run_config.settings.home)
    marker = CrashMarker(run_dir, restart_count, topology.rank)
    signals = Signals(on_stop=marker.mark_clean_exit)
    run_folder.write_pid(run_dir, topology.rank)
    if restart_count > 0:
        run_folder.await_permission(run_dir, restart_count)
    run_rank(RankProcess(run=run_config, topology=topology, signals=signals, marker=marker, log=log, run_dir=run_dir))


if __name__ == "__main__":
    main()
