"""How workers of a home compute unless they are told: the fastest exact way that was measured on its GPUs.

Without a measurement that is diffusers' own way. Approximate ways are never kept: whoever wants them says so each time.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from svdq.pipeline.models.compute import DEFAULTS, VARIANTS, ComputeOptions

FILE = "compute.json"
#: How much faster than eager a way has to be to be worth its rounding.
WORTH = 1.03
#: Largest difference of a step's result to eager's, over the largest value, that passes for rounding.
ROUNDING = 0.05


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What was measured, and what holds for it."""

    #: Name of the GPU.
    device: str
    #: Versions of torch and diffusers.
    torch: str
    diffusers: str
    #: One of `compute.VARIANTS`.
    option: str
    #: Eager's time over this one's.
    speedup: float

    @property
    def options(self) -> ComputeOptions:
        """How to compute."""
        return VARIANTS[self.option]


def keep(home: Path, device: str, figures: Iterable[Mapping[str, Any]]) -> Kept | None:
    """Keep the fastest exact way; None where eager is: nothing is kept then.

    Args:
        home: SVDQ_HOME.
        device: name of the GPU.
        figures: what `svdq bench unet` measured in the type that workers compute in, as in its JSON.
    """
    good = [
        one
        for one in figures
        if not one["failure"]
        and not VARIANTS[one["option"]].approximate
        and one["speedup"] >= WORTH
        and one["difference"] <= ROUNDING
    ]
    path = home / FILE
    if not good:
        path.unlink(missing_ok=True)
        return None
    best = max(good, key=lambda one: one["speedup"])
    kept = Kept(device=device, **_versions(), option=best["option"], speedup=best["speedup"])
    home.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(kept), indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return kept


def kept_for(home: Path, devices: Iterable[str]) -> Kept | None:
    """Give what is kept if all GPUs are of the kind that was measured, with the same libraries."""
    try:
        kept = Kept(**json.loads((home / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    is_ours = set(devices) == {kept.device} and _versions() == {"torch": kept.torch, "diffusers": kept.diffusers}
    is_exact = VARIANTS.get(kept.option, DEFAULTS) != DEFAULTS and not kept.options.approximate
    return kept if is_ours and is_exact else None


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "diffusers")}
