"""Stable Video Diffusion as a family: its parameters, folder, costs and memory. Does not import torch."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from svdq.pipeline.models.compute.memory import ITEM_BYTES, VAE_COPIES, Activity, MemoryShape
from svdq.pipeline.models.family import Facts, Family, FolderLayout, PublishedModel, PublishedStep
from svdq.pipeline.models.weights.model_folder import read_json
from svdq.pipeline.planning.binding import Segment, UnitCosts
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.video_parameters import MAIN, ChunkSize, Fps, Frames, Seed, Steps, VideoParameters, side

SIZE_MULTIPLE = 64  # 8 for the VAE times 8 for the UNet's three halvings

Side = Annotated[int, side(SIZE_MULTIPLE)]


class SvdParameters(VideoParameters):
    """The parameters of one video: the arguments of diffusers' StableVideoDiffusionPipeline."""

    title: ClassVar[str] = "Stable Video Diffusion"
    side_multiple: ClassVar[int] = SIZE_MULTIPLE
    usual: ClassVar[tuple[int, int]] = (25, 7)
    sizes: ClassVar[tuple[tuple[str, str], ...]] = (
        ("auto", "as each photo"),
        ("1024x576", "landscape, 1024x576"),
        ("576x1024", "portrait, 576x1024"),
        ("768x768", "square, 768x768"),
    )

    family: Literal["svd"] = Field(default="svd", exclude=True)  # not written: ids of earlier jobs lack it
    frames: Frames = None  # None means the model's default (14 or 25)
    steps: Steps = 25
    width: Side = 1024
    height: Side = 576
    fps: Fps = 7
    motion_bucket_id: int = Field(
        default=127,
        ge=0,
        le=1023,
        title="Motion",
        description="Amount of motion; the model was trained with 1 to 255",
        json_schema_extra=MAIN,
    )
    #: Standard deviation of the noise added to the photo before it is encoded.
    noise_aug_strength: float = Field(
        default=0.02, ge=0.0, le=10.0, title="Noise", description="Noise added to the photo"
    )
    min_guidance_scale: float = Field(
        default=1.0, ge=0.0, le=100.0, title="Guidance, first frame", description="Guidance of the first frame"
    )
    #: Guidance is off if it is 1 or less.
    max_guidance_scale: float = Field(
        default=3.0, ge=0.0, le=100.0, title="Guidance, last frame", description="Guidance of the last frame"
    )
    decode_chunk_size: ChunkSize = None
    seed: Seed

    @model_validator(mode="after")
    def _guidance_in_order(self) -> Self:
        if self.min_guidance_scale > self.max_guidance_scale:
            raise ValueError(
                f"min_guidance_scale {self.min_guidance_scale} is larger than max_guidance_scale "
                f"{self.max_guidance_scale}"
            )
        return self

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance is on (diffusers: do_classifier_free_guidance)."""
        return self.max_guidance_scale > 1


LAYOUT = FolderLayout(
    pipeline="StableVideoDiffusionPipeline",
    example="stabilityai/stable-video-diffusion-img2vid-xt",
    components={
        "unet": ("UNetSpatioTemporalConditionModel",),
        "vae": ("AutoencoderKLTemporalDecoder",),
        "image_encoder": ("CLIPVisionModelWithProjection",),
        # Old models have the other names, and transformers without torchvision.
        "feature_extractor": (
            "CLIPImageProcessor",
            "CLIPFeatureExtractor",
            "CLIPImageProcessorFast",
            "CLIPImageProcessorPil",
        ),
        "scheduler": ("EulerDiscreteScheduler",),
    },
    denoisers=frozenset({"unet"}),
    blocks=frozenset({"BasicTransformerBlock", "TemporalBasicTransformerBlock", "SpatioTemporalResBlock"}),
    phases={"encode": frozenset({"vae", "image_encoder"}), "decode": frozenset({"vae"})},
    unconverted=frozenset({"vae", "image_encoder"}),
    weighted=("unet", "vae", "image_encoder"),
)

#: SVD-XT's, which are diffusers' defaults: the frames that it was trained with, and the width of CLIP's projection.
PUBLISHED: dict[str, Any] = {"num_frames": 25, "cross_attention_dim": 1024}

_NUM_WEIGHTS = {"unet": 1_524_623_082, "vae": 97_742_847, "image_encoder": 632_076_800}
#: By hub id; the worker on GPUs takes the files in half precision.
MODELS = {
    f"stabilityai/stable-video-diffusion-{name}": PublishedModel(
        layout=LAYOUT.pipeline,
        facts=PUBLISHED | {"num_frames": frames},
        num_weights=_NUM_WEIGHTS,
        stored=dict.fromkeys(_NUM_WEIGHTS, 2),
        steps=(PublishedStep(gpu="H100", gpu_gb=80, step_s=0.663 * frames / 25, source="svdq, SVD-XT in float16"),),
    )
    for name, frames in {"img2vid": 14, "img2vid-xt": 25, "img2vid-xt-1-1": 25}.items()
}

# Elements (of the dtype computed in) alive at the peak, besides the weights. Taken from the published modules with
# attention as a fused kernel; the table is in docs/internals/performance.md.
#: A step, for each pixel and frame, without and with guidance.
STEP_ELEMENTS = {1: 136, 2: 282}
ENCODE_ELEMENTS = 655  # an encode, per pixel
DECODE_ELEMENTS, FRAME_ELEMENTS = 1021, 3.2  # decode, per pixel: times frames at a time, and all frames
#: Bytes of the VAE's weights in float32, to which an encode in float16 converts them.
VAE_ENCODER_BYTES, VAE_DECODER_BYTES = 137_000_000, 254_000_000


def read_facts(folder: Path, name: str) -> Facts:
    """Return what PUBLISHED has, of a model folder."""
    config = read_json(folder, "unet/config.json", name)
    return {setting: config.get(setting, published) for setting, published in PUBLISHED.items()}


def complete(parameters: VideoParameters, facts: Facts) -> VideoParameters:
    """Fill in the number of frames."""
    if parameters.frames is not None:
        return parameters
    return parameters.model_copy(update={"frames": facts["num_frames"]})


def unit_costs(parameters: VideoParameters, facts: Facts) -> UnitCosts:
    """Return one segment, since the UNet does all steps; with guidance, a step has a batch of two."""
    return UnitCosts(
        segments=(Segment(component="unet", start=0, stop=parameters.steps),),
        step_work=parameters.width * parameters.height * parameters.num_frames * (1 + parameters.guided),
    )


def prior(facts: Facts) -> CostPrior:
    """Return what was measured on an H100 at 1024x576x25 in float16; see docs/internals/performance.md."""
    return CostPrior(encode_steps=0.35, decode_steps=3.5)


def memory(activity: Activity, shape: MemoryShape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity, besides the weights; see `Family.memory`."""
    pixels = shape[0] * shape[1]
    if activity == "encode":
        elements = pixels * ENCODE_ELEMENTS * VAE_COPIES
        if dtype != "float16":
            return int(elements * ITEM_BYTES[dtype])
        # The VAE overflows in float16, so all of it on this rank is converted temporarily.
        return int(elements * 4) + VAE_ENCODER_BYTES + VAE_DECODER_BYTES * has_decoder
    frames = shape[2]
    if activity == "step":
        return pixels * frames * STEP_ELEMENTS[shape[3]] * ITEM_BYTES[dtype]
    elements = pixels * (DECODE_ELEMENTS * shape[3] + FRAME_ELEMENTS * frames) * VAE_COPIES
    return int(elements * ITEM_BYTES[dtype])


FAMILY = Family(
    name="svd",
    parameters=SvdParameters,
    layouts={LAYOUT.pipeline: LAYOUT},
    model="svdq.pipeline.models.svd.model:SvdModel",
    tiny="svdq.pipeline.models.svd.tiny:write_tiny_model",
    tiny_title="Stable Video Diffusion",
    workflow_reader="svdq.pipeline.models.svd.workflow:READER",
    encoded=("image_latents",),
    half="fp16",
    published_as="stable-video-diffusion",
    published=PUBLISHED,
    models=MODELS,
    num_blocks=lambda _: None,
    unit_costs=unit_costs,
    read_facts=read_facts,
    complete=complete,
    prior=prior,
    memory=memory,
)
