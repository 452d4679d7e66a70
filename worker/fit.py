"""Answers what a model needs of some GPUs: bytes to fetch, which ways of holding it fit, and how long videos take.

For `svdq doctor` and `svdq plan`, without torch, and for published models without any file.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.memory import CONTEXT_BYTES, RESERVE_BYTES, size_text
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.lora_folder import KEPT_BYTES as KEPT_LORA_BYTES
from svdq.pipeline.models.names.pull import cache_folder
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.needs import Residency, SizedModel
from svdq.pipeline.models.weights.model_folder import DTYPES
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.rounds import LOAD_SHARE
from svdq.pipeline.video_parameters import VideoParameters
from svdq.producer.settings import Settings
from svdq.producer.text import count
from svdq.worker.cards import Cards
from svdq.worker.config import RankConfig

NUM_VIDEOS = 300  # for which times are given unless a number is
#: Host memory that pinned weights take, in sizes of their own: torch rounds each tensor up to a power of two.
#: 44 GB for the 28.6 GB of an expert of 14 billion weights (docs/models.md).
PINNED = 1.54


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run a model on some GPUs; fields have the names of the JSON."""

    command: str
    need_bytes: int  # of the rank that needs most
    host_bytes: int  # of host memory, pinned, from which blocks are streamed
    fits: bool
    approximate: bool  # whether weights are made int8 at load
    in_parts: bool  # whether it fits only if frames are decoded one at a time, or in tiles
    time_s: float | None  # of all videos; None: no time of a step is known


def to_fetch(model: SizedModel) -> str:
    """Return text about the bytes to fetch and to convert, and about files that are missing; "" if all are here."""
    converted = sum(map(replace(model, kept=False).weights, model.num_weights))
    is_smaller = not model.stored and model.download_bytes > 1.1 * converted
    unsized = f"{count(model.unsized_files, 'file')} of unknown size" if model.unsized_files else ""
    fetched = " and ".join(filter(None, [size_text(model.download_bytes) if model.download_bytes else "", unsized]))
    parts = [
        fetched and f"{fetched} to fetch",
        f"`svdq model convert` makes a copy of {size_text(converted)}" if is_smaller else "",
        f"{count(model.missing_files, 'file')} that the model file names missing" if model.missing_files else "",
    ]
    return "; ".join(filter(None, parts))


def lack_of_disk(model: SizedModel) -> str:
    """Say in a clause that the disk has no room for what is to be fetched; "" if it has, or nothing can be fetched."""
    try:
        folder = cache_folder()
    except InputError:
        return ""
    free = shutil.disk_usage(folder).free
    return f"only {size_text(free)} free in {folder}" if free < model.download_bytes else ""


def ways(model: SizedModel, video: VideoParameters, cards: Cards, num_videos: int, step_s: float | None) -> list[Way]:
    """Return the ways to run a model on GPUs, those first that change least: the first that fits is the best.

    `step_s` is the time of a step of the published model's usual video; None: it is not known.
    """
    number, usual, costs = cards.number, model.video_costs(model.video()), model.video_costs(video, step_s or 1.0)
    times = {
        "resident": replace(costs, segments=None).time_s,
        "bound": costs.time_s,
        "rounds": costs.rounds_time_s,
    }
    found = []
    for options, candidate in _options(model):
        for residency in _residencies(candidate, usual, number):
            is_chosen = model.has_experts or residency == "rounds"
            layout = f" --groups {number} --ranks 1" * (residency == "rounds" and number > 1)
            command = f"svdq worker{layout}{f' --experts {residency}' * is_chosen}{options}"
            made = replace(candidate, kept=False)  # which is what a worker does where there is room
            if residency != "rounds" and made.least(video, residency, number) <= cards.room_bytes:
                candidate = made
            need = candidate.least(video, residency, number)
            whole = candidate.least(video.model_copy(update={"decode_chunk_size": None}), residency, number)
            found.append(
                Way(
                    command=command,
                    need_bytes=need,
                    host_bytes=round(model.denoisers(residency) * number * PINNED) if candidate.streamed else 0,
                    fits=need <= cards.room_bytes,
                    approximate=candidate.int8,
                    in_parts=need <= cards.room_bytes < whole,
                    time_s=None if step_s is None else times[residency](number, num_videos),
                )
            )
    return found


def faster_in_rounds(name: str, options: ComputeOptions, cards: Cards) -> float:
    """Return the share by which a group in rounds for each GPU is faster than one whose ranks are bound to experts.

    It is 0 or less where all of the model fits a GPU, or a part of it does not; infinite where only rounds fit.
    """
    model = _with_options(sized_model(name), options)
    if not model.has_experts:
        return 0.0
    video = model.video()
    if not model.least(video, "rounds", 1) <= cards.room_bytes < model.least(video, "resident", 1):
        return 0.0
    if model.least(video, "bound", cards.number) > cards.room_bytes:
        return math.inf
    return model.video_costs(video).faster_in_rounds(cards.number)


def least_need(name: str, options: ComputeOptions, experts: str, num_ranks: int) -> int:
    """Return the least free bytes of a GPU with which a rank makes the usual video; 0: the model takes little.

    `experts` is the option of the worker; by `auto`, the way that needs least of those that it may choose counts.
    """
    try:
        model = _with_options(sized_model(name), options)
    except InputError:
        return 0
    residency: Residency = "resident"
    if experts == "rounds" or (experts == "auto" and model.has_experts and num_ranks == 1):
        residency = "rounds"
    elif model.has_experts and experts != "resident":
        residency = "bound"
    return model.least(model.video(), residency, num_ranks) + CONTEXT_BYTES + RESERVE_BYTES


def least_free(settings: Settings, config: RankConfig, num_ranks: int) -> int:
    """Return the least free bytes of a GPU with which a rank is started beside other programs; 0: any number."""
    need = least_need(settings.model, config.compute, config.experts, num_ranks)
    if need and settings.loras is not None and config.compute.may_keep:
        need += KEPT_LORA_BYTES
    if need and settings.upscaler is not None:
        need += Path(settings.upscaler).stat().st_size
    limit = settings.memory_limit
    return need if limit is None else min(need, limit + CONTEXT_BYTES + RESERVE_BYTES)


def _with_options(model: SizedModel, options: ComputeOptions) -> SizedModel:
    return replace(
        model,
        dtype=model.dtype if options.dtype == "auto" else DTYPES[options.dtype],
        int8="int8" in options.approximate,
        streamed=options.offload == "blocks",
        kept=model.kept and options.may_keep,
    )


def _residencies(model: SizedModel, usual: VideoCosts, number: int) -> list[Residency]:
    """Return the ways to hold a model, those first that `svdq worker` chooses or advises by its usual video."""
    found: list[Residency] = ["resident"]
    if model.has_experts or model.has_text:
        found.append("rounds")
    if model.has_experts and number > 1:
        found.insert(2 if usual.faster_in_rounds(number) > (LOAD_SHARE if number > 2 else 0) else 1, "bound")
    # Streamed experts take host memory, both twice as much.
    return [*found[1:], "resident"] if model.streamed and model.has_experts else found


def _options(model: SizedModel) -> Iterator[tuple[str, SizedModel]]:
    yield "", model
    yield " --approximate int8", replace(model, int8=True)
    if model.has_blocks:
        yield " --offload blocks", replace(model, streamed=True)
