"""Logs as JSON, an object a line, of ranks and launcher alike. Knows no Redis; imports no torch.

A line is never longer than what a pipe takes in one piece, so that the lines of several processes never mix.
"""

import json
import logging
import re
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from svdq.producer.settings import without_secrets
from svdq.producer.text import printable

#: Bytes of a line at most, its end included: POSIX has a pipe take 512 in one piece, Linux and macOS these.
LINE_BYTES = {"linux": 4096}.get(sys.platform, 512)
#: What stands in for the middle of a text that is too long.
GAP = "\n…\n"

_URL = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"<>]+")


class TextFormatter(logging.Formatter):
    """Formats records as text whose characters cannot control a terminal; tracebacks keep their lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return "\n".join(map(printable, super().format(record).split("\n")))


class JsonFormatter(logging.Formatter):
    """Makes the lines of one process."""

    def __init__(
        self,
        *,
        rank: int | None = None,
        group: str | None = None,
        job_ids: Callable[[logging.LogRecord], Sequence[str]] = lambda _: (),
    ) -> None:
        """Make it.

        Args:
            rank: of the process; None in the launcher.
            group: of the process, by its number in its launcher; None in the launcher.
            job_ids: tells which jobs a record is about.
        """
        super().__init__()
        self._rank = rank
        self._group = group
        self._job_ids = job_ids

    def format(self, record: logging.LogRecord) -> str:
        """Make a line of a record."""
        exception = self.formatException(record.exc_info) if record.exc_info else None
        return json_line(
            record.getMessage(),
            at=record.created,
            level=record.levelname,
            logger=record.name,
            rank=self._rank,
            group=self._group,
            job_ids=self._job_ids(record),
            exception=exception,
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
    """Make one line, without its end; passwords in addresses are masked.

    Args:
        message: what is said.
        at: seconds since the epoch.
        level: Python's word for how bad it is.
        logger: who says it.
        rank: of the process, if it is one's.
        group: of the process, if it is one's.
        job_ids: the jobs it is about.
        exception: a traceback.
    """
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
    line["message"] = masked(message)
    if exception is not None:
        line["exception"] = masked(exception)
    while len(text := json.dumps(line)) >= LINE_BYTES:
        name = max(("exception", "job_ids", "message"), key=lambda name: len(str(line.get(name, ""))))
        long = line[name]
        if isinstance(long, list):
            line[name] = long[: len(long) // 2]
            continue
        kept = max(1, len(long) * 3 // 8)
        line[name] = long[:kept].removesuffix(GAP) + GAP + long[-kept:]
    return text


def masked(text: str) -> str:
    """Mask the passwords in all addresses that stand in a text."""
    return _URL.sub(lambda match: without_secrets(match[0]), text)


def start_logging(
    log_format: str,
    rank: int,
    group: str | None,
    job_ids: Callable[[logging.LogRecord], Sequence[str]],
) -> None:
    """Set up the logging of a rank: to stderr, as `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(rank=rank, group=group, job_ids=job_ids))
    else:
        handler.setFormatter(TextFormatter(f"[rank {rank}] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
