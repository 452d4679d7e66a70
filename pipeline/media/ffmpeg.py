"""Finds and runs ffmpeg. Does not import numpy or torch."""

import errno
import os
import shutil
import subprocess
from collections.abc import Sequence

from svdq.pipeline.errors import SampleError, UnavailableError

ADVICE = "pip install imageio-ffmpeg, or set IMAGEIO_FFMPEG_EXE to an ffmpeg"


def find_ffmpeg() -> str:
    """Return the path of ffmpeg: from IMAGEIO_FFMPEG_EXE, from imageio-ffmpeg, or from the system, in this order."""
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        # The base installation has no imageio-ffmpeg.
        if program := os.environ.get("IMAGEIO_FFMPEG_EXE") or shutil.which("ffmpeg"):
            return program
        raise UnavailableError(f"There is no ffmpeg on this machine; {ADVICE}.") from error


def ffmpeg_version() -> str:
    """Return ffmpeg's version, such as `ffmpeg version 7.0.2-static`; raises UnavailableError if it does not run."""
    program = find_ffmpeg()
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"ffmpeg does not run ({error}); {ADVICE}.") from error
    return " ".join(done.stdout.split()[:3])


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


def run_ffmpeg(arguments: Sequence[str], data: memoryview | None = None) -> bytes:
    """Run ffmpeg with arguments, and `data` as its standard input; return its output.

    Raises as `svdq.pipeline.media.video.write_video`.
    """
    with _start_ffmpeg(["-hide_banner", "-loglevel", "error", "-y", *arguments]) as process:
        output, messages = process.communicate(data)  # type: ignore[arg-type]  # takes any buffer
    if process.returncode:
        _raise_for(process.returncode, messages.decode(errors="replace").strip())
    return output


def _start_ffmpeg(arguments: list[str]) -> subprocess.Popen[bytes]:
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
    for code in _MACHINE_ERRORS:
        if os.strerror(code) in messages:
            raise OSError(code, f"ffmpeg could not write the video: {os.strerror(code)}")
    if status < 0:
        # Killed from outside, for memory or by a person; the video itself may be fine.
        raise OSError(errno.ECANCELED, f"ffmpeg was stopped by signal {-status}")
    last_line = messages.splitlines()[-1] if messages else f"exit status {status}"
    raise SampleError(f"ffmpeg could not encode the video ({last_line}).")
