"""What is known of models that are not loaded: their names, families and facts. Does not import torch."""

from dataclasses import dataclass, field
from functools import cached_property

from svdq.pipeline.models.family import Facts, Family
from svdq.pipeline.planning.binding import UnitCosts
from svdq.pipeline.planning.capacity import VideoCosts
from svdq.pipeline.planning.costs import Costs
from svdq.pipeline.video_parameters import VideoParameters


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model of a family, by the facts of its files or, where these are not known, of the published model."""

    name: str
    family: Family = field(hash=False)
    facts: Facts = field(hash=False)
    is_assumed: bool = False  # whether its own facts are not known, and the published model's stand for them
    is_configured: bool = False  # whether the settings name it

    @cached_property
    def usual(self) -> VideoParameters:
        """The parameters of a video whose job leaves all of them open."""
        return self.family.usual(self.facts)

    def complete(self, parameters: VideoParameters) -> VideoParameters:
        """Fill in what a job leaves open; raises InputError if this model cannot make such a video."""
        return self.family.fill_in(parameters, self.name, self.facts)

    @property
    def takes_last_photo(self) -> bool:
        """Whether it takes a photo of the last frame, as far as is known."""
        return self.is_assumed or self.family.takes_last_photo(self.facts)

    def threshold_for(self, parameters: VideoParameters, speedup: str) -> float:
        """Return the step_cache with which it makes a video as many times as fast as `1.5x` says."""
        assert self.family.threshold_for is not None, "other families have no step_cache"
        return self.family.threshold_for(parameters, self.facts, float(speedup.removesuffix("x")))

    def unit_costs(self, completed: VideoParameters) -> UnitCosts:
        """Return what the units of a video cost whose parameters are complete."""
        return self.family.unit_costs(completed, self.facts)

    def video_costs(self, completed: VideoParameters, step_s: float = 1.0) -> VideoCosts:
        """Return the costs of a video by the seconds of a step of the published model's usual video.

        Where the model has two experts, each rank holds one of them.
        """
        units, prior = self.unit_costs(completed), self.family.prior(self.facts)
        usual = self.family.usual({**self.facts, "defaults": {}})
        pixels = [each.width * each.height * each.num_frames for each in (completed, usual)]
        linear = pixels[0] / pixels[1]
        costs = Costs(step_s=(step_s,), encode_s=prior.encode_steps * step_s, decode_s=prior.decode_steps * step_s)
        factor = units.step_work / self.unit_costs(usual).step_work
        return VideoCosts.of(units.segments, costs.scaled(step=factor, encode=linear, decode=linear))


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is known of the models that will make new videos."""

    model: KnownModel | None = None  # decides the family of videos whose parameters do not
    families: tuple[str, ...] = ()  # of the workers' models: where several families fit, one of these is chosen
    unknown: str = ""  # why there is no model, as a clause; "" where there is one, or any will do


NOT_KNOWN = Expected()
