"""Registers a family of toy parameters in every process that has this folder on its PYTHONPATH."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from svdq.pipeline.models import families
from svdq.pipeline.models.family import Family
from svdq.pipeline.planning.binding import Segment, UnitCosts
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.video_parameters import ChunkSize, Fps, Frames, Seed, Steps, VideoParameters, side

Side = Annotated[int, side(8)]


class ToyParameters(VideoParameters):
    """The usual parameters, and one that no other family has."""

    title: ClassVar[str] = "Toy"
    side_multiple: ClassVar[int] = 8
    usual: ClassVar[tuple[int, int]] = (9, 8)

    family: Literal["toy"] = "toy"
    frames: Frames = 9
    steps: Steps = 4
    width: Side = 64
    height: Side = 64
    fps: Fps = 8
    sparkle: int = Field(default=0, ge=0, le=9, description="Sparkle of every frame")
    decode_chunk_size: ChunkSize = None
    seed: Seed

    @property
    def guided(self) -> bool:
        return False


def complete(parameters: Any, _facts: Any) -> Any:
    return parameters


TOY = Family(
    name="toy",
    parameters=ToyParameters,
    layouts={},
    model="toys:ToyModel",
    tiny="toys:write",
    encoded=(),
    half="fp16",
    published_as="toy-",
    published={},
    models={},
    num_blocks=lambda _: None,
    unit_costs=lambda video, _facts: UnitCosts(
        segments=(Segment(component="toy", start=0, stop=video.steps),), step_work=1.0
    ),
    read_facts=lambda _folder, _name: {},
    complete=complete,
    prior=lambda _: CostPrior(encode_steps=1.0, decode_steps=1.0),
    memory=lambda *_, **__: 0,
)
families.FAMILIES = (*families.FAMILIES, TOY)
families.PARAMETERS = {**families.PARAMETERS, TOY.name: ToyParameters}
