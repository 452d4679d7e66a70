"""Collects a rank's log lines about jobs, for `svdq logs`. Does not import Redis.

A record belongs to the jobs that it names. If it names none and comes from the step loop, it belongs to the job there.
"""

import logging
import re
import socket
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

from svdq.producer.status.job_log import LogEntry

#: Largest number of lines that wait for Redis; then the oldest are dropped.
MAX_WAITING = 500

#: Ids of our jobs, as `Job.digest` makes them.
_JOB_ID = re.compile(r"\b[0-9a-f]{20}\b")


class JobLogHandler(logging.Handler):
    """Keeps lines until `take`."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(message)s"))
        self._rank = rank
        self._host = socket.gethostname()
        self._waiting: deque[tuple[str, LogEntry]] = deque(maxlen=MAX_WAITING)
        #: Returns the job of the step loop, which is the main thread.
        self.current_job: Callable[[], str | None] = lambda: None
        #: Called after each line.
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
        """Put lines that could not be written back, before those that came since."""
        lines = [(job_id, entry) for job_id, entries in taken.items() for entry in entries]
        too_many = max(0, len(lines) + len(self._waiting) - MAX_WAITING)
        self._waiting.extendleft(reversed(lines[too_many:]))
