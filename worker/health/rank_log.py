"""The log of ranks and launcher, as text or JSON lines, and lines about jobs for `svdq logs`. Does not import torch."""

import logging
import re
import socket
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pythonjsonlogger.json import JsonFormatter as BaseJsonFormatter

from svdq.producer.job_log import LogEntry
from svdq.producer.settings import without_urls_secrets
from svdq.producer.text import printable

MAX_WAITING = 500  # lines about jobs that wait for Redis; then the oldest are dropped
_JOB_ID = re.compile(r"\b[0-9a-f]{20}\b")  # as `Job.digest` makes them


class TextFormatter(logging.Formatter):
    """Formats records as text whose characters cannot control a terminal; tracebacks keep their lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Escape control characters."""
        return "\n".join(map(printable, super().format(record).split("\n")))


class JsonFormatter(BaseJsonFormatter):
    """Formats records as JSON lines, without passwords."""

    def __init__(
        self,
        *,
        rank: int | None = None,
        group: str | None = None,
        job_ids: Callable[[logging.LogRecord], Sequence[str]] = lambda _: (),
    ) -> None:
        """Make the formatter of one process; `job_ids` returns the jobs that a record is about."""
        names = {"levelname": "level", "name": "logger", "exc_info": "exception"}
        who = {"host": socket.gethostname(), "rank": rank, "group": group}
        super().__init__(["levelname", "name", "message"], rename_fields=names, static_fields=who, timestamp="time")
        self._job_ids = job_ids

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
        """Add the jobs, and mask passwords."""
        super().add_fields(log_data, record, message_dict)
        job_ids = self._job_ids(record)
        if len(job_ids) == 1:
            log_data["job_id"] = job_ids[0]
        elif job_ids:
            log_data["job_ids"] = list(job_ids)
        for name in ("message", "exception"):
            if name in log_data:
                log_data[name] = without_urls_secrets(log_data[name])


class JobLogHandler(logging.Handler):
    """Keeps lines about jobs until `take`: lines that name a job, and lines of the step loop during one."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(message)s"))
        self._rank = rank
        self._host = socket.gethostname()
        self._waiting: deque[tuple[str, LogEntry]] = deque(maxlen=MAX_WAITING)
        self.current_job: Callable[[], str | None] = lambda: None  # of the step loop, in the main thread
        self.on_line: Callable[[], object] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record for each job that it is about."""
        text = self.format(record)
        if job_ids := self.job_ids(record):
            entry = LogEntry.now(rank=self._rank, host=self._host, level=record.levelname, text=text, at=record.created)
            self._waiting.extend((job_id, entry) for job_id in job_ids)
            self.on_line()

    def job_ids(self, record: logging.LogRecord) -> list[str]:
        """Return the ids of the jobs that a record is about, in the order in which it names them."""
        job_ids = list(dict.fromkeys(_JOB_ID.findall(record.getMessage())))
        if not job_ids and record.thread == threading.main_thread().ident:
            job_ids = [job_id for job_id in (self.current_job(),) if job_id]
        return job_ids

    def take(self) -> dict[str, list[LogEntry]]:
        """Return and remove all lines, by job."""
        taken = defaultdict(list)
        while self._waiting:
            job_id, entry = self._waiting.popleft()
            taken[job_id].append(entry)
        return taken

    def restore(self, taken: Mapping[str, list[LogEntry]]) -> None:
        """Put back lines that could not be written, before those that came since."""
        lines = [(job_id, entry) for job_id, entries in taken.items() for entry in entries]
        too_many = max(0, len(lines) + len(self._waiting) - MAX_WAITING)
        self._waiting.extendleft(reversed(lines[too_many:]))


def start_logging(log_format: str, rank: int, group: str | None) -> JobLogHandler:
    """Log a rank to stderr, as `text` or `json`; return the handler that collects its lines about jobs."""
    of_jobs = JobLogHandler(rank)
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(rank=rank, group=group, job_ids=of_jobs.job_ids))
    else:
        handler.setFormatter(TextFormatter(f"[rank {rank}] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler, of_jobs])
    return of_jobs
