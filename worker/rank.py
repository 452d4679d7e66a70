"""One rank of a group: composes model, links, stage and the threads beside the stage, and ends them in order."""

import contextlib
import logging
import os
import threading
from functools import partial

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.loop.protocols import Checkpointer, Surroundings
from svdq.pipeline.loop.stage import Stage
from svdq.pipeline.models.families import parameters_of
from svdq.pipeline.models.video_model import VideoModel
from svdq.pipeline.planning.rounds import MOST_VIDEOS
from svdq.pipeline.trace import Tracer, span_events, usage_event
from svdq.producer import keys
from svdq.producer.queue import server_url
from svdq.producer.status.ranks import RoundPlace
from svdq.producer.storage.storage import Storage
from svdq.producer.text import count
from svdq.worker import run_folder
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.checkpoint.store import Codec, open_checkpoint_store
from svdq.worker.health.pictures import Pictures
from svdq.worker.health.progress import ProgressMonitor
from svdq.worker.health.rank_status import RankReporter, describe
from svdq.worker.health.watchdog import Watchdog
from svdq.worker.intake.memory_plan import DoesNotFitError, MemoryPlan, plan_of
from svdq.worker.intake.prefetcher import IntakeOptions
from svdq.worker.intake.source import Intake
from svdq.worker.outages import LEASE_TIMEOUT_S, NUM_LEASE_RETRIES, ConnectionHealth, connect, wait_for
from svdq.worker.output.writer import ResultWriter, is_held
from svdq.worker.queue.crashes import MAX_WRITERS, CrashMarker, read_suspects
from svdq.worker.run_folder import free_host_bytes
from svdq.worker.startup import (
    COMPILE_S,
    FINISHING,
    HANDING_BACK,
    LoadedModel,
    RankProcess,
    exit_without_neighbor,
    loras_for,
    start,
)

logger = logging.getLogger("svdq.worker")

STATES_SHARE, LEAST_STATES_BYTES = 0.1, 500_000_000  # share of free host memory for waiting videos, and its least
FLUSH_S = 6.0  # that a rank which ends waits for its checkpoints, and again for its videos


def run_rank(process: RankProcess) -> None:
    """Run a rank until no more jobs come or SIGTERM, which ends its process with 0 after a step; raises SvdqError."""
    config, settings = process.run.rank, process.run.settings
    topology, marker, url = process.topology, process.marker, server_url(settings)
    stopping = process.signals.stopping
    handing_back = threading.Event()  # set when jobs in flight go back to the queue although the rank was not stopped
    closing = threading.Lock()
    loaded, links, ranks = start(process)
    info = loaded.model.info
    plan = plan_of(info, ranks, settings.memory_limit, must_fit=bool(config.failed_gpus)) if topology.first else None
    storage = Storage(settings.storage)

    # Both ways of ending close this stack, last entry first. A crash does not: the next process takes over its jobs.
    ending = contextlib.ExitStack()
    family = info.family.name if info.family is not None else ""
    loras = tuple(f"{lora['file']} x {lora['strength']:g}" for lora in info.made_of.get("loras", ()))
    about_model = {"loras": loras, "defaults": info.facts.get("defaults", {})}
    about_model["takes_last_photo"] = info.family is None or info.family.takes_last_photo(info.facts)
    description = describe(topology, loaded.device, info.name, info.notice, family, **about_model)
    reporter = RankReporter(description, loaded.device)
    tracer = Tracer(on=config.record_trace)
    ending.callback(marker.mark_clean_exit)
    checkpoints = None
    if (store := open_checkpoint_store(config.checkpoints, settings.home, storage)) is not None:
        checkpoints = Checkpoints(
            store, Codec(model=info.identity or info.name, device=loaded.device, compute=info.compute)
        )
        ending.callback(_remove_checkpoints, checkpoints)
    ending.callback(_exit_if_stopped, stopping)
    ending.callback(_write_trace, process, tracer)
    pictures = Pictures(connect(url), description.group)
    ending.callback(pictures.close)
    monitor = ProgressMonitor(connect(url), reporter, process.log, marker, pictures)
    ending.callback(monitor.close)
    result_writer = intake = None
    if topology.last:
        held = partial(is_held, connect(url), stopping)
        result_writer = ResultWriter(
            storage, info, tracer, is_held=held, mark=partial(marker.during, "write"), num_writers=num_writers()
        )
        ending.callback(result_writer.wait, FLUSH_S)
    if plan is not None:
        intake = _make_intake(process, loaded, storage, plan, checkpoints)
        ending.callback(lambda intake: intake.close(return_to_queue=stopping.is_set() or handing_back.is_set()), intake)
    if checkpoints is not None:
        # Before jobs return to the queue: whoever takes them next continues from these checkpoints.
        ending.callback(checkpoints.flush, FLUSH_S)

    # The first step of a shape compiles.
    stall_s = settings.stall_s if config.compile == "off" else max(settings.stall_s, COMPILE_S)
    surroundings = Surroundings(
        on_lost=partial(exit_without_neighbor, stopping=stopping, marker=marker),
        source=intake,
        sink=result_writer,
        monitor=Watchdog(monitor, topology.rank, stall_s, on_stall=partial(_exit_after_stall, monitor, marker)),
        checkpointer=checkpoints or Checkpointer(),
        tracer=tracer,
    )
    components = [rank.components for rank in ranks]
    in_rounds = bool(loaded.model.sets)
    stage = Stage(
        topology,
        links,
        loaded.model,
        surroundings,
        device=loaded.device,
        components=components,
        most_bytes=max(free_host_bytes() * STATES_SHARE, LEAST_STATES_BYTES),
        num_groups=config.num_groups,
        upscaler=loaded.upscaler,
    )
    reporter.waiting = [part for part in (intake, result_writer, checkpoints) if part is not None]
    if intake is not None:
        reporter.group = lambda: intake.status().model_copy(
            update={
                "costs": tuple(stage.costs.measured()),
                "failed_gpus": config.failed_gpus,
                "places": {job_id: RoundPlace(**vars(outlook)) for job_id, outlook in stage.outlook().items()},
            }
            | ({"round_size": stage.rounds.size, "pace_s": stage.rounds.pace_s} if stage.rounds is not None else {})
        )

    def end() -> None:
        with closing:
            ending.close()

    def stop() -> None:
        stage.stop()
        if intake is not None:
            intake.stop()
        if stage.is_loading:
            end()  # the process ends here: a load may take longer than a worker has to stop

    def hand_back() -> None:
        assert intake is not None
        handing_back.set()
        stage.end_after_leg()
        intake.stop()

    drain = None if intake is None else hand_back if in_rounds else intake.drain
    process.signals.attach(stop, drain, HANDING_BACK if in_rounds else FINISHING)
    if intake is not None and plan is not None:
        _warm_up(stage, plan, process, loaded.model)
        intake.start()
        if process.run_dir is not None:
            run_folder.write_ready(process.run_dir)
    try:
        stage.run()
    except SvdqError:
        # Components could not be loaded, which is no fault of the jobs.
        handing_back.set()
        end()
        raise
    end()


def _make_intake(
    process: RankProcess,
    loaded: LoadedModel,
    storage: Storage,
    plan: MemoryPlan,
    checkpoints: Checkpoints | None,
) -> Intake:
    run, marker, info = process.run, process.marker, loaded.model.info
    num_ranks = process.topology.num_ranks
    storage.sweep()
    notice = f": {info.notice}" if info.notice else ""
    logger.info("Ready with %s on %s, model %s%s.", count(num_ranks, "rank"), loaded.device.type, info.name, notice)
    if info.name == "preview":
        logger.info("For diffusion set SVDQ_MODEL to the folder or hub id of a model: SVD, Wan or LTX-2.")
    logger.info("Videos go to %s.", storage.location("outputs"))
    if run.settings.loras is not None and loras_for(run).folder is None:
        logger.warning(
            "Jobs with LoRAs wait: leave out --compile, --approximate and --weights made, which fix weights."
        )
    options = IntakeOptions(
        burst=run.rank.burst,
        max_pixels=run.settings.max_pixels,
        complete=loaded.model.complete,
        embed=loaded.model.embed,
        loras=loras_for(run),
        upscales=run.settings.upscaler is not None,
        memory=plan,
        max_attempts=run.settings.max_attempts,
        # One computed, one received and one sent by each rank, and those that are being written.
        # In rounds, those of one that is decoded and of the next.
        max_in_flight=(2 * MOST_VIDEOS if loaded.model.sets else 3 * num_ranks + 2) + num_writers(),
        suspects=read_suspects(marker.folder, marker.restart_count),
        mark_prepare=partial(marker.during, "prepare"),
    )
    connection, connection_health = connect(server_url(run.settings)), ConnectionHealth(run.settings)
    wait_for(connection, connection_health)
    if run.settings.fair:
        connection.delete(keys.UNFAIR)
    else:
        connection.set(keys.UNFAIR, 1)
    lease_connection = connect(server_url(run.settings), LEASE_TIMEOUT_S, NUM_LEASE_RETRIES)
    return Intake(connection, storage, info, options, checkpoints, connection_health, lease_connection)


def _warm_up(stage: Stage, plan: MemoryPlan, process: RankProcess, model: VideoModel) -> None:
    for shape in process.run.rank.warmup:
        try:
            stage.warm_up_group(plan.admit(model.complete(parameters_of(process.run.model).of_shape(shape))))
        except (DoesNotFitError, InputError) as error:
            logger.warning("--warmup %s: %s", shape, error)


def num_writers() -> int:
    """Return how many videos to write at once, each on one core: the last ones of a burst end together."""
    return max(2, min(MAX_WRITERS, (os.cpu_count() or 1) // 2))


# What ends a rank, besides the methods of its parts.


def _exit_if_stopped(stopping: threading.Event) -> None:
    """End the process if it was stopped: the neighbors stop wherever they are, so no link is closed in order."""
    if stopping.is_set():
        logging.shutdown()
        os._exit(0)


def _exit_after_stall(monitor: ProgressMonitor, marker: CrashMarker) -> None:
    """End the process because its step does not end; the restarted group counts this for the job."""
    marker.mark_stalled()
    monitor.close()
    os._exit(1)


def _remove_checkpoints(checkpoints: Checkpoints) -> None:
    if not checkpoints.flush(FLUSH_S):
        logger.warning("The checkpoints of videos that are finished could not be removed; the next worker does that.")


def _write_trace(process: RankProcess, tracer: Tracer) -> None:
    if tracer.on and process.run_dir is not None:
        rank = process.topology.rank
        run_folder.write_trace(process.run_dir, rank, [*span_events(rank, tracer.spans), usage_event(rank)])
