"""What a job costs on a group: by its parameters as the group's model completes them, and by what it has measured."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs, Shape, ShapeCosts, UpscaleCosts
from svdq.producer.status.ranks import GroupStatus, RankStatus

if TYPE_CHECKING:
    from svdq.pipeline.models.known_model import KnownModel
    from svdq.pipeline.video_parameters import VideoParameters

Parameters = Mapping[str, Any]  # of a job, as JSON: as submitted, or completed by its worker

MAX_SCALE = 2.0  # largest factor by which costs are scaled to a shape of another size, as they do not grow evenly
#: Parameters that decide neither which units a video has nor what they cost.
_WITHOUT_COST = frozenset(
    {
        "seed",
        "prompt",
        "negative_prompt",
        "image",
        "name",
        "folder",
        "formats",
        "fit",
        "boomerang",
        "mark",
        "model",
        "chained",
    }
)

Kind = tuple[tuple[str, str], ...]  # what decides the costs of a video: jobs of a queue have few kinds


def kind_of(parameters: Parameters) -> Kind:
    """Return what decides the costs of a video."""
    return tuple((name, repr(value)) for name, value in parameters.items() if name not in _WITHOUT_COST)


def known_of(rank: RankStatus, family_name: str) -> "KnownModel | None":
    """Return the model of a rank 0; one that makes videos of all families as of a family; None for a newer version."""
    # Imported here, and below, since `svdq status` estimates nothing while there are no jobs.
    from svdq.pipeline.models.families import FAMILIES
    from svdq.pipeline.models.known_model import KnownModel

    family = next((each for each in FAMILIES if each.name == (rank.family or family_name)), None)
    if family is None:
        return None
    # One that makes videos of all families, or of an earlier version, says little of its model.
    facts = rank.facts if rank.family and rank.facts else {**family.published, **rank.facts}
    return KnownModel(name=rank.model, family=family, facts=facts)


class GroupCosts:
    """The costs of videos on one group."""

    def __init__(self, group: GroupStatus) -> None:
        self.group = group
        self._found: dict[Kind, VideoCosts | None] = {}
        self._published: set[Kind] = set()

    def is_published(self, parameters: Parameters) -> bool:
        """Return whether the costs of a video are as published for such a GPU, since nothing similar was measured."""
        return self.of(parameters) is not None and kind_of(parameters) in self._published

    def of(self, parameters: Parameters) -> VideoCosts | None:
        """Return the costs of a video; None if they are not known, or the group cannot make it."""
        kind = kind_of(parameters)
        if kind not in self._found:
            self._found[kind] = self._costs_of(parameters)
        return self._found[kind]

    def _costs_of(self, parameters: Parameters) -> VideoCosts | None:
        intake = self.group.intake
        if intake is None or (found := self._units(parameters)) is None:
            return None
        shape, steps, published = found
        upscale_s = _upscale_s(shape, intake.upscales) if shape.upscale else 0.0
        costs = _nearest(shape, intake.costs)
        if parameters.get("finishes"):  # it is denoised already
            decode_s = costs.decode_s if costs is not None and intake.keeps_latents else 0.0
            steps, costs = (), Costs(step_s=(1.0,) * len(self.group.ranks), decode_s=decode_s)
        if costs is None and published is not None:
            costs = published
            self._published.add(kind_of(parameters))
        if costs is None or upscale_s is None:
            return None
        costs = costs.model_copy(update={"decode_s": costs.decode_s + upscale_s})
        return VideoCosts(steps=len(steps), step_costs=steps, costs=costs)

    def _units(self, parameters: Parameters) -> tuple[Shape, tuple[float, ...], Costs | None] | None:
        """Return the shape of a video that the group can make, the relative costs of its steps, and published times."""
        from svdq.pipeline.models.families import DEFAULT_FAMILY, PARAMETERS, class_for

        try:
            cls = class_for(parameters, PARAMETERS)
            given = {name: parameters[name] for name in cls.model_fields if name in parameters}
            known = known_of(self.group.ranks[0], str(parameters.get("family") or DEFAULT_FAMILY))
            if known is None:
                return None
            # Anyone may have written the facts, too: what they fill in has the same limits.
            completed: VideoParameters = cls.model_validate(known.complete(cls.model_validate(given)).model_dump())
            step_s = self.group.ranks[0].published_step_s
            published = known.video_costs(completed, step_s).costs if step_s else None
            return Shape.of(completed), tuple(known.unit_costs(completed).steps), published
        except Exception:  # noqa: BLE001 - hostile facts raise any type; InputError: the group cannot make it
            return None


def _nearest(shape: Shape, measured: tuple[ShapeCosts, ...]) -> Costs | None:
    """Return the measured costs of a shape, scaled from a similar one; None if there is none."""
    if not measured:
        return None
    nearest = min(
        reversed(measured), key=lambda costs: (costs.guided != shape.guided, abs(math.log(_scale(shape, costs))))
    )
    factor = _scale(shape, nearest)
    if not 1 / MAX_SCALE <= factor <= MAX_SCALE:
        return None
    # Guidance doubles the batch of a step.
    step_factor = factor * {(True, False): 2.0, (False, True): 0.5}.get((shape.guided, nearest.guided), 1.0)
    return nearest.scaled(step=step_factor, encode=factor, decode=factor)


def _upscale_s(shape: Shape, measured: tuple[UpscaleCosts, ...]) -> float | None:
    """Return the seconds of upscaling a video, scaled from a similar one; None if there is none."""
    if not measured:
        return None
    nearest = min(reversed(measured), key=lambda costs: abs(math.log(_scale(shape, costs))))
    factor = _scale(shape, nearest)
    return nearest.seconds * factor if 1 / MAX_SCALE <= factor <= MAX_SCALE else None


def _scale(shape: Shape, costs: ShapeCosts | UpscaleCosts) -> float:
    return shape.width * shape.height * shape.frames / (costs.width * costs.height * costs.frames)
