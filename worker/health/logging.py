"""The log of ranks and launcher, as text or JSON lines, and lines about jobs for `svdq logs`. Does not import torch.

A JSON line is short enough that a pipe takes it in one piece, so lines of several processes do not mix. The launcher
converts what is not JSON yet: torchrun's lines, and crashes in native code.
"""

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from svdq.producer.settings import without_secrets
from svdq.producer.status.job_log import LogEntry
from svdq.producer.text import printable

#: Largest number of bytes of a line with its end: POSIX guarantees 512 in one piece, Linux these.
LINE_BYTES = {"linux": 4096}.get(sys.platform, 512)
#: Number of jobs that a line lists at most; with more it might not fit into 512 bytes, whatever is cut.
MAX_JOB_IDS = 8
#: Replaces the middle of a text that is too long.
GAP = "\n…\n"
#: The field `logger` of lines from an unknown source.
UNKNOWN = "stderr"
#: Largest number of bytes read at once from a line of another program; the rest becomes another line.
CHUNK = 65536
#: Seconds to wait for the last lines of child processes.
END_S = 2.0

#: Largest number of lines about jobs that wait for Redis; then the oldest are dropped.
MAX_WAITING = 500

#: Ids of our jobs, as `Job.digest` makes them.
_JOB_ID = re.compile(r"\b[0-9a-f]{20}\b")
_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>]+")
#: How lines of torchrun begin: W1121 10:00:00.123 …
_GLOG = re.compile(r"([DIWEFC])\d{4} \d\d:\d\d:\d\d")
_LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL", "C": "CRITICAL"}


class TextFormatter(logging.Formatter):
    """Formats records as text whose characters cannot control a terminal; tracebacks keep their lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return "\n".join(map(printable, super().format(record).split("\n")))


class JsonFormatter(logging.Formatter):
    """Formats records as JSON lines of less than `LINE_BYTES` bytes, without passwords."""

    def __init__(
        self,
        *,
        rank: int | None = None,
        group: str | None = None,
        job_ids: Callable[[logging.LogRecord], Sequence[str]] = lambda _: (),
    ) -> None:
        """Make the formatter of one process; `rank` and `group` are None in the launcher.

        `job_ids` returns the jobs that a record is about.
        """
        super().__init__()
        self._rank = rank
        self._group = group
        self._job_ids = job_ids

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "host": socket.gethostname(),
            "rank": self._rank,
            "group": self._group,
            "logger": record.name,
        }
        job_ids = self._job_ids(record)
        if len(job_ids) == 1:
            line["job_id"] = job_ids[0]
        elif job_ids:
            line["job_ids"] = list(job_ids[:MAX_JOB_IDS])
        line["message"] = _mask(record.getMessage())
        if record.exc_info:
            line["exception"] = _mask(self.formatException(record.exc_info))
        while len(text := json.dumps(line)) >= LINE_BYTES:
            name = max(("exception", "message"), key=lambda name: len(line.get(name, "")))
            kept = max(1, len(line[name]) * 3 // 8)
            line[name] = line[name][:kept].removesuffix(GAP) + GAP + line[name][-kept:]
        return text


def _mask(text: str) -> str:
    return _URL.sub(lambda match: without_secrets(match[0]), text)


def to_json_line(text: str) -> str:
    """Convert a line of any program to a JSON line; one that this module made stays as it is."""
    if text.startswith('{"time": '):
        with contextlib.suppress(ValueError):
            json.loads(text)
            return text
    glog = _GLOG.match(text)
    level, logger = (_LEVELS[glog[1]], "torchrun") if glog else ("INFO", UNKNOWN)
    return JsonFormatter().format(logging.makeLogRecord({"msg": text, "levelname": level, "name": logger}))


class JobLogHandler(logging.Handler):
    """Keeps a rank's lines about jobs until `take`.

    A record belongs to the jobs that it names. If it names none and comes from the step loop, to the job there.
    """

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


@contextlib.contextmanager
def json_stderr() -> Iterator[None]:
    """Convert to JSON lines what this process and its children write to stderr inside the block."""
    sys.stderr.flush()
    original = os.dup(2)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    os.close(write_end)
    relay = threading.Thread(target=_relay, args=(read_end, original), name="json-stderr", daemon=True)
    relay.start()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        sys.stderr.flush()
        os.dup2(original, 2)
        # The pipe ends with the last child; do not wait for a child that keeps running.
        relay.join(END_S)


def _relay(read_end: int, original: int) -> None:
    with os.fdopen(read_end, "rb") as lines:
        while line := lines.readline(CHUNK):
            text = line.decode(errors="replace").rstrip("\r\n")
            if text.strip():
                # Continue if nobody reads the original stderr any more: a full pipe would block all ranks.
                with contextlib.suppress(OSError):
                    os.write(original, to_json_line(text).encode(errors="replace") + b"\n")
