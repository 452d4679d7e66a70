"""What is known of a model that is not loaded: its name, family and facts. Does not import torch."""

from dataclasses import dataclass, field
from functools import cached_property

from svdq.pipeline.models.family import Facts, Family
from svdq.pipeline.planning.binding import UnitCosts
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

    def unit_costs(self, completed: VideoParameters) -> UnitCosts:
        """Return what the units of a video cost whose parameters are complete."""
        return self.family.unit_costs(completed, self.facts)
