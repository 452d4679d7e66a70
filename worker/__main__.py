"""One rank of a group: `torchrun --nproc-per-node 7 -m svdq.worker`. Joins pipeline and producer for the daemon.

`svdq worker` starts torchrun with this module; both ways take the same options and settings.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.group import Place, build_stage, choose_device, join
from svdq.pipeline.models.compute import ComputeOptions, dtype_of
from svdq.pipeline.models.compute_check import check
from svdq.pipeline.models.memory_room import look
from svdq.pipeline.models.model import ModelInfo, Part, open_model
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.trace import usage_event
from svdq.producer.queue import server_url
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.worker.health.job_log_handler import JobLogHandler
from svdq.worker.health.json_log import start_logging
from svdq.worker.health.progress import ProgressMonitor
from svdq.worker.health.tallies import TallyingShelf, TallyingTracer
from svdq.worker.health.vitals import Vitals, costs_in, describe
from svdq.worker.health.watchdog import Watchdog
from svdq.worker.intake.feeder import IntakeOptions
from svdq.worker.intake.intake import Intake
from svdq.worker.intake.memory import plan_of, start_estimates
from svdq.worker.jobs.callbacks import Callbacks
from svdq.worker.launching import compiling, rundir
from svdq.worker.launching.compute_options import check_alike, compute_options, read, transport_option
from svdq.worker.output.outlet import Outlet
from svdq.worker.recovery.breadcrumbs import Breadcrumbs, folder_without_launcher, read_blame
from svdq.worker.recovery.checkpoints import Archive, Codec, Spool
from svdq.worker.recovery.fence import Fence
from svdq.worker.recovery.restarts import count_crash_here, lost, stalled, try_again
from svdq.worker.recovery.shelf import open_shelf
from svdq.worker.redis_link import Outage, connect, restarter, wait_for
from svdq.worker.signals import Signals

logger = logging.getLogger("svdq.worker")

#: Seconds that a rank which is told to stop takes, after its step, to write what it holds.
FLUSH_S = 10.0


@click.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--burst", is_flag=True)
@click.option("--warm", multiple=True)
@click.option("--trace", is_flag=True)
@click.option("--run-dir", type=click.Path(path_type=Path))
@click.option("--checkpoints", type=click.Choice(["local", "storage", "off"]), default="local")
@click.option("--until-s", type=float)
@click.option("--fit-memory", is_flag=True)
@transport_option
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text")
@click.option("--group")
@compute_options
def main(run_dir: Path | None, log_format: str, group: str | None, **options: Any) -> None:
    """Be one rank of a group; normally started by `svdq worker`."""
    settings = Settings.load()
    # Before any signal is blocked: an embedded server that is started here must hear them.
    url = server_url(settings)
    place = Place.from_torchrun()
    life = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    breadcrumbs = Breadcrumbs(run_dir or folder_without_launcher(settings.home), life, place.rank)
    signals = Signals(on_stop=breadcrumbs.innocent)
    if run_dir is not None:
        rundir.write_pid(run_dir, place.rank)
    log = JobLogHandler(place.rank)
    start_logging(log_format, place.rank, group, log.job_ids)
    logging.getLogger().addHandler(log)
    logging.getLogger("rq.worker").setLevel(logging.WARNING)
    try:
        _run(place, signals, breadcrumbs, settings, url, log, read(options), run_dir=run_dir, **options)
    except SvdqError as error:
        # Every rank fails the same way; the launcher shows the sentence once.
        if run_dir is not None:
            rundir.write_error(run_dir, error)
        elif log_format == "json":
            logger.critical("%s", error)
        else:
            click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)


def _run(
    place: Place,
    signals: Signals,
    breadcrumbs: Breadcrumbs,
    settings: Settings,
    url: str,
    log: JobLogHandler,
    compute: ComputeOptions,
    *,
    device: str,
    burst: bool,
    warm: tuple[str, ...],
    trace: bool,
    run_dir: Path | None,
    checkpoints: str,
    until_s: float | None,
    fit_memory: bool,
    transport: str,
) -> None:
    our_device = choose_device(device, place)
    if our_device.type == "cpu":
        # Ranks share the cores, and one thread each gives the same bits on every machine.
        torch.set_num_threads(1)
    if compute.compiled != "off":
        compiling.prepare(settings.home, place.local_num_ranks)
    check(compute, our_device)
    storage = Storage(settings.storage)
    parts = Part.of_rank(place.rank, place.num_ranks)
    dtype, limit = dtype_of(compute, our_device), settings.memory_limit
    estimates = None
    if place.first:
        estimates = start_estimates(settings.model, dtype, our_device, compute, limit, fit=fit_memory)
    opening_since = time.perf_counter()
    try:
        model = open_model(settings.model, parts, our_device, dtype, compute)
    except InputError as error:
        try_again(error, breadcrumbs.life)
    load_s = time.perf_counter() - opening_since
    if place.local_rank == 0 and not place.first:
        count_crash_here(url, breadcrumbs)
    try:
        facts = json.dumps(look(our_device, limit) | {"compute": model.info.compute})
        links = join(place, our_device, facts=facts, transport=transport)
    except InputError as error:
        try_again(error, breadcrumbs.life)
    except OSError as error:
        # A neighbour has ended in the middle of the meeting: as likely as not all were told to stop.
        lost(f"The other ranks cannot be met: {error}.", signals.stopping, breadcrumbs)
        os._exit(0)
    check_alike(links.facts)
    # Before anything that has to be put away again: it refuses limits that nothing fits into.
    memory = plan_of(settings.home, model.info, links.facts, estimates, fit=fit_memory) if place.first else None
    vitals = Vitals(describe(place, our_device, model.info.name, load_s, model.info.notice), our_device)
    tracer = TallyingTracer(place.rank, vitals.tallies, on=trace)
    monitor = ProgressMonitor(connect(url), model.info.notice, vitals, log, breadcrumbs)
    shelf = open_shelf(checkpoints, settings.home, storage)
    if shelf is not None:
        shelf = TallyingShelf(shelf, vitals.tallies)
    codec = Codec(model=model.info.name, device=our_device, compute=model.info.compute)
    spool = Spool(shelf, codec) if shelf is not None else None
    outlet = Outlet(storage, model.info, tracer, fence=Fence(connect(url), signals.stopping)) if place.last else None
    intake = None
    if place.first:
        storage.sweep()
        _announce(place, our_device, model.info, storage)
        options = IntakeOptions(
            burst=burst,
            has_scheduler=run_dir is not None,
            callbacks=Callbacks(settings),
            max_pixels=settings.max_pixels,
            memory=memory,
            max_attempts=settings.max_attempts,
            until_s=until_s,
            # One computed, one received and one sent by each rank, and those that are being written.
            max_in_flight=3 * place.num_ranks + 4,
            blame=read_blame(breadcrumbs.folder, breadcrumbs.life),
        )
        outage = Outage(restarter(settings))
        connection = connect(url)
        wait_for(connection, outage)
        archive = Archive(shelf=shelf, codec=codec) if shelf is not None else None
        intake = Intake(connection, storage, model.info, options, archive, spool, outage)
    stage = build_stage(
        place=place,
        links=links,
        model=model,
        monitor=Watchdog(
            monitor,
            place.rank,
            compiling.stall_s(settings.stall_s, compute),
            on_stall=lambda: stalled(monitor, breadcrumbs),
        ),
        tracer=tracer,
        source=intake,
        sink=outlet,
        on_lost=lambda reason: lost(reason, signals.stopping, breadcrumbs),
        keeper=spool,
    )
    vitals.waiting = [part for part in (intake, outlet, spool) if part is not None]
    if intake is not None:
        vitals.group = lambda: intake.status().model_copy(update={"costs": costs_in(stage.costs)})
    signals.attach(stage, intake)
    for shape in warm:
        stage.warm_up(VideoParameters.of_shape(shape))
    if intake is not None:
        intake.start()
    stage.run()
    flush_until = time.monotonic() + FLUSH_S
    if stage.stopped and spool is not None:
        spool.flush(FLUSH_S)  # first: whoever takes our jobs next goes on from there
    if intake is not None:
        intake.close(put_back=stage.stopped)
    if estimates is not None:
        estimates.close()
    if stage.stopped and outlet is not None:
        outlet.wait(flush_until - time.monotonic())
    monitor.close()
    if stage.stopped:
        # The neighbours stop wherever they are, too: there is nobody to say goodbye to.
        logging.shutdown()
        os._exit(0)
    if spool is not None and not spool.flush(FLUSH_S):
        logger.warning("The checkpoints of videos that are finished could not be removed; the next worker does that.")
    breadcrumbs.innocent()
    if trace and run_dir is not None:
        rundir.write_trace(run_dir, place.rank, [*tracer.events(), usage_event(place.rank)])


def _announce(place: Place, device: torch.device, info: ModelInfo, storage: Storage) -> None:
    ranks = "1 rank" if place.num_ranks == 1 else f"{place.num_ranks} ranks"
    notice = f": {info.notice}" if info.notice else ""
    logger.info("Ready with %s on %s, model %s%s.", ranks, device.type, info.name, notice)
    if info.name == "preview":
        logger.info("For diffusion set SVDQ_MODEL to a StableVideoDiffusionPipeline folder or hub id.")
    logger.info("Videos go to %s.", storage.location("outputs"))


if __name__ == "__main__":
    main()
