"""The record of a rank: its activity, memory and conditions; and the pace of its group."""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol

import psutil
import torch

from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.needs import published
from svdq.pipeline.models.video_model import ModelInfo
from svdq.pipeline.transport.topology import Topology
from svdq.producer import processes
from svdq.producer.status.ranks import Activity, Condition, IntakeStatus, RankStatus

SHARE_OVER_S, WINDOW = 10.0, 20  # seconds of the busy share, gaps between videos of the pace


class BusyMeter:
    """Measures the share of time in which the step loop computes."""

    def __init__(self) -> None:
        #: Seconds computed before, and the start of the present computation; replaced as a whole by the step loop.
        self._state: tuple[float, float | None] = (0.0, None)
        #: Readings: the time, and the seconds computed by then.
        self._readings: deque[tuple[float, float]] = deque([(time.perf_counter(), 0.0)])

    def begin(self) -> None:
        """Record that a computation begins."""
        computed_s, since = self._state
        if since is None:
            self._state = (computed_s, time.perf_counter())

    def end(self) -> None:
        """Record that nothing is computed."""
        computed_s, since = self._state
        if since is not None:
            self._state = (computed_s + time.perf_counter() - since, None)

    def share(self) -> float:
        """Return the busy share of the last seconds, 0 to 1; only one thread may call this."""
        now = time.perf_counter()
        computed_s, since = self._state
        computed_s += 0.0 if since is None else now - since
        self._readings.append((now, computed_s))
        while len(self._readings) > 2 and self._readings[1][0] <= now - SHARE_OVER_S:
            self._readings.popleft()
        first_at, first_s = self._readings[0]
        return min(1.0, max(0.0, (computed_s - first_s) / max(now - first_at, 1e-9)))


class Pace:
    """The average time between two finished videos of a group, without times in which it was idle."""

    def __init__(self) -> None:
        self._gaps_s: deque[float] = deque(maxlen=WINDOW)
        self._last_s: float | None = None  # when the last video was finished; None if the group has been idle since

    def finished(self, now_s: float) -> None:
        """Record that a video was finished, by any clock in seconds."""
        if self._last_s is not None:
            self._gaps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def idle(self) -> None:
        """Record that nothing is in flight."""
        self._last_s = None

    def seconds(self, now_s: float) -> float | None:
        """Return the seconds between two finished videos; None until there were two in a row.

        They are at least those since the last one: after many short videos, a long one is in flight.
        """
        open_s = 0.0 if self._last_s is None else now_s - self._last_s
        return max(fmean(self._gaps_s), open_s) if self._gaps_s else None


class StorageUser(Protocol):
    """A part of the rank that may have to wait for the storage."""

    @property
    def condition(self) -> Condition | None:
        """Why it waits now; for any thread."""


class RankReporter:
    """Makes the record of one rank."""

    def __init__(self, who: RankStatus, device: torch.device) -> None:
        """Make a reporter; `who` is the record with all fields that never change."""
        self.who = who
        self._device = device
        self._process = psutil.Process()
        self.meter = BusyMeter()
        #: The components that are being loaded, and the seconds that this took the last time.
        self.loading: tuple[str, float | None] | None = None
        #: Denoising steps so far, and their seconds; replaced as a whole by the step loop.
        self.steps_done: tuple[int, float] = (0, 0.0)
        self.waiting: Sequence[StorageUser] = ()
        #: Of the last rank: the seconds of a write, and how many are written at once.
        self.write_pace: Callable[[], tuple[float | None, int]] = lambda: (None, 1)
        self.group: Callable[[], IntakeStatus] | None = None

    def gather(
        self, note: tuple[Sample, int] | None, step_range: tuple[int, int] | None, step_s: float | None
    ) -> RankStatus:
        """Return the present record; `note` is the sample and step that is computed, the others as in `RankStatus`."""
        conditions = tuple(condition for part in self.waiting if (condition := part.condition) is not None)
        activity: Activity = "waiting" if any(condition.job_ids for condition in conditions) else "idle"
        sample, step = note if note is not None else (None, None)
        if sample is not None:
            activity = "decoding" if step == sample.parameters.steps else "denoising"
        loading, loading_s = self.loading or ("", None)
        if loading:
            activity = "loading"
        num_steps, steps_s = self.steps_done
        write_s, num_writers = self.write_pace()
        return self.who.model_copy(
            update={
                "at": time.time(),
                "activity": activity,
                "loading": loading,
                "loading_s": loading_s,
                "job_id": sample.job_id if sample is not None else None,
                "step": step,
                "steps": sample.parameters.steps if sample is not None else None,
                "step_range": step_range,
                "step_s": step_s,
                "busy_share": self.meter.share(),
                "conditions": conditions,
                "num_steps": num_steps,
                "steps_s": steps_s,
                "write_s": write_s,
                "num_writers": num_writers,
                "intake": self.group() if self.group is not None else None,
                "rss_bytes": self._process.memory_info().rss,
                **self._gpu_memory(),
            }
        )

    def _gpu_memory(self) -> dict[str, int]:
        if self._device.type != "cuda":
            return {}
        return {
            "gpu_bytes": torch.cuda.memory_reserved(self._device),
            "gpu_total_bytes": torch.cuda.get_device_properties(self._device).total_memory,
        }


def published_step_s(info: ModelInfo, gpu: str) -> float | None:
    """Return the seconds of a step of a model's usual video on a GPU by its name; None if nobody has published it."""
    known = published(info.made_of.get("base", info.name))
    step = known.published.step_on(gpu) if known is not None and known.published is not None else None
    return None if step is None else step.step_s


def describe(topology: Topology, device: torch.device, info: ModelInfo) -> RankStatus:
    """Return the record of this process with all fields that never change."""
    now, device_name = time.time(), torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return RankStatus(
        group=processes.group_name(),
        rank=topology.rank,
        num_ranks=topology.num_ranks,
        host=socket.gethostname(),
        pid=os.getpid(),
        device=str(device),
        device_name=device_name,
        model=info.name,
        family=info.family.name if info.family is not None else "",
        notice=info.notice,
        loras=tuple(f"{lora['file']} x {lora['strength']:g}" for lora in info.made_of.get("loras", ())),
        facts=dict(info.facts) if topology.first else {},
        published_step_s=published_step_s(info, device_name) if topology.first else None,
        started_at=now,
        at=now,
        restart_count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )
