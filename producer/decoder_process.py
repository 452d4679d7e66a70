"""The process of a `Decoder`: decodes one photo after another, each within a time of the processor and memory."""

import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from math import ceil
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import SvdqError, reason_of
from svdq.pipeline.media.image import prepare_photo
from svdq.producer.decoder import receive, send
from svdq.producer.results.poster import poster_of_photo
from svdq.producer.submitting.photos import check_data
from svdq.producer.threads import MAX_DECODED_BYTES, Reserve

ORPHAN_S = 1.0  # seconds between two looks whether the parent still runs
#: Bytes of memory besides a photo's decoding: Python, copies of the file's parts, and what decoders do not announce.
MORE_BYTES = 256 << 20

Answer = tuple[dict[str, Any], bytes]


def main() -> None:
    """Answer requests until there are no more."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    @contextlib.contextmanager
    def reserve(num_bytes: int) -> Iterator[None]:
        send(answers, {"needs": num_bytes})
        if receive(requests) is None:
            os._exit(0)
        yield

    while (request := receive(requests)) is not None:
        message, data = request
        del request
        _limit(message["cpu_s"], None if message["task"] == "prepare" else 2 * len(data))
        try:
            found, payload = TASKS[message["task"]](data, reserve, **message["arguments"])
        except SvdqError as error:
            found, payload = {"error": str(error)}, b""
        except Exception as error:  # noqa: BLE001 - such as a MemoryError; the next photo may be good
            found, payload = {"error": f"The photo cannot be decoded ({reason_of(error)})."}, b""
        del data  # while it waits for the next one
        try:
            send(answers, found, BytesIO(payload))
        except BrokenPipeError:  # the process that has asked has ended
            os._exit(0)


def _limit(cpu_s: float, num_bytes: int | None) -> None:
    """Have the kernel end this process after some more seconds, and refuse memory; None for any."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limits = {
        resource.RLIMIT_CPU: ceil(used.ru_utime + used.ru_stime + cpu_s),
        resource.RLIMIT_DATA: -1 if num_bytes is None else MAX_DECODED_BYTES + MORE_BYTES + num_bytes,
    }
    for kind, limit in limits.items():
        with contextlib.suppress(OSError, ValueError):  # above a limit that this process was given
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(ORPHAN_S)
    os._exit(1)


def _check(data: bytes, reserve: Reserve, path: str, max_pixels: int) -> Answer:
    photo = check_data(data, Path(path), max_pixels, reserve)
    taken = photo.capture
    return {
        "sha256": photo.sha256,
        "extension": photo.extension,
        "num_bytes": photo.num_bytes,
        "size": photo.size,
        "time": taken.time and taken.time.isoformat(),
        "location": taken.location,
    }, b""


def _poster_of_photo(data: bytes, reserve: Reserve, size: list[int], fit: Any, max_pixels: int) -> Answer:
    return {}, poster_of_photo(data, (size[0], size[1]), fit, max_pixels, reserve)


def _prepare(data: bytes, _: Reserve, size: list[int], fit: Any, max_pixels: int) -> Answer:
    notes: list[str] = []
    image = prepare_photo(data, size[0], size[1], fit, max_pixels, notes.append)
    return {"notes": notes}, image.tobytes()


TASKS: dict[str, Callable[..., Answer]] = {
    "start": lambda *_: ({}, b""),
    "check": _check,
    "poster_of_photo": _poster_of_photo,
    "prepare": _prepare,
}

if __name__ == "__main__":
    main()
