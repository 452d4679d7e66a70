"""A model that was found and checked, by which a launcher says to its ranks what to load. Without torch."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from svdq.pipeline.planning.binding import Segment, parse_segments, split_steps
from svdq.pipeline.planning.costs import CostPrior


def _parsed(segments: object) -> object:
    """Parse the text in a model's name; JSON has numbers."""
    return parse_segments(segments) if isinstance(segments, str) else segments


def _parsed_costs(costs: object) -> object:
    return [float(cost) for cost in costs.split("+")] if isinstance(costs, str) else costs


class Timings(BaseModel):
    """The simulated costs of a model: of a denoising step, an encode and a decode, in milliseconds."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid")

    step_ms: float = Field(50.0, ge=0)
    encode_ms: float = Field(0.0, ge=0)
    decode_ms: float = Field(0.0, ge=0)
    load_ms: float = Field(0.0, ge=0)  # milliseconds of loading a set of components, in rounds
    #: Two experts, each of which does some of the steps: 15+25 of 40, and of other numbers in proportion.
    segments: Annotated[tuple[int, int], BeforeValidator(_parsed)] | None = None
    #: The costs of successive steps, relative to `step_ms`, such as 1+1+0+4; the others cost 1. See `Segment.costs`.
    costs: Annotated[tuple[Annotated[float, Field(ge=0)], ...], BeforeValidator(_parsed_costs)] = ()
    slowdown: float = Field(1.0, gt=0)  # factor by which this rank's steps are slower than `step_ms`

    def segments_of(self, num_steps: int) -> tuple[Segment, ...]:
        """Return the segment of each simulated expert of a video; an empty one is left out."""
        first = num_steps if self.segments is None else split_steps(num_steps, self.segments)[0]
        costs = self.costs and (*self.costs, *[1.0] * num_steps)[:num_steps]
        segments = (
            Segment(component="simulated", start=0, stop=first, costs=costs[:first]),
            Segment(component="simulated_2", start=first, stop=num_steps, costs=costs[first:]),
        )
        return tuple(segment for segment in segments if segment.start < segment.stop)

    @property
    def prior(self) -> CostPrior:
        """What encode and decode cost before they are measured."""
        step_ms = max(self.step_ms, 0.01)
        return CostPrior(
            encode_steps=self.encode_ms / step_ms, decode_steps=self.decode_ms / step_ms, step_s=step_ms / 1000
        )


class LoraFile(BaseModel):
    """One LoRA of a component."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid")

    file: Path
    component: str
    strength: float = 1.0  # factor on all that it adds

    def __str__(self) -> str:
        return f"{self.file.name} x {self.strength:g}"


class ResolvedModel(BaseModel):
    """A folder that a family of models reads, or a model made in code: simulated if it has timings, else preview."""

    # Schedulers have infinite settings.
    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", ser_json_inf_nan="constants")

    name: str  # the name it was asked for by, as in sidecars and messages
    folder: Path | None = None  # or snapshot in the hub's cache; None: made in code, as are the next four
    family: str | None = None  # name of the family whose videos it makes; None: any family
    layout: str | None = None  # the pipeline class in its model_index.json, by which its family has its layout
    facts: dict[str, Any] = {}  # what its family has read from its configs
    fingerprint: str | None = None  # hash of weights and configs; None: for no known devices
    base: str | None = None  # the base that a model file names, of which the folder is; None: no model file
    weights: dict[str, Path] = {}  # files in place of a component's weights in the folder, by component
    formats: tuple[str, ...] = ()  # titles of the formats that files of its denoising components are quantized in
    loras: tuple[LoraFile, ...] = ()  # LoRAs, in the order in which they are added
    timings: Timings | None = None

    def described(self) -> dict[str, Any]:
        """Return for sidecars what a model file changed of the folder."""
        described: dict[str, Any] = {}
        if self.base is not None:  # of a folder only the name: sidecars are passed on
            described["base"] = Path(self.base).name if Path(self.base).is_absolute() else self.base
        if self.weights:
            described["weights"] = {component: file.name for component, file in self.weights.items()}
        if self.loras:
            described["loras"] = [lora.model_dump() | {"file": lora.file.name} for lora in self.loras]
        named = ("sigmas", "stage_2_sigmas", "is_ancestral", "switch_at", "step_cache")
        return described | {name: self.facts[name] for name in named if name in self.facts}
