"""The ffmpeg program: where it is and whether it runs. Knows no videos, and imports nothing that a laptop lacks."""

import subprocess

from svdq.pipeline.errors import UnavailableError

#: What a person can do who has none.
ADVICE = "pip install imageio-ffmpeg, or set IMAGEIO_FFMPEG_EXE to an ffmpeg"


def find_ffmpeg() -> str:
    """Find the program: the one that IMAGEIO_FFMPEG_EXE names, whatever that is, or imageio-ffmpeg's, or the system's.

    Raises:
        UnavailableError: there is none.
    """
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise UnavailableError(f"There is no ffmpeg on this machine; {ADVICE}.") from error


def ffmpeg_version() -> str:
    """Run the program, and give what it calls itself, such as `ffmpeg version 7.0.2-static`.

    Raises:
        UnavailableError: there is none, or it does not run.
    """
    program = find_ffmpeg()
    try:
        done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"ffmpeg does not run ({error}); {ADVICE}.") from error
    return " ".join(done.stdout.split()[:3])
