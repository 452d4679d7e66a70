"""Finds the ffmpeg program and checks that it runs."""

import os
import shutil
import subprocess

from svdq.pipeline.errors import UnavailableError

#: How to install it.
ADVICE = "pip install imageio-ffmpeg, or set IMAGEIO_FFMPEG_EXE to an ffmpeg"


def find_ffmpeg() -> str:
    """Return the path of ffmpeg: from IMAGEIO_FFMPEG_EXE, from imageio-ffmpeg, or from the system, in this order.

    Raises:
        UnavailableError: there is no ffmpeg.
    """
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        # The base installation has no imageio-ffmpeg.
        if program := os.environ.get("IMAGEIO_FFMPEG_EXE") or shutil.which("ffmpeg"):
            return program
        raise UnavailableError(f"There is no ffmpeg on this machine; {ADVICE}.") from error


def ffmpeg_version() -> str:
    """Run ffmpeg and return its version, such as `ffmpeg version 7.0.2-static`.

    Raises:
        UnavailableError: there is no ffmpeg, or it does not run.
    """
    program = find_ffmpeg()
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"ffmpeg does not run ({error}); {ADVICE}.") from error
    return " ".join(done.stdout.split()[:3])
