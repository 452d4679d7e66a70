"""How workers of a home compute unless they are told: the fastest exact way that was measured on its GPUs.

Without a measurement that is diffusers' own way. Approximate ways are never kept: whoever wants them says so each time.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from svdq.pipeline.models.compute import DEFAULTS, VARIANTS, ComputeOptions
from svdq.pipeline.models.model_index import is_svd
from svdq.producer.results.pages import write
from svdq.producer.settings import Settings
from svdq.worker.launching.gpus import gpu_names

logger = logging.getLogger(__name__)

FILE = "compute.json"
#: What is compared: diffusers as it is, and all that is exact up to rounding.
EXACT = [name for name, options in VARIANTS.items() if not options.approximate]
#: How many times eager's speed a way has to have to be worth its rounding; and one that is compiled, for minutes when a
#: shape first comes.
WORTH, WORTH_COMPILED = 1.03, 1.1
#: Largest difference of a step's result to eager's, over the largest value, that passes for rounding in float16.
ROUNDING = 0.01


class Kept(BaseModel):
    """What was measured, and what holds for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    #: Name of the GPU.
    device: str
    #: Versions of torch and diffusers.
    torch: str
    diffusers: str
    #: One of EXACT.
    option: str
    #: Eager's time over this one's.
    speedup: float

    @property
    def options(self) -> ComputeOptions:
        """How to compute."""
        return VARIANTS[self.option]


def best_of(device: str, figures: Iterable[Mapping[str, Any]]) -> Kept | None:
    """Give the fastest exact way; None where nothing is worth it.

    Args:
        device: name of the GPU.
        figures: what `svdq bench unet` measured in the type that workers compute in, as in its JSON.
    """
    good = [
        one
        for one in figures
        if not one["failure"]
        and one["option"] in EXACT
        # None: there was nothing to compare with, or no number.
        and None not in (one["speedup"], one["difference"])
        and one["speedup"] >= (WORTH if VARIANTS[one["option"]].compiled == "off" else WORTH_COMPILED)
        and one["difference"] <= ROUNDING
    ]
    if not good:
        return None
    best = max(good, key=lambda one: one["speedup"])
    return Kept(device=device, **_versions(), option=best["option"], speedup=best["speedup"])


def kept_way(settings: Settings, gpus: Sequence[str], num_hosts: int) -> ComputeOptions | None:
    """Give the way that was measured to be fastest on the GPUs of a group, and log it; None: nothing holds for them.

    Args:
        settings: of the worker.
        gpus: as `visible_gpus` names them.
        num_hosts: of the group; other hosts may not have what is kept here.
    """
    if not gpus or num_hosts > 1 or not is_svd(settings.model):
        return None
    names = gpu_names()
    # What has no number has no name that is known: then all GPUs have to be alike.
    numbers = [int(gpu) for gpu in gpus if gpu.isdigit() and int(gpu) < len(names)]
    kept = kept_for(settings.home, [names[number] for number in numbers] if len(numbers) == len(gpus) else names)
    if kept is None:
        return None
    logger.info(
        "Computing with %s, which `svdq bench unet --keep` found %.2f times as fast as diffusers' own way on this %s; "
        "--compile off goes back to that.",
        ", ".join(kept.options.changed()),
        kept.speedup,
        kept.device,
    )
    return kept.options


def keep(home: Path, kept: Kept | None) -> None:
    """Have workers of a home compute so, or, with None, as diffusers does.

    Raises:
        InputError: the file cannot be written.
    """
    path = home / FILE
    if kept is None:
        path.unlink(missing_ok=True)
        return
    home.mkdir(parents=True, exist_ok=True)
    write(path, [kept.model_dump_json(indent=2) + "\n"])


def kept_for(home: Path, devices: Sequence[str]) -> Kept | None:
    """Give what is kept if all GPUs are of the kind that was measured, with the same libraries."""
    try:
        kept = Kept.model_validate_json((home / FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    is_ours = set(devices) == {kept.device} and _versions() == {"torch": kept.torch, "diffusers": kept.diffusers}
    return kept if is_ours and kept.option in EXACT and kept.options != DEFAULTS else None


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "diffusers")}
