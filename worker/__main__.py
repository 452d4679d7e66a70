"""One rank of a group: `torchrun --nproc-per-node 7 -m svdq.worker`. Joins pipeline and producer for the daemon.

`svdq worker` starts torchrun with this module; both ways take the same options and settings.
"""

import logging
import os
import sys
import threading
from pathlib import Path

import click
import torch

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.group import Place, build_stage, choose_device, join
from svdq.pipeline.model import ModelInfo, Part, dtype_for, open_model
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.trace import Tracer, usage_event
from svdq.producer.queue import server_url
from svdq.producer.settings import Settings
from svdq.producer.storage import Storage
from svdq.worker import rundir
from svdq.worker.intake import Intake, IntakeOptions
from svdq.worker.outlet import Outlet
from svdq.worker.progress import ProgressMonitor
from svdq.worker.redis_link import connect
from svdq.worker.signals import Signals

logger = logging.getLogger("svdq.worker")

#: Seconds after a neighbour is gone in which the signal that ended it may still arrive here.
STOP_HEARD_S = 1.0


@click.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--burst", is_flag=True)
@click.option("--warm", multiple=True)
@click.option("--trace", is_flag=True)
@click.option("--run-dir", type=click.Path(path_type=Path))
def main(device: str, burst: bool, warm: tuple[str, ...], trace: bool, run_dir: Path | None) -> None:
    """Be one rank of a group; normally started by `svdq worker`."""
    settings = Settings.load()
    # Before any signal is blocked: an embedded server that is started here must hear them.
    url = server_url(settings)
    signals = Signals()
    place = Place.from_torchrun()
    if run_dir is not None:
        rundir.write_pid(run_dir, place.rank)
    logging.basicConfig(level=logging.INFO, format=f"[rank {place.rank}] %(message)s", stream=sys.stderr)
    logging.getLogger("rq.worker").setLevel(logging.WARNING)
    try:
        _run(place, signals, settings, url, device, burst=burst, warm=warm, trace=trace, run_dir=run_dir)
    except SvdqError as error:
        # Every rank fails the same way; the launcher shows the sentence once.
        if run_dir is not None:
            rundir.write_error(run_dir, str(error))
        else:
            click.echo(f"Error: {error}", err=True)
        sys.exit(2 if isinstance(error, InputError) else 1)


def _run(
    place: Place,
    signals: Signals,
    settings: Settings,
    url: str,
    wanted_device: str,
    *,
    burst: bool,
    warm: tuple[str, ...],
    trace: bool,
    run_dir: Path | None,
) -> None:
    if wanted_device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda was asked for, but PyTorch sees no GPU here; use --device cpu or auto.")
    device = choose_device(wanted_device, place)
    if device.type == "cpu":
        # Ranks share the cores, and one thread each gives the same bits on every machine.
        torch.set_num_threads(1)
    storage = Storage(settings.storage)
    tracer = Tracer(place.rank, on=trace)
    model = open_model(settings.model, Part.of_rank(place.rank, place.num_ranks), device, dtype_for(device))
    links = join(place, device)
    monitor = ProgressMonitor(connect(url), place.rank, model.info.notice)
    intake = None
    if place.first:
        _announce(place, device, model.info, storage)
        options = IntakeOptions(burst=burst, max_pixels=settings.max_pixels)
        intake = Intake(connect(url), storage, model.info, options)
    stage = build_stage(
        place=place,
        links=links,
        model=model,
        monitor=monitor,
        tracer=tracer,
        source=intake,
        sink=Outlet(storage, model.info, tracer) if place.last else None,
        on_lost=lambda reason: _lost(reason, signals.stopping),
    )
    signals.attach(stage, intake)
    for shape in warm:
        stage.warm_up(VideoParameters.of_shape(shape))
    if intake is not None:
        intake.start()
    stage.run()
    if intake is not None:
        intake.close(put_back=stage.stopped)
    if stage.stopped:
        # The neighbours stop wherever they are, too: there is nobody to say goodbye to.
        logging.shutdown()
        os._exit(0)
    monitor.close()
    if trace and run_dir is not None:
        rundir.write_trace(run_dir, place.rank, [*tracer.events(), usage_event(place.rank)])


def _announce(place: Place, device: torch.device, info: ModelInfo, storage: Storage) -> None:
    ranks = "1 rank" if place.num_ranks == 1 else f"{place.num_ranks} ranks"
    notice = f": {info.notice}" if info.notice else ""
    logger.info("Ready with %s on %s, model %s%s.", ranks, device.type, info.name, notice)
    if info.name == "preview":
        logger.info("For diffusion set SVDQ_MODEL to a StableVideoDiffusionPipeline folder or hub id.")
    logger.info("Videos go to %s.", storage.location("outputs"))


def _lost(reason: str, stopping: threading.Event) -> None:
    """End the process when a neighbour is gone: torchrun then restarts the group, and its jobs are taken again."""
    # All ranks are told to stop at once, but a neighbour may have heard it first.
    if not stopping.wait(STOP_HEARD_S):
        logger.error("%s", reason)
        os._exit(1)


if __name__ == "__main__":
    main()
