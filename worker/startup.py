"""Starts one rank: handles its signals, loads its parts of the model and connects it to its neighbors."""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from pydantic import TypeAdapter

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.loader import dtype_for, open_model
from svdq.pipeline.models.lora_folder import KEPT_BYTES as KEPT_LORA_BYTES
from svdq.pipeline.models.lora_folder import NO_LORAS, LoraFolder
from svdq.pipeline.models.upscaler import Upscaler
from svdq.pipeline.models.upscaler_file import find_upscaler
from svdq.pipeline.models.video_model import Role, VideoModel
from svdq.pipeline.planning.binding import Components
from svdq.pipeline.transport.topology import Links, Topology, agree, join
from svdq.producer.files import private_folder
from svdq.worker.config import RunConfig, can_stream, check_ranks, free_host_bytes
from svdq.worker.device import capacity, check_computes, choose_device, name_of, uuid_of
from svdq.worker.health.rank_log import JobLogHandler
from svdq.worker.launcher.gpus import ranks_per_gpu, visible_gpus
from svdq.worker.memory_plan import RankInfo
from svdq.worker.queue.crashes import CrashMarker
from svdq.worker.roles import Experts, PhaseWeights, choose_native, choose_weights

logger = logging.getLogger(__name__)

COMPILE_S = 3 * 60 * 60.0  # seconds that compiling for a shape may take before a rank counts as stalled
STOP_HEARD_S = 1.0  # seconds after the end of a neighbor in which the signal that ended it may still arrive here

#: What a SIGINT does with the videos in flight, on ranks that hold all that these need, and in rounds.
FINISHING = "those in flight are finished first."
HANDING_BACK = "the present steps of one are finished first, and all others continue from there later."

_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_T = TypeVar("_T")
_OF_ALL: TypeAdapter[list[Components]] = TypeAdapter(list[Components])


class Signals:
    """SIGINT takes no more jobs, SIGTERM stops after the current step.

    Both are blocked in every thread, and one thread waits for them: Python's own handlers run only between two
    bytecodes of the main thread, so they would wait for the end of a step. Create it before any other thread.
    """

    def __init__(self, on_stop: Callable[[], object]) -> None:
        """Block the signals and start the thread; SIGTERM calls `on_stop` at once, before anything is stopped."""
        self._on_stop = on_stop
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self.stopping = threading.Event()
        self._is_draining = False
        self._stop: Callable[[], object] | None = None
        self._drain: Callable[[], object] | None = None
        self._notice = FINISHING
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def attach(self, stop: Callable[[], object], drain: Callable[[], object] | None, notice: str = FINISHING) -> None:
        """Set what the signals call from now on; a SIGINT that came before is handled now.

        `stop` makes the rank stop after the current step; `drain` makes the group take no more jobs, and `notice` says
        what becomes of those in flight: rank 0 has them.
        """
        with self._lock:
            self._stop, self._drain, self._notice = stop, drain, notice
            if self._is_draining and drain is not None:
                drain()

    def _run(self) -> None:
        while True:
            number = signal.sigwait(_SIGNALS)
            with self._lock:
                if number == signal.SIGTERM:
                    self.stopping.set()
                    self._on_stop()
                    if self._stop is None:
                        os._exit(0)  # the rank holds no jobs yet
                    self._stop()
                    continue
                self._is_draining = True
                if self._drain is not None:
                    logger.info("Taking no more jobs; %s Ctrl-C again stops now.", self._notice)
                    self._drain()


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A process that is to run a rank."""

    run: RunConfig
    topology: Topology
    signals: Signals
    marker: CrashMarker
    log: JobLogHandler
    run_dir: Path | None  # the folder shared with the launcher; None under a plain torchrun


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """The model parts of one rank, and where they are."""

    model: VideoModel
    device: torch.device
    info: RankInfo
    upscaler: Upscaler | None  # on a rank that decodes, if the settings name one


def start(process: RankProcess) -> tuple[LoadedModel, Links, list[RankInfo]]:
    """Load a rank's parts of the model and connect it to its neighbors; rank 0 gets what all ranks report."""
    loaded = _load_model(process)
    info = loaded.info.model_dump_json()
    links = _with_others(process, lambda folder: join(process.topology, loaded.device, rank_info=info, folder=folder))
    ranks = [RankInfo.model_validate_json(text) for text in links.rank_info]
    check_alike(ranks)
    return loaded, links, ranks


def _load_model(process: RankProcess) -> LoadedModel:
    config, settings, topology, resolved = process.run.rank, process.run.settings, process.topology, process.run.model
    gpus = visible_gpus() if process.run_dir is None else []  # else the launcher has looked
    # Ranks whose torch cannot use the GPUs would compute on the processors.
    device = choose_device("cuda" if config.device == "auto" and gpus else config.device, topology.rank)
    compute = config.compute
    dtype = dtype_for(resolved, device, compute)
    check_computes(device, dtype, compute)
    check_ranks(config, resolved, topology.num_ranks, on_gpus=device.type == "cuda")  # for ranks without a launcher
    if device.type == "cpu":
        # Ranks share the cores, and one thread each gives the same bits on every machine.
        torch.set_num_threads(1)
    if config.compile != "off":
        prepare_compiling(settings.home, topology.num_ranks)
    sharing = config.ranks_per_gpu or ranks_per_gpu(len(gpus), topology.num_ranks)
    loras = loras_for(process.run)
    for_loras = KEPT_LORA_BYTES if device.type == "cuda" and loras.folder is not None else 0

    upscaler_file = find_upscaler(settings.upscaler, settings.loras) if settings.upscaler is not None else None
    # Its frames take tiles that suit the memory that is free while nothing else is computed.
    for_upscaler = upscaler_file.stat().st_size if upscaler_file is not None else 0

    def granted() -> int | None:
        found = capacity(device, settings.memory_limit, sharing)
        return found if found is None else max(0, found - for_loras - for_upscaler)

    compute = replace(compute, native=choose_native(resolved, compute, device))
    role, phase_weights = _choose_role(process, device, granted, dtype)
    how = choose_weights(
        resolved, compute, dtype, role, granted(), topology, device, for_loras=loras.folder is not None
    )
    compute = replace(compute, weights=how)
    num_threads = torch.get_num_threads()
    if device.type != "cpu":
        # torchrun starts ranks with one thread; weights are converted with this rank's share of the cores.
        torch.set_num_threads(max(num_threads, (os.cpu_count() or 1) // topology.num_ranks))
    model = open_model(resolved, role, device, dtype, compute, loras)
    num_bytes = granted()
    if num_bytes is not None and model.info.weight_bytes > num_bytes and topology.num_ranks > 1:
        # There is no room for the encoders, which rank 0 has in any case, or the decoder, which the last one has.
        role = replace(role, encode=topology.first, decode=topology.last)
        del model
        model = open_model(resolved, role, device, dtype, compute, loras)
    upscaler = Upscaler(upscaler_file, device) if role.decode and upscaler_file is not None else None
    torch.set_num_threads(num_threads)
    streamed = model.info.streamed_bytes if phase_weights is None else phase_weights.streamed
    info = RankInfo(
        capacity=num_bytes,
        weights=max([model.info.weight_bytes, *(phase_weights.by_phase.values() if phase_weights else ())]),
        phase_weights=phase_weights.by_phase if phase_weights else {},
        streamed_weights=streamed if can_stream(resolved) and compute.offload == "off" else None,
        device=name_of(device),
        gpu=uuid_of(device),
        ranks_per_gpu=sharing,
        encodes=role.encode,
        decodes=role.decode,
        components=role.components,
        compute=model.info.compute,
    )
    return LoadedModel(model=model, device=device, info=info, upscaler=upscaler)


def loras_for(run: RunConfig) -> LoraFolder:
    """Return the LoRAs that jobs may choose: none where the weights that they change are not there to be changed."""
    return LoraFolder(run.settings.loras) if run.rank.compute.may_keep else NO_LORAS


def _choose_role(
    process: RankProcess, device: torch.device, granted: Callable[[], int | None], dtype: torch.dtype
) -> tuple[Role, PhaseWeights | None]:
    """Return the role of this rank, and what it holds in each phase if that changes; waits for other ranks."""
    config, topology = process.run.rank, process.topology
    role = Role.of_rank(topology.rank)
    if (experts := Experts.of(process.run.model, config.compute, dtype, device)) is None:
        return role, None
    host_bytes = free_host_bytes() if config.host_memory is None else config.host_memory
    if topology.num_ranks > 1 and experts.are_several:

        def decide(rank_info: Sequence[str]) -> str:
            capacities = [json.loads(capacity) for capacity in rank_info]
            return _OF_ALL.dump_json(experts.assign(capacities, config.experts)).decode()

        decided = _with_others(process, lambda folder: agree(topology, json.dumps(granted()), decide, folder=folder))
        role = replace(role, components=_OF_ALL.validate_json(decided)[topology.rank])
    elif topology.num_ranks == 1 and (held := experts.in_rounds(granted(), config.experts)) is not None:
        return replace(role, in_rounds=True, host_bytes=host_bytes), held
    if not topology.first:
        return role, None
    leaves, weights = experts.leaves(granted(), role.components, topology.num_ranks)
    return replace(role, leaves=leaves, host_bytes=host_bytes), weights


def _with_others(process: RankProcess, meet: Callable[[Path], _T]) -> _T:
    """Call `meet` with where the ranks find each other; the process ends here if the others have ended."""
    marker = process.marker
    try:
        return meet(private_folder(marker.folder / "ranks"))
    except OSError as error:
        # A neighbor has ended meanwhile, probably because all ranks were stopped.
        exit_without_neighbor(f"Cannot connect to the other ranks: {error}.", process.signals.stopping, marker)
        os._exit(0)


def exit_without_neighbor(reason: str, stopping: threading.Event, marker: CrashMarker) -> None:
    """End the process because a neighbor has ended: torchrun restarts the group, and its jobs are taken again."""
    marker.mark_clean_exit()
    # All ranks get the signal to stop at once, but it may reach a neighbor first.
    if not stopping.wait(STOP_HEARD_S):
        logger.error("%s", reason)
        os._exit(1)


def prepare_compiling(home: Path, num_ranks: int) -> None:
    """Make torch store compiled code in a folder of the home; must run before its compiler is imported."""
    folder = home / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # ranks execute what is there
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # By default each rank starts a compiling process for every core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))


def check_alike(ranks: Sequence[RankInfo]) -> None:
    """Raise an InputError if ranks compute differently, on GPUs that differ: frames would depend on their shares."""
    for rank, info in enumerate(ranks):
        if info.compute != ranks[0].compute:
            first, other = (json.dumps(each.compute) for each in (ranks[0], info))
            raise InputError(
                f"The ranks compute differently (rank 0: {first}, rank {rank}: {other}); "
                "name a --dtype that all of its GPUs have."
            )
