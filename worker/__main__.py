"""One rank of a group: `torchrun --nproc-per-node 7 -m svdq.worker`. Joins pipeline and producer for the daemon.

`svdq worker` starts torchrun with this module; both ways take the same options and settings.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from svdq.pipeline.device import check_computes, choose_device
from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.models.base import ModelInfo, Part
from svdq.pipeline.models.compute_check import check
from svdq.pipeline.models.device_memory import capacity, name_of
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.options import ComputeOptions, dtype_of
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.stage import Stage
from svdq.pipeline.topology import Topology, build_stage, join
from svdq.pipeline.trace import usage_event
from svdq.producer.embedded_redis.socket_path import private_folder
from svdq.producer.queue import server_url
from svdq.producer.settings import Settings
from svdq.producer.storage.storage import Storage
from svdq.producer.text import printable
from svdq.worker.checkpoint.codec import Codec
from svdq.worker.checkpoint.reader import CheckpointReader
from svdq.worker.checkpoint.store import open_checkpoint_store
from svdq.worker.checkpoint.writer import CheckpointWriter
from svdq.worker.health.crash_marker import CrashMarker, folder_without_launcher, read_suspects
from svdq.worker.health.histograms import CountingCheckpointStore, TimingTracer
from svdq.worker.health.job_log_handler import JobLogHandler
from svdq.worker.health.logging import start_logging
from svdq.worker.health.progress import ProgressMonitor
from svdq.worker.health.rank_status import RankReporter, costs_in, describe
from svdq.worker.health.watchdog import Watchdog
from svdq.worker.intake.dispatcher import IntakeOptions
from svdq.worker.intake.intake import Intake
from svdq.worker.intake.memory import DoesNotFitError, MemoryPlan, RankMemory, plan_of
from svdq.worker.launcher import compiling, gpus, rundir
from svdq.worker.launcher.compute_options import check_alike, compute_options, read
from svdq.worker.launcher.gpus import visible_gpus
from svdq.worker.launcher.hosts import address_book
from svdq.worker.output.fence import Fence
from svdq.worker.output.writer import ResultWriter
from svdq.worker.redis_client import ConnectionHealth, connect, restarter, wait_for
from svdq.worker.restarts import count_crash_here, lost, stalled, try_again
from svdq.worker.signals import Signals

logger = logging.getLogger("svdq.worker")

#: Seconds that a rank which is told to stop takes, after its step, to write what it holds.
FLUSH_S = 10.0


@click.command()
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto")
@click.option("--burst", is_flag=True)
@click.option("--warmup", multiple=True)
@click.option("--trace", is_flag=True)
@click.option("--run-dir", type=click.Path(path_type=Path))
@click.option("--checkpoints", type=click.Choice(["local", "storage", "off"]), default="local")
@click.option("--until-s", type=float)
@click.option("--ranks-per-gpu", type=click.IntRange(min=1))
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text")
@click.option("--group")
@compute_options
def main(run_dir: Path | None, log_format: str, group: str | None, **options: Any) -> None:
    """Be one rank of a group; normally started by `svdq worker`."""
    settings = Settings.load()
    # Before any signal is blocked: an embedded server that is started here must hear them.
    url = server_url(settings)
    topology = Topology.from_torchrun()
    restart_count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    marker = CrashMarker(run_dir or folder_without_launcher(settings.home), restart_count, topology.rank)
    signals = Signals(on_stop=marker.mark_clean_exit)
    if run_dir is not None:
        rundir.write_pid(run_dir, topology.rank)
    log = JobLogHandler(topology.rank)
    start_logging(log_format, topology.rank, group, log.job_ids)
    logging.getLogger().addHandler(log)
    logging.getLogger("rq.worker").setLevel(logging.WARNING)
    try:
        _run(topology, signals, marker, settings, url, log, read(options), run_dir=run_dir, **options)
    except SvdqError as error:
        # Every rank fails the same way; the launcher shows the sentence once.
        if run_dir is not None:
            rundir.write_error(run_dir, error)
        elif log_format == "json":
            logger.critical("%s", error)
        else:
            click.echo(printable(f"Error: {error}"), err=True)  # noqa: TID251 - escaped here
        sys.exit(error.exit_code)


def _run(
    topology: Topology,
    signals: Signals,
    marker: CrashMarker,
    settings: Settings,
    url: str,
    log: JobLogHandler,
    compute: ComputeOptions,
    *,
    device: str,
    burst: bool,
    warmup: tuple[str, ...],
    trace: bool,
    run_dir: Path | None,
    checkpoints: str,
    until_s: float | None,
    ranks_per_gpu: int | None,
) -> None:
    if device == "auto" and run_dir is None and visible_gpus():
        device = "cuda"  # else ranks whose torch cannot use them would compute on the processors
    try:
        our_device = choose_device(device, topology.local_rank)
        check_computes(our_device, dtype_of(compute, our_device))
    except InputError as error:
        try_again(error, marker.restart_count)
    if our_device.type == "cpu":
        # Ranks share the cores, and one thread each gives the same bits on every machine.
        torch.set_num_threads(1)
    if compute.compiled != "off":
        compiling.prepare(settings.home, topology.local_num_ranks)
    check(compute, our_device)
    storage = Storage(settings.storage)
    parts = Part.of_rank(topology.rank, topology.num_ranks)
    dtype, limit = dtype_of(compute, our_device), settings.memory_limit
    opening_since = time.perf_counter()
    try:
        model = open_model(settings.model, parts, our_device, dtype, compute)
    except InputError as error:
        try_again(error, marker.restart_count)
    load_s = time.perf_counter() - opening_since
    if topology.local_rank == 0 and not topology.first:
        count_crash_here(url, marker)
    try:
        memory = _memory(topology, our_device, model.info, limit, ranks_per_gpu)
        rank_info = json.dumps(asdict(memory) | {"compute": model.info.compute})
        book = address_book(settings, on_one_host=topology.local_num_ranks == topology.num_ranks)
        links = join(
            topology, our_device, folder=private_folder(marker.folder / "ranks"), book=book, rank_info=rank_info
        )
    except InputError as error:
        try_again(error, marker.restart_count)
    except OSError as error:
        # A neighbour has ended meanwhile: as likely as not all were told to stop.
        lost(f"Cannot connect to the other ranks: {error}.", signals.stopping, marker)
        os._exit(0)
    check_alike(links.rank_info)
    # Before anything that has to be put away again: it refuses limits that nothing fits into.
    plan = plan_of(settings.home, model.info, links.rank_info, limit) if topology.first else None
    rank_reporter = RankReporter(describe(topology, our_device, model.info.name, load_s, model.info.notice), our_device)
    tracer = TimingTracer(topology.rank, rank_reporter.metrics, on=trace)
    monitor = ProgressMonitor(connect(url), model.info.notice, rank_reporter, log, marker)
    store = open_checkpoint_store(checkpoints, settings.home, storage)
    if store is not None:
        store = CountingCheckpointStore(store, rank_reporter.metrics)
    codec = Codec(model=model.info.name, device=our_device, compute=model.info.compute)
    checkpoint_writer = CheckpointWriter(store, codec) if store is not None else None
    result_writer = None
    if topology.last:
        fence = Fence(connect(url), signals.stopping)
        result_writer = ResultWriter(storage, model.info, tracer, fence=fence, mark=partial(marker.during, "write"))
    intake = None
    if topology.first:
        storage.sweep()
        _announce(topology, our_device, model.info, storage)
        options = IntakeOptions(
            burst=burst,
            max_pixels=settings.max_pixels,
            memory=plan,
            max_attempts=settings.max_attempts,
            until_s=until_s,
            # One computed, one received and one sent by each rank, and those that are being written.
            max_in_flight=3 * topology.num_ranks + 4,
            suspects=read_suspects(marker.folder, marker.restart_count),
            mark_prepare=partial(marker.during, "prepare"),
        )
        connection_health = ConnectionHealth(restarter(settings))
        connection = connect(url)
        wait_for(connection, connection_health)
        checkpoint_reader = CheckpointReader(store=store, codec=codec) if store is not None else None
        intake = Intake(
            connection, storage, model.info, options, checkpoint_reader, checkpoint_writer, connection_health
        )
    stage = build_stage(
        topology=topology,
        links=links,
        model=model,
        monitor=Watchdog(
            monitor,
            topology.rank,
            compiling.stall_s(settings.stall_s, compute),
            on_stall=lambda: stalled(monitor, marker),
        ),
        tracer=tracer,
        source=intake,
        sink=result_writer,
        on_lost=lambda reason: lost(reason, signals.stopping, marker),
        checkpointer=checkpoint_writer,
    )
    rank_reporter.waiting = [part for part in (intake, result_writer, checkpoint_writer) if part is not None]
    if intake is not None:
        rank_reporter.group = lambda: intake.status().model_copy(update={"costs": costs_in(stage.costs)})
    signals.attach(stage, intake)
    if plan is not None:
        _warm_up(stage, plan, warmup)
    if intake is not None:
        intake.start()
    if run_dir is not None and topology.local_rank == 0:
        rundir.write_ready(run_dir)
    stage.run()
    flush_until = time.monotonic() + FLUSH_S
    if stage.stopped and checkpoint_writer is not None:
        checkpoint_writer.flush(FLUSH_S)  # first: whoever takes our jobs next goes on from there
    if intake is not None:
        intake.close(return_to_queue=stage.stopped)
    if stage.stopped and result_writer is not None:
        result_writer.wait(flush_until - time.monotonic())
    monitor.close()
    if stage.stopped:
        # The neighbours stop wherever they are, too: there is nobody to say goodbye to.
        logging.shutdown()
        os._exit(0)
    if checkpoint_writer is not None and not checkpoint_writer.flush(FLUSH_S):
        logger.warning("The checkpoints of videos that are finished could not be removed; the next worker does that.")
    marker.mark_clean_exit()
    if trace and run_dir is not None:
        rundir.write_trace(run_dir, topology.rank, [*tracer.events(), usage_event(topology.rank)])


def _memory(
    topology: Topology, device: torch.device, info: ModelInfo, limit: int | None, ranks_per_gpu: int | None
) -> RankMemory:
    """Find what memory this rank has, once its model is loaded."""
    # svdq worker counts those of all groups; torchrun has one.
    sharing = ranks_per_gpu or gpus.ranks_per_gpu(torch.cuda.device_count(), topology.local_num_ranks)
    return RankMemory(
        capacity=capacity(device, limit, sharing),
        weights=info.weight_bytes,
        device=name_of(device),
        ranks_per_gpu=sharing,
    )


def _warm_up(stage: Stage, plan: MemoryPlan, shapes: Sequence[str]) -> None:
    """Have all ranks warm up for shapes, decoding in the chunks that are planned for them."""
    for shape in shapes:
        try:
            stage.warm_up_group(plan.admit(VideoParameters.of_shape(shape)))
        except DoesNotFitError as error:
            logger.warning("--warmup %s: %s", shape, error)


def _announce(topology: Topology, device: torch.device, info: ModelInfo, storage: Storage) -> None:
    ranks = "1 rank" if topology.num_ranks == 1 else f"{topology.num_ranks} ranks"
    notice = f": {info.notice}" if info.notice else ""
    logger.info("Ready with %s on %s, model %s%s.", ranks, device.type, info.name, notice)
    if info.name == "preview":
        logger.info("For diffusion set SVDQ_MODEL to a StableVideoDiffusionPipeline folder or hub id.")
    logger.info("Videos go to %s.", storage.location("outputs"))


if __name__ == "__main__":
    main()
