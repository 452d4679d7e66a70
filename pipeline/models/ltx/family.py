"""LTX-2 as a family: 2.3 and 2.5, distilled or not, in one stage or in two. Does not import torch.

With two stages a video is denoised at half its size, its latents are upsampled, get new noise, and are denoised again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.memory import ITEM_BYTES, VAE_COPIES, Activity, MemoryShape
from svdq.pipeline.models.family import Facts, Family, PublishedModel
from svdq.pipeline.models.ltx.layout import (
    AUDIO_VAE_DEFAULTS,
    DISTILLED_SIGMA_VALUES,
    GIVEN_SIGMAS,
    IMAGE_CRF,
    LAYOUT,
    STAGE_2_DISTILLED_SIGMA_VALUES,
    TRANSFORMER,
    TRANSFORMER_DEFAULTS,
    UPSAMPLER,
    read_facts,
    use_scheduler,
)
from svdq.pipeline.planning.binding import Segment, UnitCosts
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.video_parameters import (
    ChunkSize,
    Fps,
    Frames,
    LastImage,
    Loop,
    Prompt,
    PromptedParameters,
    Seed,
    Steps,
    VideoParameters,
    one_more_than_a_multiple,
    side,
)

SIZE_MULTIPLE = 64  # 32 for the VAE, at half the size
FRAME_STEP = 8  # the VAE compresses the frames after the first by eights
LATENT_SIDE = 32  # pixels of a latent's side

Side = Annotated[int | None, side(SIZE_MULTIPLE)]
_Scale = Annotated[float | None, Field(ge=0.0, le=100.0)]


class LtxParameters(PromptedParameters):
    """The parameters of one video: the arguments of diffusers' LTX2ConditionPipeline; None is the model's default."""

    title: ClassVar[str] = "LTX-2"
    side_multiple: ClassVar[int] = SIZE_MULTIPLE
    frame_step: ClassVar[int] = FRAME_STEP
    usual: ClassVar[tuple[int, int]] = (121, 24)
    sizes: ClassVar[tuple[tuple[str, str], ...]] = (
        ("auto", "as each photo"),
        ("auto:1280x704", "as each photo, large"),
        ("768x512", "landscape, 768x512"),
        ("512x768", "portrait, 512x768"),
        ("1280x704", "landscape, 1280x704"),
        ("704x1280", "portrait, 704x1280"),
    )

    family: Literal["ltx"] = "ltx"
    frames: Annotated[Frames, AfterValidator(one_more_than_a_multiple(FRAME_STEP))] = None
    #: Of both stages together; a distilled model has a fixed number.
    steps: Steps | None = None  # type: ignore[assignment]  # the pipeline gets numbers
    width: Side = None  # type: ignore[assignment]
    height: Side = None  # type: ignore[assignment]
    fps: Fps | None = None  # type: ignore[assignment]
    prompt: Prompt = Field(default="", description="What happens in the video")
    negative_prompt: Prompt | None = Field(default=None, title="What to avoid", description="What to avoid")
    stages: int | None = Field(
        default=None, ge=1, le=2, description="Stages of denoising; of two, the first is at half the size"
    )
    #: Guidance is off if this and `audio_guidance_scale` are 1 or less.
    guidance_scale: _Scale = Field(default=None, title="Guidance", description="Guidance by the prompt")
    audio_guidance_scale: _Scale = Field(
        default=None, title="Guidance of the sound", description="Guidance of the sound by the prompt"
    )
    stg_scale: _Scale = Field(default=None, title="Spatio-temporal guidance", description="Spatio-temporal guidance")
    modality_scale: _Scale = Field(
        default=None, title="Guidance by each other", description="Guidance of video and sound by each other"
    )
    guidance_rescale: float | None = Field(
        default=None, ge=0.0, le=1.0, description="How much guidance is rescaled against overexposure"
    )
    sound: bool = Field(
        default=True, exclude_if=bool, description="Write the sound that the model makes with the video"
    )
    #: A number below `frames` decodes in tiles, which changes pixels.
    decode_chunk_size: ChunkSize = None
    seed: Seed
    loop: Loop = False
    last_image: LastImage = None

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance is on, which it is not if that is left to a distilled model."""
        return max(self.guidance_scale or 0, self.audio_guidance_scale or 0) > 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One of the stages of a video, in latents."""

    number: int  # 0 or 1
    first_step: int  # index of its first step in the video
    num_steps: int
    sigmas: tuple[float, ...] | None  # its noise levels; None: the scheduler shifts its own by the size
    frames: int
    height: int
    width: int

    @property
    def frame_tokens(self) -> int:
        """The number of tokens of a latent frame."""
        return self.height * self.width

    @property
    def tokens(self) -> int:
        """The number of tokens of the video, without a last photo's."""
        return self.frames * self.frame_tokens


def _second_sigmas(facts: Facts) -> tuple[float, ...]:
    return tuple(facts.get("stage_2_sigmas", STAGE_2_DISTILLED_SIGMA_VALUES))


def stages_of(parameters: LtxParameters, facts: Facts) -> tuple[Stage, ...]:
    """Return the stages of a video whose parameters are filled in."""
    steps, width, height = parameters.steps, parameters.width, parameters.height
    assert steps is not None
    assert width is not None
    assert height is not None
    sigmas = tuple(facts["sigmas"]) if "sigmas" in facts else None
    second = _second_sigmas(facts) if parameters.stages == 2 else ()
    first_steps = steps - len(second)

    def stage(number: int, first_step: int, num_steps: int, levels: tuple[float, ...] | None) -> Stage:
        pixels = LATENT_SIDE * (2 if second and not number else 1)
        return Stage(
            number=number,
            first_step=first_step,
            num_steps=num_steps,
            sigmas=levels,
            frames=(parameters.num_frames - 1) // FRAME_STEP + 1,
            height=height // pixels,
            width=width // pixels,
        )

    found = (stage(0, 0, first_steps, sigmas),)
    return (*found, stage(1, first_steps, len(second), second)) if second else found


def audio_frames(parameters: VideoParameters, facts: Facts) -> int:
    """Return the number of latents of the sound."""
    # (4) of diffusers' `__call__`; the audio VAE compresses time by 4.
    audio = facts["audio_vae"]
    per_second: float = audio["sample_rate"] / audio["mel_hop_length"] / 4.0
    return round(parameters.num_frames / parameters.fps * per_second)


#: Guidance of models that are not distilled: diffusers' defaults. A distilled one was trained to do without.
GUIDANCE: Mapping[str, float] = {
    "guidance_scale": 3.0,
    "audio_guidance_scale": 7.0,
    "stg_scale": 1.0,
    "modality_scale": 3.0,
    "guidance_rescale": 0.7,
}
NO_GUIDANCE: Mapping[str, float] = {
    "guidance_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
}
STEPS = 30  # of the first stage, of models that are not distilled
STG_BLOCK = 28  # the block that spatio-temporal guidance perturbs
#: diffusers' example.
NEGATIVE_PROMPT = "worst quality, inconsistent motion, blurry, jittery, distorted, static"


def complete(parameters: VideoParameters, facts: Facts) -> LtxParameters:
    """Fill in what parameters leave open; raise InputError if this model cannot make such a video."""
    assert isinstance(parameters, LtxParameters)
    is_distilled = "sigmas" in facts
    defaults: dict[str, Any] = {
        "frames": 121,
        "fps": 24,
        "width": 768,
        "height": 512,
        "negative_prompt": NEGATIVE_PROMPT,
        "stages": 2 if is_distilled and facts["has_upsampler"] else 1,
        **(NO_GUIDANCE if is_distilled else GUIDANCE),
        **facts.get("defaults", {}),
    }
    usual = {name: value for name, value in defaults.items() if getattr(parameters, name, "") is None}
    parameters = parameters.model_copy(update=usual)
    second = len(_second_sigmas(facts)) if parameters.stages == 2 else 0
    if second and not facts["has_upsampler"]:
        raise InputError("This model of LTX-2 has no latent_upsampler, so it makes videos in one stage; use stages 1.")
    # A schedule is for its number of steps.
    steps = len(facts["sigmas"]) + second if is_distilled else parameters.steps or STEPS + second
    if steps <= second:
        raise InputError(
            f"Two stages need more than {second} steps, and {steps} were asked for; use at least {second + 8}."
        )
    return parameters.model_copy(update={"steps": steps})


#: The facts of LTX-2.3 as published, distilled.
PUBLISHED: Facts = {
    "image_crf": IMAGE_CRF["Gemma3ForConditionalGeneration"],
    "has_upsampler": True,
    "scheduler": {"_class_name": "FlowMatchEulerDiscreteScheduler", **GIVEN_SIGMAS},
    "transformer": TRANSFORMER_DEFAULTS,
    "vae": {"latent_channels": 128},
    "audio_vae": AUDIO_VAE_DEFAULTS,
    "sound_rate": 48000,
    "sigmas": list(DISTILLED_SIGMA_VALUES),
}

#: Counted on modules without contents; for the text encoder and the VAE, from the sizes of their files.
_NUM_WEIGHTS = {
    TRANSFORMER: 18_988_838_144,
    UPSAMPLER: 497_867_904,
    "vae": 725_000_000,
    "audio_vae": 53_248_146,
    "vocoder": 129_000_000,
    "connectors": 3_172_227_584,
    "text_encoder": 12_187_325_040,
}
_STORED = dict.fromkeys(_NUM_WEIGHTS, 2)
MODELS = {
    "diffusers/LTX-2.3-Distilled-Diffusers": PublishedModel(
        layout=LAYOUT.pipeline, facts=PUBLISHED, num_weights=_NUM_WEIGHTS, stored=_STORED
    ),
    "Lightricks/LTX-2.5-Diffusers": PublishedModel(
        layout=LAYOUT.pipeline,
        facts={**PUBLISHED, "image_crf": IMAGE_CRF["Gemma4UnifiedForConditionalGeneration"]},
        num_weights=_NUM_WEIGHTS | {TRANSFORMER: 18_987_859_200, "text_encoder": 11_976_000_000},
        stored=_STORED,
    ),
}

# Elements alive at the peak, besides the weights: counted on the published modules with tensors without contents.
STEP_ELEMENTS = 18.5  # of a pass of a step, for each token and unit of the transformer's width
#: A decode: bytes of the whole at 1280x704 with 121 frames in bfloat16, for each pixel of all frames.
DECODE_BYTES = 7.9e9 / (1280 * 704 * 121)
TILE_PIXELS = 512 * 512  # of a decode in tiles
#: An encode of one frame, for each pixel. A guess: as of Wan's VAE for one frame.
ENCODE_ELEMENTS = 2000


def memory(activity: Activity, shape: MemoryShape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity, besides the weights."""
    pixels = shape[0] * shape[1]
    item = ITEM_BYTES[dtype]
    if activity == "encode":
        return int(pixels * ENCODE_ELEMENTS * item * VAE_COPIES)
    frames = shape[2]
    if activity == "decode":
        tile = min(pixels, TILE_PIXELS) if shape[3] < frames else pixels
        # The frames in float32, and their tiles beside them.
        return int((tile * frames * DECODE_BYTES * item / 2 + pixels * frames * 3 * 4) * VAE_COPIES)
    tokens = ((frames - 1) // FRAME_STEP + 1) * pixels // LATENT_SIDE**2
    return int(tokens * _hidden(facts) * STEP_ELEMENTS * item * shape[3])


def stage_work(stage: Stage, facts: Facts) -> float:
    """Return the work of a prediction; the unit is the work of a token in all layers but attention to other tokens.

    The layers of the sound count as 192 tokens.
    """
    return stage.tokens * (1 + 0.119 * stage.tokens / _hidden(facts)) + 192


def unit_costs(parameters: VideoParameters, facts: Facts) -> UnitCosts:
    """Return one segment: the transformer does all steps, and those of a second stage cost more."""
    assert isinstance(parameters, LtxParameters)
    assert parameters.steps is not None
    first, *others = stages_of(parameters, facts)
    work = stage_work(first, facts)
    costs = [1.0] * first.num_steps
    for stage in others:
        costs += [round(stage_work(stage, facts) / work, 2)] * stage.num_steps
    # A prediction with the prompt, and one for each kind of guidance: see `LtxDenoiser`.
    passes = 1 + parameters.guided + ((parameters.stg_scale or 0) > 0) + ((parameters.modality_scale or 0) > 1)
    segment = Segment(component=TRANSFORMER, start=0, stop=parameters.steps, costs=tuple(costs) if others else ())
    return UnitCosts(segments=(segment,), step_work=work * passes)


def _hidden(facts: Facts) -> int:
    return int(facts["transformer"]["num_attention_heads"] * facts["transformer"]["attention_head_dim"])


FAMILY = Family(
    name="ltx",
    parameters=LtxParameters,
    # What save_pretrained of diffusers' other pipelines names.
    layouts=dict.fromkeys((LAYOUT.pipeline, "LTX2ImageToVideoPipeline", "LTX2ConditionPipeline"), LAYOUT),
    model="svdq.pipeline.models.ltx.model:LtxModel",
    tiny="svdq.pipeline.models.ltx.tiny:write_tiny_ltx",
    tiny_title="LTX-2.3 distilled",
    workflow_reader="svdq.pipeline.models.ltx.workflow:READER",
    encoded=("video_text", "audio_text", "photo_latents_0"),
    half="bf16",
    published_as="ltx-2",
    published=PUBLISHED,
    models=MODELS,
    unit_costs=unit_costs,
    num_blocks=lambda facts: int(facts["transformer"]["num_layers"]),
    read_facts=read_facts,
    use_scheduler=use_scheduler,
    takes_last_photo=lambda _: True,
    complete=complete,
    prior=lambda _: CostPrior(encode_steps=2.0, decode_steps=4.0),
    memory=memory,
)
