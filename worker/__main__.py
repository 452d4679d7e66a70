"""One rank of a group as a process: `torchrun --nproc-per-node 7 -m svdq.worker`, as `svdq worker` starts it, too."""

import gc

# torch's modules make hundreds of thousands of objects, and none of them is garbage: to look through them again and
# again takes a third of the processor time of a start.
gc.disable()

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from svdq.pipeline.errors import SvdqError
from svdq.pipeline.topology import Topology
from svdq.producer.queue import server_url
from svdq.producer.settings import Settings
from svdq.producer.text import printable
from svdq.worker.config import RankConfig, rank_options
from svdq.worker.health.crash_marker import CrashMarker, folder_without_launcher
from svdq.worker.health.logging import start_logging
from svdq.worker.launcher import run_dir as run_dirs
from svdq.worker.rank import run_rank
from svdq.worker.signals import Signals
from svdq.worker.startup import RankProcess

gc.freeze()
gc.enable()

logger = logging.getLogger("svdq.worker")


@click.command()
@click.option("--run-dir", type=click.Path(path_type=Path), hidden=True)
@rank_options
def main(run_dir: Path | None, **options: Any) -> None:
    """Run one rank of a group under torchrun; settings come from SVDQ_ variables and svdq.toml."""
    # `svdq worker` leaves the configuration in the run folder.
    config = RankConfig(**options) if run_dir is None else run_dirs.read_config(run_dir)
    settings = Settings.load()
    # Before Signals blocks the signals: an embedded server that is started here must receive them.
    url = server_url(settings)
    topology = Topology.from_torchrun()
    restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    marker = CrashMarker(run_dir or folder_without_launcher(settings.home), restart_count, topology.rank)
    signals = Signals(on_stop=marker.mark_clean_exit)
    if run_dir is not None:
        run_dirs.write_pid(run_dir, topology.rank)
    log = start_logging(config.log_format, topology.rank, config.group)
    logging.getLogger("rq.worker").setLevel(logging.WARNING)
    try:
        run_rank(
            RankProcess(
                config=config,
                settings=settings,
                url=url,
                topology=topology,
                signals=signals,
                marker=marker,
                log=log,
                run_dir=run_dir,
            )
        )
    except SvdqError as error:
        # Every rank fails in the same way; the launcher prints the sentence once.
        if run_dir is not None:
            run_dirs.write_error(run_dir, error)
        elif config.log_format == "json":
            logger.critical("%s", error)
        else:
            click.echo(printable(f"Error: {error}"), err=True)  # noqa: TID251 - escaped here
        sys.exit(error.exit_code)
    finally:
        gc.freeze()  # the interpreter looks through everything once more before it ends


if __name__ == "__main__":
    main()
