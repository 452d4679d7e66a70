"""One group of ranks: decides when its torchrun starts, rests or leaves GPUs out. Does not import torch.

torchrun restarts the group when a rank dies. The ranks then wait until the launcher has tested their GPUs; if one has
failed, a new torchrun starts fewer ranks.
"""

import contextlib
import logging
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from svdq.pipeline.errors import NoRoomError, SvdqError, UnavailableError
from svdq.producer.status.ranks import Condition, Rest
from svdq.producer.text import count
from svdq.worker import run_folder
from svdq.worker.config import RunConfig
from svdq.worker.launcher.gpu_watch import AGAIN_S, GpuProbes, MemoryWatch
from svdq.worker.launcher.gpus import title
from svdq.worker.launcher.torchrun import Torchrun

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # one after the other, without a group that was ready for jobs between
STOP_START_S = 3.0  # seconds to stop a group that starts
FREE_S = 10.0  # seconds that a group gets to end its present step when its GPUs are to be free


class GroupProcess:
    """The ranks of a group, which may rest, and their torchrun while they run."""

    def __init__(
        self,
        num_ranks: int,
        folder: Path,
        config: RunConfig,
        devices: Sequence[str] | None,
        refreshed: Callable[[RunConfig], RunConfig] = lambda config: config,
        *,
        is_freed: bool = False,
        need: int = 0,
    ) -> None:
        """Start it, unless its GPUs are `is_freed` or lack memory, with run folders in a new `folder`.

        `devices` is as in CUDA_VISIBLE_DEVICES, or None: inherited. `refreshed` brings a configuration up to date for
        ranks that start later. `need` is the free bytes of a GPU that a rank waits for while another program holds
        them; 0: it does not wait.
        """
        self._folder = folder
        self._config = config
        self._refreshed = refreshed
        self.num_ranks = num_ranks
        self._devices = None if devices is None else list(devices)
        self._tested = 0  # the restart for which GPUs were tested last
        self._probes = GpuProbes(self._devices or (), self.running_pids)
        self._seen_restarts = 0
        self._failed_starts = 0
        self._last_signal: signal.Signals | None = None
        self._num_starts = 0
        #: Why it has no ranks that are ready, while its launcher writes their records; None: they do.
        self.rest: Rest | None = None
        self.is_wanted = False  # set by another thread when it is to start its ranks again
        self.is_freed = is_freed  # set by another thread while it is to have no ranks
        self._freed_at: float | None = None  # when it began to end its ranks for that
        self._memory = MemoryWatch(self._devices or (), need, config.rank.ranks_per_gpu or 1)
        #: While it has no ranks for lack of memory: which GPU lacks it and who holds it, a clause; "" if not known.
        self._lack = ""
        self._torchrun: Torchrun | None = None  # the present or last one; None before its first start
        folder.mkdir()
        if is_freed:
            self.rest = Rest(reason="freed", since=time.time())
        elif self._memory.look():
            self.rest = Rest(reason="held", since=time.time())
        else:
            self._start()

    def device_of(self, rank: int) -> str:
        """Return the device of a rank as its own record names it: cpu, or cuda and the number of the GPU."""
        return f"cuda:{rank % len(self._devices)}" if self._devices else "cpu"

    @property
    def num_failed_gpus(self) -> int:
        """Number of GPUs that are left out because they failed."""
        return len(self._config.rank.failed_gpus)

    @property
    def run_dir(self) -> Path:
        """The run folder of its present or last ranks."""
        return self._folder if self._torchrun is None else self._torchrun.run_dir

    def _start(self) -> None:
        run_dir = self._folder / str(self._num_starts)  # torchrun cannot use the rendezvous of another one
        was_ready = self.rest is not None and self.rest.start_s is not None
        self._num_starts += 1
        self._tested = self._seen_restarts = self._failed_starts = 0
        self._torchrun = Torchrun(run_dir, self._config, self.num_ranks, self._devices, was_ready=was_ready)

    def poll(self) -> int | None:
        """Return the exit code, None while it runs or rests; start ranks that are wanted again.

        Kills it and raises an SvdqError if a rank or all GPUs failed.
        """
        if self.is_resting:
            if self._last_signal is not None:
                return 0
            return self._rest_on()
        if self.rest is not None and not self.is_starting:
            self.rest = None
        assert self._torchrun is not None
        if self._last_signal is None and (self.is_freed or run_folder.read_crowded(self.run_dir) is not None):
            self._free()
        error = run_folder.read_error(self.run_dir)
        if error is not None:
            self.kill()
            if isinstance(error, NoRoomError) and self._last_signal is None and self._memory.look():
                self._lie_down("held")
                return None
            raise type(error)(f"{error} {self._failures()}".rstrip())
        self._count_starts()
        code = self._torchrun.poll()
        if code is None and self._freed_at is None and self._last_signal is not signal.SIGTERM:
            self._test_gpus()
        if code is not None and self._freed_at is not None and self._last_signal is None:
            self._memory.want(run_folder.read_crowded(self.run_dir) or 0)
            self._lie_down("freed" if self.is_freed else "held")
            return self._rest_on()
        if code == 0 and self._last_signal is None and run_folder.read_idle(self.run_dir) is not None:
            self._lie_down("idle")
            return None
        return code

    def _rest_on(self) -> int | None:
        """Start the ranks if they are wanted, or no longer freed; return the exit code of a burst, which ends."""
        assert self.rest is not None
        if self.is_freed:
            if self._config.rank.burst:
                return 0
            if self.rest.reason != "freed":
                self._rest_for("freed")
        elif self.rest.reason == "freed" and run_folder.read_idle(self.run_dir) is not None:
            self._rest_for("idle")
        elif self.is_wanted or self.rest.reason != "idle":
            lack = self._memory.lack()
            if lack:
                self._hold(lack)
            elif lack is not None:
                self._wake()
        return None

    def _hold(self, lack: str) -> None:
        """Rest until other programs give memory back; say so once."""
        assert self.rest is not None
        if self.rest.reason != "held":
            self._rest_for("held")
        if not self._lack:
            logger.warning("Waiting for memory: %s. --no-wait-for-gpu does not wait.", lack)
        self._lack = lack

    @property
    def shortage(self) -> Condition:
        """What it waits for while a GPU lacks memory."""
        since = time.time() if self.rest is None else self.rest.since
        reason = f"{self._lack or 'Another program has taken memory of a GPU'}."
        attempts = int((time.time() - since) / AGAIN_S) + 1
        return Condition(effect="Videos wait for memory of the GPU", reason=reason, since=since, attempts=attempts)

    def _free(self) -> None:
        """End the ranks after their present step; kill them if that takes too long."""
        now = time.monotonic()
        if self._freed_at is None:
            self._freed_at = now
            if self.is_freed:
                logger.info("The GPUs are to be free; videos stop after their step, and go on after `svdq resume`.")
        assert self._torchrun is not None
        self._torchrun.send_signal(signal.SIGTERM)
        if now - self._freed_at >= (STOP_START_S if self.is_starting else FREE_S):
            self.kill()

    def _lie_down(self, reason: Literal["idle", "freed", "held"]) -> None:
        start_s = None if self.rest is None else self.rest.start_s
        if not self.is_starting:
            assert self._torchrun is not None
            start_s = max(0.0, run_folder.ready_at(self.run_dir) - self._torchrun.started_at)
        self.rest = Rest(reason=reason, since=time.time(), start_s=start_s)
        self._freed_at = None
        if reason == "idle":
            logger.info("The ranks had nothing to do and have ended; they start again when there is a job.")
        elif reason == "freed":
            logger.info("The ranks have ended, and the GPUs are free until `svdq resume`.")

    def _rest_for(self, reason: Literal["idle", "freed", "held", "starting"]) -> None:
        assert self.rest is not None
        self.rest = self.rest.model_copy(update={"reason": reason, "since": time.time()})

    def _wake(self) -> None:
        assert self.rest is not None
        why = {"freed": "Resumed", "held": "The GPUs have enough memory"}.get(self.rest.reason, "There is a job")
        logger.info("%s; starting the ranks.", why)
        self.is_wanted, self._lack = False, ""
        self._rest_for("starting")
        ended = self.run_dir
        with contextlib.suppress(SvdqError):  # the ranks say what is wrong, and try again
            self._config = self._refreshed(self._config)
        self._start()
        if ended != self._folder:
            shutil.rmtree(ended, ignore_errors=True)

    def _count_starts(self) -> None:
        """Kill the group and raise an SvdqError if it has failed to start again and again."""
        restart_count, ready = run_folder.restarts(self.run_dir), run_folder.last_ready(self.run_dir)
        if restart_count == self._seen_restarts:
            return
        self._seen_restarts = restart_count
        self._memory.want(0)  # what was free before its ranks died may be taken
        reason = run_folder.read_failure(self.run_dir, restart_count - 1)
        # A group that worked is given up only for what its ranks say: others may kill them while they start.
        has_failed = ready is None or (ready < restart_count - 1 and reason)
        self._failed_starts = self._failed_starts + 1 if has_failed else 0
        if self._failed_starts == MAX_FAILED_STARTS:
            self.kill()
            why = f" ({reason.rstrip('.')})" if reason else ""
            raise SvdqError(
                f"The worker cannot start: its ranks have failed {MAX_FAILED_STARTS} times{why}; see the log above "
                f"and `svdq doctor`. {self._failures()}".rstrip()
            )

    def _test_gpus(self) -> None:
        """Test the GPUs of a group that was restarted or hangs; go on without those that fail."""
        restart_count = run_folder.restarts(self.run_dir)
        waits = restart_count != self._tested  # its new ranks do
        failed = self._probes.failed(is_due=waits)
        if failed is None:
            return
        if not failed and waits:
            if (lack := self._memory.lack()) is None:
                return
            if lack:
                self._probes.end()
                self.kill()
                self._lie_down("held")
                return
        self._probes.end()
        self._tested = restart_count
        if failed:
            self._leave_out(failed)
        else:
            run_folder.permit(self.run_dir, restart_count)

    def _leave_out(self, failed: Mapping[str, str]) -> None:
        self.kill()
        devices = self._devices or []
        used = [devices[rank % len(devices)] for rank in range(self.num_ranks)]
        self.num_ranks = sum(device not in failed for device in used)
        self._devices = self._memory.devices = [device for device in devices if device not in failed]
        self._probes = GpuProbes(self._devices, self.running_pids)
        named = {title(device): reason for device, reason in failed.items()}
        rank = self._config.rank
        rank = rank.model_copy(update={"failed_gpus": {**rank.failed_gpus, **named}})
        self._config = self._config.model_copy(update={"rank": rank})
        if not self._devices:
            raise UnavailableError(f"No GPU is left. {self._failures()}")
        left = count(self.num_ranks, "rank")
        logger.error("%s The group goes on with %s; the next worker tries all again.", self._failures(), left)
        self._start()

    def _failures(self) -> str:
        return " ".join(f"{name} has failed ({reason})." for name, reason in self._config.rank.failed_gpus.items())

    @property
    def is_resting(self) -> bool:
        """Whether it has no processes, and waits."""
        return self.rest is not None and self.rest.reason != "starting"

    @property
    def is_running(self) -> bool:
        """Whether it had processes at the last `poll`."""
        return self._torchrun is not None and self._torchrun.is_running

    @property
    def is_starting(self) -> bool:
        """Whether it is not ready for jobs yet, or again."""
        return self._torchrun is None or self._torchrun.is_starting

    def running_pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that handle signals, by rank, also after a restart."""
        return {} if self._torchrun is None else self._torchrun.running_pids()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal once to every rank that handles signals; call this again to reach later ones."""
        self._last_signal = number
        if self._torchrun is not None:
            self._torchrun.send_signal(number)

    def kill(self) -> None:
        """Kill what is left of the group, orphaned ranks included; other groups take over its jobs."""
        if self._torchrun is not None:
            self._torchrun.kill()
