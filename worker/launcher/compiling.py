"""What a rank with a compiled UNet needs around it: a place for what was compiled, and patience. Knows no model."""

import os
from pathlib import Path

from svdq.pipeline.models.options import ComputeOptions

#: Seconds that compiling for a shape may take before a rank counts as hanging.
COMPILE_S = 3 * 60 * 60.0


def prepare(home: Path, num_ranks: int) -> None:
    """Have torch keep what it compiles under a home, so that the next start need not; before torch compiles anything.

    What is kept is code that ranks run: the folder is the user's alone.

    Args:
        home: SVDQ_HOME.
        num_ranks: ranks of this host, which share its cores.
    """
    folder = home / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # Each rank would start a compiling process for every core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))


def stall_s(usual_s: float, options: ComputeOptions) -> float:
    """Give the seconds that the first step of a shape may take."""
    return usual_s if options.compiled == "off" else max(usual_s, COMPILE_S)
