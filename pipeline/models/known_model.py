"""What is known of a model that is not loaded: its name, family and facts. Does not import torch."""

from dataclasses import dataclass

from svdq.pipeline.models.family import Facts, Family
from svdq.pipeline.planning.binding import UnitCosts
from svdq.pipeline.video_parameters import VideoParameters


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model of a family, by the facts of its files or, where these are not known, of the published model."""

    name: str
    family: Family
    facts: Facts

    @property
    def usual(self) -> VideoParameters:
        """The parameters of a video whose job leaves all of them open."""
        return self.complete(self.family.parameters.model_validate({"seed": 0}))

    def complete(self, parameters: VideoParameters) -> VideoParameters:
        """Fill in what a job leaves open; raises InputError if this model cannot make such a video."""
        return self.family.fill_in(parameters, self.name, self.facts)

    def unit_costs(self, completed: VideoParameters) -> UnitCosts:
        """Return what the units of a video cost whose parameters are complete."""
        return self.family.unit_costs(completed, self.facts)
