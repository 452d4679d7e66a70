"""One rank of a group: composes model, links, stage and the threads beside the stage, and ends them in order."""

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from functools import partial

import redis

from svdq.pipeline.errors import InputError, SvdqError
from svdq.pipeline.loop.protocols import Checkpointer, Surroundings
from svdq.pipeline.loop.stage import Stage
from svdq.pipeline.models.compute.memory import CONTEXT_BYTES, RESERVE_BYTES, WORKSPACE_BYTES, size_text
from svdq.pipeline.models.families import FAMILIES, parameters_of
from svdq.pipeline.planning.rounds import MOST_VIDEOS
from svdq.pipeline.trace import Tracer, span_events, usage_event
from svdq.pipeline.transport.topology import Links
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer import keys
from svdq.producer.connection import server_url
from svdq.producer.status.ranks import IntakeStatus
from svdq.producer.storage.storage import Storage
from svdq.producer.text import count
from svdq.worker import run_folder
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.checkpoint.store import Codec, open_checkpoint_store
from svdq.worker.config import free_host_bytes
from svdq.worker.device import bytes_in_reach
from svdq.worker.health.pictures import Pictures
from svdq.worker.health.progress import ProgressMonitor
from svdq.worker.health.rank_status import RankReporter, describe
from svdq.worker.health.watchdog import Watchdog
from svdq.worker.intake.prefetcher import IntakeOptions
from svdq.worker.intake.source import Intake
from svdq.worker.launcher.gpu_users import LEAST_BYTES
from svdq.worker.memory_plan import DoesNotFitError, MemoryPlan, RankInfo, plan_of
from svdq.worker.outages import LEASE_TIMEOUT_S, NUM_LEASE_RETRIES, ConnectionHealth, connect, wait_for
from svdq.worker.output.content_credentials import ContentCredentials
from svdq.worker.output.writer import ResultWriter, is_held
from svdq.worker.queue.crashes import MAX_WRITERS, CrashMarker, read_suspects
from svdq.worker.startup import (
    COMPILE_S,
    FINISHING,
    HANDING_BACK,
    RankProcess,
    exit_without_neighbor,
    loras_for,
    start,
)

logger = logging.getLogger("svdq.worker")

STATES_SHARE, LEAST_STATES_BYTES = 0.1, 500_000_000  # share of free host memory for waiting videos, and its least
FLUSH_S = 6.0  # that a rank which ends waits for its checkpoints, and again for its videos


class Rank:
    """The parts of a rank, built in the order of `__init__`, and ended in the reverse order: see `_ending`."""

    def __init__(self, process: RankProcess) -> None:
        self._process = process
        settings, topology, marker = process.run.settings, process.topology, process.marker
        self._loaded, links, ranks = start(process)
        loaded, info = self._loaded, self._loaded.model.info
        self._room = bytes_in_reach(loaded.device)  # of its GPU
        self._in_rounds = bool(loaded.model.sets)
        # Set when jobs in flight go back to the queue although the rank was not stopped.
        self._handing_back = threading.Event()

        # Both ways of ending close this stack, last entry first. A crash does not: the next process takes over its
        # jobs.
        self._ending, self._closing = contextlib.ExitStack(), threading.Lock()
        self._ending.callback(marker.mark_clean_exit)
        self._plan: MemoryPlan | None = None
        if topology.first:
            must_fit = bool(process.run.rank.failed_gpus)
            self._plan = plan_of(info, ranks, settings.memory_limit, must_fit=must_fit)
        self._storage = Storage(settings.storage)
        self._codec = Codec(model=info.identity or info.name, device=loaded.device, compute=info.compute)
        self._checkpoints = self._open_checkpoints()
        self._ending.callback(_exit_if_stopped, process.signals.stopping)
        self._tracer = Tracer(on=process.run.rank.record_trace)
        self._ending.callback(_write_trace, process, self._tracer)
        self._ending.callback(self._leave_record)
        description = describe(topology, loaded.device, info)
        self._reporter = RankReporter(description, loaded.device)
        self._pictures = Pictures(self._connect(), description.group)
        self._ending.callback(self._pictures.close)
        self._monitor = ProgressMonitor(self._connect(), self._reporter, process.log, marker, self._pictures)
        self._ending.callback(self._monitor.close)
        self._writer = self._open_writer() if topology.last else None
        self._intake = self._open_intake(self._plan) if self._plan is not None else None
        if self._checkpoints is not None:
            # Before jobs return to the queue, since their next worker continues from these checkpoints.
            self._ending.callback(self._checkpoints.flush, FLUSH_S)
        self._stage = self._make_stage(links, ranks)
        self._reporter.waiting = [part for part in (self._intake, self._writer, self._checkpoints) if part is not None]
        if self._writer is not None:
            self._reporter.write_pace = self._writer.pace
        if self._intake is not None:
            self._reporter.group = partial(self._group_status, self._intake)

    def run(self) -> None:
        """Work until no more jobs come or SIGTERM, which ends the process with 0 after a step; raises SvdqError."""
        process = self._process
        drain = None if self._intake is None else self._hand_back if self._in_rounds else self._intake.drain
        process.signals.attach(self._stop, drain, HANDING_BACK if self._in_rounds else FINISHING)
        if self._intake is not None:
            self._warm_up()
            self._intake.start()
            if process.run_dir is not None:
                run_folder.write_ready(process.run_dir, process.marker.restart_count)
        try:
            self._stage.run()
        except SvdqError:
            # Components could not be loaded, which is no fault of the jobs.
            self._handing_back.set()
            self._end()
            raise
        self._end()

    def _stop(self) -> None:
        self._stage.stop()
        if self._intake is not None:
            self._intake.stop()
        if self._stage.is_loading:
            self._end()  # the process ends here: a load may take longer than a worker has to stop

    def _hand_back(self) -> None:
        assert self._intake is not None
        self._handing_back.set()
        self._stage.end_after_leg()
        self._intake.stop()

    def _end(self) -> None:
        with self._closing:
            self._ending.close()

    def _connect(self) -> redis.Redis:
        return connect(server_url(self._process.run.settings))

    def _open_checkpoints(self) -> Checkpoints | None:
        run = self._process.run
        store = open_checkpoint_store(run.rank.checkpoints, run.settings.home, self._storage)
        if store is None:
            return None
        checkpoints = Checkpoints(store, self._codec)
        self._ending.callback(_remove_checkpoints, checkpoints)
        return checkpoints

    def _open_writer(self) -> ResultWriter:
        process = self._process
        writer = ResultWriter(
            self._storage,
            self._loaded.model.info,
            self._tracer,
            is_held=partial(is_held, self._connect(), process.signals.stopping),
            mark=partial(process.marker.during, "write"),
            num_writers=num_writers(),
            codec=self._codec if process.run.settings.keep_latents else None,
            marks_files=process.run.settings.mark,
            credentials=ContentCredentials.of(process.run.settings),
        )
        self._ending.callback(writer.wait, FLUSH_S)
        return writer

    def _open_intake(self, plan: MemoryPlan) -> Intake:
        process, loaded = self._process, self._loaded
        run, marker, info = process.run, process.marker, loaded.model.info
        num_ranks = process.topology.num_ranks
        self._storage.sweep()
        notice = f": {info.notice}" if info.notice else ""
        logger.info("Ready with %s on %s, model %s%s.", count(num_ranks, "rank"), loaded.device.type, info.name, notice)
        if info.name == "preview":
            families = ", ".join(family.parameters.title for family in FAMILIES)
            logger.info("For diffusion set SVDQ_MODEL to the folder or hub id of a model of %s.", families)
        logger.info("Videos go to %s.", self._storage.location("outputs"))
        try:
            if info.known is not None:
                plan.admit(info.known.usual)
        except DoesNotFitError as error:
            logger.warning("The usual video of this model will be refused: %s `svdq plan` lists what fits.", error)
        if run.settings.loras is not None and loras_for(run).folder is None:
            logger.warning("Jobs with LoRAs wait: leave out --compile and --weights made, which fix weights.")
        options = IntakeOptions(
            burst=run.rank.burst,
            idle_s=run.settings.on_demand_s,
            max_pixels=run.settings.max_pixels,
            complete=loaded.model.complete,
            embed=loaded.model.embed,
            loras=loras_for(run),
            wait_for_able=run.settings.wait_for_able,
            upscales=run.settings.upscaler is not None,
            codec=self._codec,
            memory=plan,
            max_attempts=run.settings.max_attempts,
            # One computed, one received and one sent by each rank, and those that are being written.
            # In rounds, one that is decoded and the next.
            max_in_flight=(2 * MOST_VIDEOS if self._in_rounds else 3 * num_ranks + 2) + num_writers(),
            suspects=read_suspects(marker.folder, marker.restart_count),
            mark_prepare=partial(marker.during, "prepare"),
        )
        connection, connection_health = self._connect(), ConnectionHealth(run.settings)
        wait_for(connection, connection_health)
        if run.settings.fair:
            connection.delete(keys.UNFAIR)
        else:
            connection.set(keys.UNFAIR, 1)
        lease_connection = connect(server_url(run.settings), LEASE_TIMEOUT_S, NUM_LEASE_RETRIES)
        intake = Intake(
            connection, self._storage, info, options, self._checkpoints, connection_health, lease_connection
        )
        self._ending.callback(
            lambda: intake.close(return_to_queue=process.signals.stopping.is_set() or self._handing_back.is_set())
        )
        return intake

    def _make_stage(self, links: Links, ranks: Sequence[RankInfo]) -> Stage:
        process, loaded, monitor = self._process, self._loaded, self._monitor
        config, settings, topology, marker = process.run.rank, process.run.settings, process.topology, process.marker
        # The first step of a shape compiles.
        stall_s = settings.stall_s if config.compile == "off" else max(settings.stall_s, COMPILE_S)
        surroundings = Surroundings(
            on_lost=partial(exit_without_neighbor, stopping=process.signals.stopping, marker=marker),
            source=self._intake,
            sink=self._writer,
            monitor=Watchdog(monitor, topology.rank, stall_s, on_stall=partial(_exit_after_stall, monitor, marker)),
            checkpointer=self._checkpoints or Checkpointer(),
            tracer=self._tracer,
            gives_way=self._gives_way,
        )
        return Stage(
            topology,
            links,
            loaded.model,
            surroundings,
            device=loaded.device,
            components=[rank.components for rank in ranks],
            most_bytes=max(free_host_bytes() * STATES_SHARE, LEAST_STATES_BYTES),
            num_groups=config.num_groups,
            upscaler=loaded.upscaler,
            keep_latents=settings.keep_latents,
        )

    def _leave_record(self) -> None:
        """Leave what the launcher needs while the ranks of its group rest."""
        if (folder := self._process.run_dir) is None:
            return
        run_folder.write_record(
            folder, self._process.topology.rank, self._reporter.gather(None, None, None).model_dump_json()
        )
        if self._intake is not None and (queues := self._intake.idled) is not None:
            run_folder.write_idle(folder, queues)

    def _gives_way(self, parameters: VideoParameters) -> bool:
        """Ask the launcher to end this group if another program has taken memory of its GPU, and say whether it has."""
        folder, loaded = self._process.run_dir, self._loaded
        if folder is None or not self._process.run.settings.wait_for_gpu or loaded.info.ranks_per_gpu > 1:
            return False
        in_reach = bytes_in_reach(loaded.device)
        if self._room is None or in_reach is None or self._room - in_reach < LEAST_BYTES:
            return False
        need, info = self._room, loaded.model.info
        if info.known is not None:
            plan = MemoryPlan(
                [loaded.info], str(info.compute.get("dtype", "float32")), info.known, workspace=WORKSPACE_BYTES
            )
            need = min(need, plan.need(0, parameters) + CONTEXT_BYTES + RESERVE_BYTES)
        taken = size_text(self._room - in_reach)
        logger.warning(
            "Another program has taken %s of this GPU: the jobs go back to the queue until it is free.", taken
        )
        run_folder.write_crowded(folder, need)
        return True

    def _group_status(self, intake: Intake) -> IntakeStatus:
        stage = self._stage
        of_stage: dict[str, object] = {
            "costs": tuple(stage.costs.measured()),
            "upscales": tuple(stage.costs.upscales()),
            "keeps_latents": self._process.run.settings.keep_latents,
            "failed_gpus": self._process.run.rank.failed_gpus,
            "places": stage.outlook(),
        }
        if stage.rounds is not None:
            of_stage |= {"round_size": stage.rounds.size, "pace_s": stage.rounds.pace_s}
        return intake.status().model_copy(update=of_stage)

    def _warm_up(self) -> None:
        assert self._plan is not None
        run, model = self._process.run, self._loaded.model
        for shape in run.rank.warmup:
            try:
                self._stage.warm_up_group(self._plan.admit(model.complete(parameters_of(run.model).of_shape(shape))))
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
