"""The toy family: its parameters, folder, costs and memory. Does not import torch."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from svdq.pipeline.models.compute.memory import ITEM_BYTES, Activity, MemoryShape
from svdq.pipeline.models.family import Facts, Family, FolderLayout, PublishedModel
from svdq.pipeline.models.weights.model_folder import read_json
from svdq.pipeline.planning.binding import Segment, UnitCosts
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.video_parameters import MAIN, ChunkSize, Fps, Frames, Seed, Steps, VideoParameters, side

BLOCK = 8  # pixels of a latent's side
COARSE, FINE, CODEC = "coarse", "fine", "codec"  # two experts, and what encodes and decodes
FINE_PASSES = 2  # of the fine expert in each of its steps; the coarse one has one

Side = Annotated[int, side(BLOCK)]


class ToyParameters(VideoParameters):
    """The usual parameters, sound, and a parameter that no other family has."""

    title: ClassVar[str] = "Toy"
    side_multiple: ClassVar[int] = BLOCK
    usual: ClassVar[tuple[int, int]] = (9, 8)

    family: Literal["toy"] = "toy"
    frames: Frames = None  # None means the model's default
    steps: Steps = 4
    width: Side = 64
    height: Side = 64
    fps: Fps = 8
    sparkle: int = Field(
        default=0, ge=0, le=9, title="Glitter", description="Sparkle of every frame", json_schema_extra=MAIN
    )
    sound: bool = Field(default=True, exclude_if=bool, description="Write the hum that the model makes with the video")
    decode_chunk_size: ChunkSize = None
    seed: Seed

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance is on: a toy has none."""
        return False


LAYOUT = FolderLayout(
    pipeline="ToyPipeline",
    example="toys/toy",
    components={COARSE: ("ToyExpert",), FINE: ("ToyExpert",), CODEC: ("ToyCodec",)},
    modules=("toy.model",),
    denoisers=frozenset({COARSE, FINE}),
    phases={"encode": frozenset({CODEC}), "decode": frozenset({CODEC})},
    weighted=(COARSE, FINE, CODEC),
)
PUBLISHED: dict[str, Any] = {"num_frames": 9, "channels": 8, "sound_rate": 8000}
_NUM_WEIGHTS = {COARSE: 1160, FINE: 1160, CODEC: 3083}
MODELS = {
    LAYOUT.example: PublishedModel(
        layout=LAYOUT.pipeline, facts=PUBLISHED, num_weights=_NUM_WEIGHTS, stored=dict.fromkeys(_NUM_WEIGHTS, 4)
    )
}


def read_facts(folder: Path, name: str) -> Facts:
    """Return what PUBLISHED has, of a model folder."""
    config = read_json(folder, f"{CODEC}/config.json", name)
    return {setting: config.get(setting, published) for setting, published in PUBLISHED.items()}


def complete(parameters: VideoParameters, facts: Facts) -> VideoParameters:
    """Fill in the number of frames."""
    defaults = {"frames": facts["num_frames"]} | facts.get("defaults", {})
    open_ones = {name: value for name, value in defaults.items() if getattr(parameters, name) is None}
    return parameters.model_copy(update=open_ones)


def unit_costs(parameters: VideoParameters, facts: Facts) -> UnitCosts:
    """Return a segment of each expert, which does half of the steps; one step is the coarse expert's."""
    half, steps = (parameters.steps + 1) // 2, parameters.steps
    fine = Segment(component=FINE, start=half, stop=steps, costs=(float(FINE_PASSES),) * (steps - half))
    return UnitCosts(
        segments=(Segment(component=COARSE, start=0, stop=half), *([fine] if half < steps else [])),
        step_work=parameters.width * parameters.height * parameters.num_frames,
    )


def memory(activity: Activity, shape: MemoryShape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity: a few copies of the pixels."""
    width, height, frames, *_ = (*shape, 1)
    return width * height * frames * 16 * ITEM_BYTES[dtype]


FAMILY = Family(
    name="toy",
    parameters=ToyParameters,
    layouts={LAYOUT.pipeline: LAYOUT},
    model="toy.model:ToyModel",
    tiny="toy.tiny:write_tiny_toy",
    tiny_title="a whole toy",
    workflow_reader="toy.workflow:READER",
    encoded=("photo",),
    experts={"high": COARSE, "low": FINE},
    half="bf16",
    published_as="toy-",
    published=PUBLISHED,
    models=MODELS,
    num_blocks=lambda _: None,
    unit_costs=unit_costs,
    read_facts=read_facts,
    complete=complete,
    prior=lambda _: CostPrior(encode_steps=1.0, decode_steps=1.0),
    memory=memory,
)
