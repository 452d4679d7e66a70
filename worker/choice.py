"""Chooses the preset for some GPUs, and says which cards a model fits."""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_name import PRESETS, has_weights
from svdq.pipeline.models.names.sized_model import sized_model
from svdq.pipeline.models.needs import SizedModel
from svdq.pipeline.video_parameters import VideoParameters
from svdq.worker.cards import Cards
from svdq.worker.fit import NUM_VIDEOS, Way, ways

HOST_RESERVE_BYTES = 8 * 10**9  # of host memory, for everything but streamed weights
CARDS_GB = (8, 12, 16, 24, 32, 48, 80, 141)  # memory of usual cards, from the smallest


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A preset, and how to run it on some GPUs."""

    preset: str
    model: SizedModel  # what is to be fetched of it, among others
    way: Way  # the command of the worker, and the time of `NUM_VIDEOS` videos
    shape: str | None  # of the largest videos that fit, such as 640x352x81; None: the model's usual ones


def best_preset(cards: Cards, host_bytes: int, disk_bytes: float = math.inf) -> Choice | None:
    """Return the best preset for GPUs in a machine with so much host memory and free disk; None if none fits."""
    for each in tomllib.loads(Path(__file__).with_name("choice.toml").read_text(encoding="utf-8"))["try"]:
        preset, shape, streamed = each["preset"], each.get("shape"), each.get("streamed", False)
        model = sized_model(PRESETS[preset])
        way = _exact_way(model, cards, shape, streamed=streamed)
        has_room = way is not None and way.host_bytes + HOST_RESERVE_BYTES * streamed <= host_bytes
        if way is not None and has_room and model.download_bytes <= disk_bytes:
            return Choice(preset=preset, model=model, way=way, shape=shape)
    return None


def smallest_card_gb(model: SizedModel, *, streamed: bool = False) -> int | None:
    """Return the memory in GB of the smallest usual card that a model's usual video fits; None if none is enough."""
    cards = (Cards(number=1, total_bytes=gigabytes * 2**30) for gigabytes in CARDS_GB)
    found = (each for each in cards if _exact_way(model, each, None, streamed=streamed))
    card = next(found, None)
    return None if card is None else card.total_bytes // 2**30


def published_time_s(name: str, parameters: VideoParameters, num_videos: int) -> float | None:
    """Return the seconds in which the GPUs of this machine make videos, by published times; None: nobody knows.

    `name` is that of the model, as in SVDQ_MODEL.
    """
    if not has_weights(name) or (cards := Cards.here()) is None:
        return None
    try:
        model = sized_model(name)
        video = model.complete(parameters)
    except InputError:
        return None
    if (step := cards.step_of(model.published)) is None:
        return None
    return next((way.time_s for way in ways(model, video, cards, num_videos, step.step_s) if way.fits), None)


def _exact_way(model: SizedModel, cards: Cards, shape: str | None, *, streamed: bool) -> Way | None:
    """Return the best way to run a model that fits and is not approximate, streamed or not; None if there is none."""
    step = cards.step_of(model.published)
    found = ways(model, model.video(shape), cards, NUM_VIDEOS, step.step_s if step else None)
    return next((way for way in found if way.fits and not way.approximate and bool(way.host_bytes) == streamed), None)
