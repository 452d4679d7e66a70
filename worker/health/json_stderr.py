"""Makes everything JSON that a launcher and its children write to stderr. Knows no Redis; imports no torch.

What is no JSON already (torchrun's own lines, a crash in native code) is put into an object a
line. All of it goes through a pipe, which one thread empties for as long as the launcher lives.
"""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Iterator

from svdq.worker.health.logging import JsonFormatter, json_line

#: Name of who wrote a line, where it does not say.
UNKNOWN = "stderr"
#: Bytes of a line that is not ours, at most; the rest counts as a further one.
CHUNK = 65536
#: Seconds in which what children have written last must have come.
END_S = 2.0

#: How lines of torchrun begin: W1121 10:00:00.123 …
_GLOG = re.compile(r"([DIWEFC])\d{4} \d\d:\d\d:\d\d")
_LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL", "C": "CRITICAL"}


@contextlib.contextmanager
def json_stderr() -> Iterator[None]:
    """Have stderr take JSON lines only for a block, from this process and from all that it starts."""
    sys.stderr.flush()
    ours = os.dup(2)
    read_end, write_end = os.pipe()
    os.dup2(write_end, 2)
    os.close(write_end)
    relay = threading.Thread(target=_relay, args=(read_end, ours), name="json-stderr", daemon=True)
    relay.start()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        sys.stderr.flush()
        os.dup2(ours, 2)
        # The pipe ends when the last child has ended; one that goes on all the same is not waited for.
        relay.join(END_S)


def _relay(read_end: int, ours: int) -> None:
    with os.fdopen(read_end, "rb") as lines:
        while line := lines.readline(CHUNK):
            text = line.decode(errors="replace").rstrip("\r\n")
            if text.strip():
                # Whoever read our stderr may have gone; the pipe is emptied all the same, so that no rank waits.
                with contextlib.suppress(OSError):
                    os.write(ours, as_json(text, time.time()).encode(errors="replace") + b"\n")


def as_json(text: str, now: float) -> str:
    """Give a line as it is when it is a line of ours, else put it into one."""
    if text.startswith('{"time": '):
        try:
            json.loads(text)
        except ValueError:
            pass
        else:
            return text
    glog = _GLOG.match(text)
    return json_line(text, at=now, level=_LEVELS[glog[1]] if glog else "INFO", logger="torchrun" if glog else UNKNOWN)
