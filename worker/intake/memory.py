"""The memory plan of a group, on rank 0: what the ranks have, and who says what videos take. Decides nothing."""

import json
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from svdq.pipeline.errors import InputError, UnavailableError
from svdq.pipeline.models.compute import ComputeOptions
from svdq.pipeline.models.memory_measured import WORKSPACE_BYTES, MeasuredMemory
from svdq.pipeline.models.memory_plan import MemoryPlan
from svdq.pipeline.models.memory_process import EstimatorProcess
from svdq.pipeline.models.memory_room import RESERVE_BYTES, rooms_of
from svdq.pipeline.models.memory_words import place
from svdq.pipeline.models.model import ModelInfo
from svdq.pipeline.models.model_index import is_svd
from svdq.pipeline.models.size_text import size_text

logger = logging.getLogger(__name__)


def start_estimates(
    model: str, dtype: torch.dtype, device: torch.device, compute: ComputeOptions, limit: int | None, *, fit: bool
) -> EstimatorProcess | None:
    """Begin to estimate, beside the loading of the model, where memory is limited and the model takes any to speak of.

    Options of memory that come to nothing here are said to.

    Args:
        model: as in SVDQ_MODEL.
        dtype: what it computes in.
        device: of rank 0.
        compute: how it computes.
        limit: bytes that the user grants each rank; None: what its GPU has.
        fit: whether the user wants videos changed that do not fit.
    """
    if not is_svd(model):
        asked = ["--memory-limit (SVDQ_MEMORY_LIMIT)"] * (limit is not None) + ["--fit-memory"] * fit
        if asked:
            logger.warning(
                "%s: of no effect with the model %s, which takes little memory; its videos are neither refused nor "
                "changed.",
                " and ".join(asked),
                model,
            )
        return None
    if limit is None and device.type != "cuda":
        if fit:
            logger.warning(
                "--fit-memory: of no effect on a processor without --memory-limit; no video is refused or changed."
            )
        return None
    return EstimatorProcess(model, dtype, device.type, compute)


def remembered(home: Path, info: ModelInfo, facts: Sequence[str]) -> MeasuredMemory:
    """Take up what groups like this one have measured.

    Args:
        home: SVDQ_HOME.
        info: the model.
        facts: what the ranks told, as `memory_room.look` found it, in JSON.
    """
    told = [json.loads(fact) for fact in facts]
    devices = sorted({fact["device"] for fact in told})
    identity = {
        "model": info.name,
        "compute": info.compute,
        "devices": devices,
        # A rank alone has the decoder beside the encoder.
        "is_alone": len(told) == 1,
        "versions": {name: version(name) for name in ("svdq", "torch", "diffusers")},
    }
    unseen = 0 if devices == ["cpu"] else WORKSPACE_BYTES
    # A limit is kept within a tenth, which is about what estimates are good for.
    slack = min(fact["limit"] // 10 if "limit" in fact else RESERVE_BYTES for fact in told)
    return MeasuredMemory(unseen, slack, home / "memory", identity)


def plan_of(
    home: Path, info: ModelInfo, facts: Sequence[str], estimates: EstimatorProcess | None, *, fit: bool
) -> MemoryPlan | None:
    """Make the plan of a group whose ranks have met; None where nothing is limited.

    Args:
        home: SVDQ_HOME.
        info: the model.
        facts: what the ranks told, as `memory_room.look` found it, in JSON.
        estimates: what the model takes.
        fit: change videos that do not fit, in place of refusing them.

    Raises:
        InputError: the weights alone need more than the user grants a rank.
    """
    rooms = rooms_of([json.loads(fact) for fact in facts])
    if estimates is None or not rooms:
        return None
    what = "changed to fit" if fit else "refused"
    smallest = min(room.capacity for room in rooms)
    logger.info("Ranks have at least %s of memory; videos that need more are %s.", size_text(smallest), what)
    plan = MemoryPlan(len(facts), rooms, estimates, fit=fit, measured=remembered(home, info, facts))
    _check_weights(plan, [json.loads(fact).get("limit") for fact in facts])
    return plan


def _check_weights(plan: MemoryPlan, limits: Sequence[int | None]) -> None:
    """Refuse limits under which every video would be refused; what a GPU has free may be more again tomorrow."""
    try:
        needs = [(plan.need(rank, None), rank, limit) for rank, limit in enumerate(limits) if limit is not None]
    except UnavailableError as error:
        logger.warning("Whether the weights fit is not known: %s", error)
        return
    need, rank, limit = max(needs, key=lambda found: found[0] - found[2], default=(0, 0, 0))
    if need > limit:
        raise InputError(
            f"The weights alone need {size_text(need)} {place((rank,), len(limits))}, and --memory-limit "
            f"(SVDQ_MEMORY_LIMIT) grants {size_text(limit) if limit >= 10**5 else f'{limit} bytes'}: every video would "
            "be refused; grant more, such as 24GB."
        )
