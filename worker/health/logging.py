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
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from svdq.producer.settings import without_secrets
from svdq.producer.text import printable

#: Largest number of bytes of a line with its end: POSIX guarantees 512 in one piece, Linux these.
LINE_BYTES = {"linux": 4096}.get(sys.platform, 512)
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
    """Formats records as JSON lines."""

    def __init__(
        self,
        *,
        rank: int | None = None,
        group: str | None = None,
        job_ids: Callable[[logging.LogRecord], Sequence[str]] = lambda _: (),
    ) -> None:
        """Make the formatter of one process.

        Args:
            rank: of the process; None in the launcher.
            group: number of the process's group in its launcher; None in the launcher.
            job_ids: returns the jobs that a record is about.
        """
        super().__init__()
        self._rank = rank
        self._group = group
        self._job_ids = job_ids

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return json_line(
            record.getMessage(),
            at=record.created,
            level=record.levelname,
            logger=record.name,
            rank=self._rank,
            group=self._group,
            job_ids=self._job_ids(record),
            exception=self.formatException(record.exc_info) if record.exc_info else None,
        )


def json_line(
    message: str,
    *,
    at: float,
    level: str,
    logger: str,
    rank: int | None = None,
    group: str | None = None,
    job_ids: Sequence[str] = (),
    exception: str | None = None,
) -> str:
    """Return one line without its end, in less than `LINE_BYTES` bytes and without passwords; `at` is a Unix time."""
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "host": socket.gethostname(),
        "rank": rank,
        "group": group,
        "logger": logger,
    }
    if len(job_ids) == 1:
        line["job_id"] = job_ids[0]
    elif job_ids:
        line["job_ids"] = list(job_ids)
    line["message"] = _mask(message)
    if exception is not None:
        line["exception"] = _mask(exception)
    while len(text := json.dumps(line)) >= LINE_BYTES:
        name = max(("exception", "job_ids", "message"), key=lambda name: len(str(line.get(name, ""))))
        long = line[name]
        if isinstance(long, list):
            line[name] = long[: len(long) // 2]
            continue
        kept = max(1, len(long) * 3 // 8)
        line[name] = long[:kept].removesuffix(GAP) + GAP + long[-kept:]
    return text


def _mask(text: str) -> str:
    return _URL.sub(lambda match: without_secrets(match[0]), text)


def to_json_line(text: str, at: float) -> str:
    """Convert a line of any program to a JSON line; one that this module made stays as it is."""
    if text.startswith('{"time": '):
        with contextlib.suppress(ValueError):
            json.loads(text)
            return text
    glog = _GLOG.match(text)
    return json_line(text, at=at, level=_LEVELS[glog[1]] if glog else "INFO", logger="torchrun" if glog else UNKNOWN)


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
                    os.write(original, to_json_line(text, time.time()).encode(errors="replace") + b"\n")
