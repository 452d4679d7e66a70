"""Records spans of work, at wall-clock times, as a Chrome trace (chrome://tracing, Perfetto)."""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self


class Span(NamedTuple):
    """One piece of work; its times are seconds since the epoch."""

    name: str  # the work: `encode`, `steps 4-7`, `decode`, `write`
    job_id: str  # its job, or ""
    start_s: float
    end_s: float
    thread: str = ""  # the thread that did it

    @property
    def kind(self) -> str:
        """`encode`, `steps` or `decode`; "" for anything besides, such as a warm-up or a write."""
        kind = self.name.partition(" ")[0]
        return kind if kind in {"encode", "steps", "decode"} else ""

    @property
    def steps(self) -> range:
        """Its denoising steps."""
        if self.kind != "steps":
            return range(0)
        first, _, last = self.name.removeprefix("steps ").partition("-")
        return range(int(first), int(last) + 1)

    @property
    def num_steps(self) -> int:
        """Number of denoising steps."""
        return len(self.steps)

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.start_s


class OpenSpan:
    """Work that is being done.

    A class because it runs in the step loop: a generator's context manager takes three times as long.
    """

    __slots__ = ("_job_id", "_spans", "_start_s", "name")

    def __init__(self, spans: list[Span] | None, name: str, job_id: str) -> None:
        self._spans = spans
        self.name = name  # of the work; may be set until its end
        self._job_id = job_id
        self._start_s = 0.0

    def __enter__(self) -> Self:
        self._start_s = time.time()
        return self

    def __exit__(self, *_: object) -> None:
        if self._spans is not None:
            # list.append is atomic, so the step loop needs no lock.
            thread = threading.current_thread().name
            self._spans.append(Span(self.name, self._job_id, self._start_s, time.time(), thread))


class Tracer:
    """Collects the spans of one rank; `Tracer()` collects nothing."""

    def __init__(self, *, on: bool = False) -> None:
        self.on = on
        self.spans: list[Span] = []

    def span(self, name: str, job_id: str = "") -> contextlib.AbstractContextManager[OpenSpan]:
        """Record the work in a block, under the `name` that it has at its end."""
        return OpenSpan(self.spans if self.on else None, name, job_id)


def steps_by_job(spans: Iterable[Span]) -> dict[str, int]:
    """Count the denoising steps of each job that has any."""
    counted = Counter[str]()
    for span in spans:
        if span.num_steps:
            counted[span.job_id] += span.num_steps
    return dict(counted)


def span_events(rank: int, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the spans of a rank in Chrome's trace event format; times in microseconds, one process per rank."""
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
    ]
    return named + [
        {
            "ph": "X",
            "name": span.name,
            "cat": "svdq",
            "pid": rank,
            "tid": span.thread,
            "ts": span.start_s * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"job": span.job_id},
        }
        for span in spans
    ]


def usage_event(rank: int) -> dict[str, Any]:
    """Return this process's resident MiB as a metadata event."""
    import psutil  # on demand: a launcher that only merges traces does not need it

    usage = {"rss_mb": psutil.Process().memory_info().rss / 2**20}
    return {"ph": "M", "name": "usage", "pid": rank, "tid": 0, "args": usage}


def trace_text(events: Sequence[dict[str, Any]]) -> str:
    """Return the content of a trace file that chrome://tracing and Perfetto open."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
