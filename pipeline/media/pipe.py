"""Runs ffmpeg on the frames of a video. Does not use torch."""

import errno
import os
import subprocess
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from svdq.pipeline.errors import SampleError, UnavailableError
from svdq.pipeline.media.ffmpeg import ADVICE, find_ffmpeg

#: Errors that keep an existing program from starting temporarily: too little memory, processes or open files.
_SHORTAGES = frozenset({errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE})
#: Conditions of the machine, not the video: found in ffmpeg's message, raised as OSError, worth a retry.
_MACHINE_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOMEM,
    errno.EMFILE,
    errno.EFBIG,
)


def run_ffmpeg(frames: NDArray[np.uint8], fps: int, arguments: Sequence[str], more_inputs: Sequence[str] = ()) -> bytes:
    """Run ffmpeg on one thread with frames (F, H, W, 3) as its first input, and return its standard output.

    Raises:
        SampleError: ffmpeg refuses the frames, or it cannot be started.
        OSError: a condition such as a full disk; the same call may succeed later.
    """
    _, height, width, _ = frames.shape
    options = ["-hide_banner", "-loglevel", "error", "-y", "-threads", "1", "-filter_threads", "1"]
    options += ["-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-framerate", f"{fps}"]
    options += ["-i", "pipe:0", *more_inputs, "-threads", "1", *arguments]
    with _start_ffmpeg(options) as process:
        # As a view: a copy of all frames would hold the GIL for milliseconds.
        output, messages = process.communicate(np.ascontiguousarray(frames).reshape(-1).data)  # type: ignore[arg-type]
    if process.returncode:
        _raise_for(process.returncode, messages.decode(errors="replace").strip())
    return output


def _start_ffmpeg(arguments: list[str]) -> "subprocess.Popen[bytes]":
    try:
        # A separate session: Ctrl-C in the terminal is for the worker, which finishes the videos in flight.
        return subprocess.Popen(
            [find_ffmpeg(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except UnavailableError as error:
        raise SampleError(str(error)) from error
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        # Not an OSError, which would be retried without end.
        raise SampleError(f"ffmpeg cannot be started ({error}); {ADVICE}.") from error


def _raise_for(status: int, messages: str) -> None:
    """Raise the exception for ffmpeg's exit status and messages."""
    for code in _MACHINE_ERRORS:
        if os.strerror(code) in messages:
            raise OSError(code, f"ffmpeg could not write the video: {os.strerror(code)}")
    if status < 0:
        # Killed from outside, for memory or by a person; the video itself may be fine.
        raise OSError(errno.ECANCELED, f"ffmpeg was stopped by signal {-status}")
    last_line = messages.splitlines()[-1] if messages else f"exit status {status}"
    raise SampleError(f"ffmpeg could not encode the video ({last_line}).")
