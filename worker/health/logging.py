"""Formats of the log, as text or as JSON lines, for ranks and launcher. Does not import torch.

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
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from svdq.producer.settings import without_secrets
from svdq.producer.text import printable

#: Largest number of bytes of a line with its end: POSIX guarantees 512 in one piece, Linux these.
LINE_BYTES = {"linux": 4096}.get(sys.platform, 512)
#: Number of jobs that a line names at most.
MAX_JOB_IDS = 50
#: Replaces the middle of a text that is too long.
GAP = "\n…\n"
#: The field `logger` of lines from an unknown source.
UNKNOWN = "stderr"
#: Largest number of bytes read at once from a line of another program; the rest becomes another line.
CHUNK = 65536
#: Seconds to wait for the last lines of child processes.
END_S = 2.0

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


def start_logging(
    log_format: str,
    rank: int,
    group: str | None,
    job_ids: Callable[[logging.LogRecord], Sequence[str]],
) -> None:
    """Log a rank to stderr, as `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(rank=rank, group=group, job_ids=job_ids))
    else:
        handler.setFormatter(TextFormatter(f"[rank {rank}] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


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
