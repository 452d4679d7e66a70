"""Decodes photos in processes of their own, which are ended when one takes too long, and import no torch.

Requests and answers are JSON with bytes behind it. A process is started at the first photo and kept.
"""

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from PIL import Image

from svdq.pipeline.errors import InputError, SampleError, SvdqError
from svdq.pipeline.media.capture import Capture
from svdq.pipeline.video_parameters import Fit
from svdq.producer.name_templates import safe_name
from svdq.producer.submitting.photos import Photo
from svdq.producer.threads import Reserve

CHECK_S = 20  # seconds of a processor that the check of a photo or a picture of it may take
PREPARE_S = 60  # the same for its preparation at full size
MAX_WAIT = 10  # times these seconds may pass while others have the processors
TICK_S = 0.1  # seconds between two checks for a stop
_HEAD = struct.Struct(">QQ")  # bytes of JSON, and bytes behind it


class TooSlowError(InputError):
    """A photo takes too long to decode."""


class StoppedError(SvdqError):
    """The caller is to stop; the photo was not decoded."""


class _EndedError(Exception):
    """The process has ended."""


class Decoder:
    """Decodes photos, each in one of the processes that this one keeps; from any thread."""

    def __init__(self, reserve: Reserve = lambda _: nullcontext(), is_stopped: Callable[[], bool] = lambda: False):
        """Start nothing yet; `reserve` is entered with the bytes of memory that a photo takes while it is decoded."""
        self._reserve = reserve
        self._is_stopped = is_stopped

    def start(self) -> None:
        """Have a process that has started and waits for a photo; raises StoppedError."""
        with contextlib.suppress(InputError):  # the next photo finds out, too
            self._ask("start", BytesIO(), PREPARE_S, "The photo")

    def check(self, photo: BinaryIO, path: Path, max_pixels: int, cpu_s: float = CHECK_S) -> Photo:
        """Do `check_data` with an open file; raises as it does, and TooSlowError and StoppedError."""
        found, _ = self._ask("check", photo, cpu_s, f"The photo {str(path)!r}", path=str(path), max_pixels=max_pixels)
        time_text, location = found.pop("time"), found.pop("location")
        return Photo(
            path=path,
            name=safe_name(path.stem),
            size=tuple(found.pop("size")),
            capture=Capture(
                time=time_text and datetime.fromisoformat(time_text), location=location and tuple(location)
            ),
            **found,
        )

    def check_data(self, data: bytes, path: Path, max_pixels: int, cpu_s: float = CHECK_S) -> Photo:
        """Do the same with the bytes of a photo, and return them with it."""
        return replace(self.check(BytesIO(data), path, max_pixels, cpu_s), data=data)

    def poster_of_photo(self, data: bytes, size: tuple[int, int], fit: Fit, max_pixels: int) -> bytes:
        """Do the function of this name; raises InputError."""
        given = {"size": size, "fit": fit, "max_pixels": max_pixels}
        return self._ask("poster_of_photo", BytesIO(data), CHECK_S, "The photo", **given)[1]

    def prepare(
        self, data: bytes, size: tuple[int, int], fit: Fit, max_pixels: int, note: Callable[[str], object]
    ) -> Image.Image:
        """Do `prepare_photo`; raises SampleError."""
        try:
            found, pixels = self._ask(
                "prepare", BytesIO(data), PREPARE_S, "The photo", size=size, fit=fit, max_pixels=max_pixels
            )
        except InputError as error:
            raise SampleError(str(error)) from error
        for sentence in found["notes"]:
            note(sentence)
        return Image.frombytes("RGB", size, pixels)

    def _ask(
        self, task: str, photo: BinaryIO, cpu_s: float, called: str, **arguments: object
    ) -> tuple[dict[str, Any], bytes]:
        message = {"task": task, "cpu_s": cpu_s, "arguments": arguments}
        for _ in range(2):  # something else may have ended the process
            try:
                process = _idle.pop()
            except IndexError:  # all are used by other threads
                process = _start()
            try:
                answer, data = self._exchange(process, message, photo, cpu_s)
            except TimeoutError:
                _end(process)
                code = -signal.SIGXCPU
            except (_EndedError, BrokenPipeError):
                code = _end(process)
            except BaseException:
                _end(process)
                raise
            else:
                _idle.append(process)
                if "error" in answer:
                    raise InputError(answer["error"])
                return answer, data
            if code == -signal.SIGXCPU:
                raise TooSlowError(f"{called} takes more than {cpu_s:g} s to decode; save it anew as a JPEG.")
        raise InputError(f"{called} cannot be decoded: it ends the decoder; save it anew as a JPEG.")

    def _exchange(
        self, process: subprocess.Popen[bytes], message: dict[str, Any], photo: BinaryIO, cpu_s: float
    ) -> tuple[dict[str, Any], bytes]:
        requests, answers = cast(BinaryIO, process.stdin), cast(BinaryIO, process.stdout).fileno()
        send(requests, message, photo)
        with contextlib.ExitStack() as stack:
            while True:
                ends_at = time.monotonic() + MAX_WAIT * cpu_s
                length, num_bytes = _HEAD.unpack(self._read(answers, _HEAD.size, ends_at))
                answer, data = json.loads(self._read(answers, length, ends_at)), self._read(answers, num_bytes, ends_at)
                if "needs" not in answer:
                    return answer, data
                stack.enter_context(self._reserve(answer["needs"]))
                send(requests, {})

    def _read(self, pipe: int, num_bytes: int, ends_at: float) -> bytes:
        data = bytearray()
        poll = select.poll()  # `select` takes no file descriptor above 1023
        poll.register(pipe, select.POLLIN)
        while len(data) < num_bytes:
            if self._is_stopped():
                raise StoppedError("The photo was not decoded before the stop.")
            if time.monotonic() > ends_at:
                raise TimeoutError
            if poll.poll(TICK_S * 1000):
                if not (part := os.read(pipe, num_bytes - len(data))):
                    raise _EndedError
                data += part
        return bytes(data)


_idle: list[subprocess.Popen[bytes]] = []  # processes that wait for a photo, the one that was used last at the end


@atexit.register
def _end_all() -> None:
    while _idle:
        _end(_idle.pop())


def _end(process: subprocess.Popen[bytes]) -> int:
    """End a process; return its exit code, negative for a signal."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            cast(BinaryIO, pipe).close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(TICK_S)  # it may have ended by itself, and says why
    process.kill()
    return process.wait()


def _start() -> subprocess.Popen[bytes]:
    """Start a process, which Ctrl-C in the terminal does not reach; it has no settings of svdq: some are secret."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SVDQ_")}
    return subprocess.Popen(
        [sys.executable, "-m", "svdq.producer.decoder_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment | {"PYTHONSAFEPATH": "1"},  # else `-m` imports ./svdq of the current folder
        start_new_session=True,
    )


def send(pipe: BinaryIO, message: dict[str, Any], data: BinaryIO | None = None) -> None:
    """Write JSON, and the bytes of an open file behind it."""
    text = json.dumps(message).encode()
    num_bytes = 0 if data is None else data.seek(0, os.SEEK_END)
    pipe.write(_HEAD.pack(len(text), num_bytes) + text)
    if data is not None:
        data.seek(0)
        shutil.copyfileobj(data, pipe, 1 << 20)
    pipe.flush()


def receive(pipe: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read what `send` has written; None at the end."""
    if len(head := pipe.read(_HEAD.size)) < _HEAD.size:
        return None
    length, num_bytes = _HEAD.unpack(head)
    return json.loads(pipe.read(length)), pipe.read(num_bytes)
