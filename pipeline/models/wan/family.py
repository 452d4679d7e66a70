"""Wan as a family: four kinds of image-to-video models behind one class of diffusers. Does not import torch.

2.2 I2V-A14B has two experts, 2.1 I2V-14B one transformer and CLIP's image encoder, 2.1 FLF2V-14B the same for the first
and the last frame, and 2.2 TI2V-5B one transformer that gets the photo as its first latent frame.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import not_
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.memory import ITEM_BYTES, VAE_COPIES, Activity, MemoryShape
from svdq.pipeline.models.family import Facts, Family, PublishedModel, PublishedStep
from svdq.pipeline.models.wan.experts import experts_of
from svdq.pipeline.models.wan.layout import (
    HIGH_NOISE,
    LAYOUTS,
    LOW_NOISE,
    SHIFT_SETTINGS,
    TRANSFORMER_DEFAULTS,
    VAE_DEFAULTS,
    read_facts,
    use_scheduler,
)
from svdq.pipeline.models.wan.step_cache import Curve, find_curve, use_step_cache
from svdq.pipeline.planning.binding import Segment, UnitCosts
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.video_parameters import (
    SPEEDUP,
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

SIZE_MULTIPLE = 16  # 8 for the VAE times 2 for the transformer's patches
FRAME_STEP = 4  # the VAE compresses the frames after the first by fours

Side = Annotated[int | None, side(SIZE_MULTIPLE)]


class WanParameters(PromptedParameters):
    """The parameters of one video: the arguments of diffusers' WanImageToVideoPipeline; None is the model's default."""

    title: ClassVar[str] = "Wan"
    side_multiple: ClassVar[int] = SIZE_MULTIPLE
    frame_step: ClassVar[int] = FRAME_STEP
    usual: ClassVar[tuple[int, int]] = (81, 16)
    sizes: ClassVar[tuple[tuple[str, str], ...]] = (
        ("auto", "as each photo"),
        ("auto:1280x704", "as each photo, large"),
        ("832x480", "landscape, 832x480"),
        ("480x832", "portrait, 480x832"),
        ("1280x704", "landscape, 1280x704"),
        ("704x1280", "portrait, 704x1280"),
    )

    family: Literal["wan"] = "wan"
    frames: Annotated[Frames, AfterValidator(one_more_than_a_multiple(FRAME_STEP))] = None
    steps: Steps | None = None  # type: ignore[assignment]  # the pipeline gets numbers
    width: Side = None  # type: ignore[assignment]
    height: Side = None  # type: ignore[assignment]
    fps: Fps | None = None  # type: ignore[assignment]
    prompt: Prompt = Field(default="", description="What happens in the video")
    negative_prompt: Prompt | None = Field(
        default=None, title="What to avoid", description="What to avoid"
    )  # None: the model's own
    #: Guidance is off if it is 1 or less.
    guidance_scale: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        title="Guidance",
        description="Guidance by the prompt; with two experts, in the noisy steps",
    )
    guidance_scale_2: float | None = Field(
        default=None,
        ge=0.0,
        le=100.0,
        title="Guidance, later steps",
        description="Guidance in the steps of the second expert",
    )
    #: Moves steps to higher noise.
    flow_shift: float | None = Field(
        default=None, ge=0.01, le=100.0, title="Noise shift", description="Shift of the noise levels"
    )
    #: The VAE decodes frame by frame. A number below `frames` decodes in tiles, which changes pixels.
    decode_chunk_size: ChunkSize = None
    seed: Seed
    # Left out of the JSON unless they are given, because the ids of earlier jobs were made without them.
    loop: Loop = False
    last_image: LastImage = None
    #: MagCache's threshold of the error; 0 skips none. See `step_cache.py`.
    step_cache: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        exclude_if=not_,
        title="Skip steps",
        json_schema_extra=SPEEDUP,
        description="Skip steps that change little, up to this estimated error, such as 0.06; 0: none",
    )

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance is on; a scale that is left to the model counts as on.

        As in diffusers, the first scale decides for all steps: two experts with 3.5 and 1 compute both predictions, and
        with 1 and 3.5 one.
        """
        return self.guidance_scale is None or self.guidance_scale > 1


# The recommendations of Wan's authors (generate.py and configs) where they differ from diffusers' defaults: 50 steps,
# guidance 5, a shift of 3 and no negative prompt for all models.

#: The authors' negative prompt: bright colors, overexposure, stills, blurred details, subtitles, paintings, the worst
#: quality, JPEG artifacts, deformed limbs, fused fingers, crowded backgrounds, walking backwards and the like.
_UNWANTED = """\
色调艳丽 过曝 静态 细节模糊不清 字幕 风格 作品 画作 画面 静止 整体发灰 最差质量 低质量 JPEG压缩残留
丑陋的 残缺的 多余的手指 画得不好的手部 画得不好的脸部 畸形的 毁容的 形态畸形的肢体 手指融合
静止不动的画面 杂乱的背景 三条腿 背景人很多 倒着走"""
NEGATIVE_PROMPT = "\uff0c".join(_UNWANTED.split())  # with full-width commas
CONVERTED_SHIFT = 3.0  # in every UniPC config, by diffusers' conversion script
#: Schedules of ComfyUI whose levels are evenly apart before the shift, as those of the published curves of step_cache.
EVEN_SCHEDULES = ("simple", "normal", "sgm_uniform")
LEAST_SHARE = 5  # a fifth of the steps of a published curve is too few: distilled
PIXELS_480P = 832 * 480  # videos of at most this many pixels a frame count as 480p


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The defaults of one published model; its fields are named like the parameters."""

    title: str  # its name in messages
    frames: int = 81
    fps: int = 16
    width: int = 832
    height: int = 480
    steps: int = 40
    guidance_scale: float  # of both experts, where there are two
    negative_prompt: str = NEGATIVE_PROMPT
    #: The default of flow_shift, above and at 480p.
    shift: float = 5.0
    shift_480p: float = 5.0
    #: The curve for step_cache, above and at 480p; "" for none.
    curve: str = ""
    curve_480p: str = ""


#: Two experts.
I2V_A14B = Defaults(title="Wan 2.2 I2V-A14B", guidance_scale=3.5, curve="Wan2.2-I2V-A14B", curve_480p="Wan2.2-I2V-A14B")
#: A transformer, and CLIP's image encoder.
I2V_14B = Defaults(
    title="Wan 2.1 I2V-14B",
    guidance_scale=5.0,
    shift_480p=3.0,
    curve="Wan2.1-I2V-14B-720P",
    curve_480p="Wan2.1-I2V-14B-480P",
)
#: One transformer, and CLIP's image encoder for both frames.
FLF2V_14B = Defaults(
    title="Wan 2.1 FLF2V-14B", width=1280, height=720, steps=50, guidance_scale=5.0, shift=16.0, shift_480p=16.0
)
#: One transformer that denoises the frames after the photo's (expand_timesteps).
TI2V_5B = Defaults(
    title="Wan 2.2 TI2V-5B",
    frames=121,
    fps=24,
    width=1280,
    height=704,
    steps=50,
    guidance_scale=5.0,
    curve="Wan2.2-TI2V-5B",
    curve_480p="Wan2.2-TI2V-5B",
)

#: The facts of Wan 2.2 I2V-A14B as published.
PUBLISHED: Facts = {
    "boundary_ratio": 0.9,
    "expand_timesteps": False,
    "has_image_encoder": False,
    "scheduler": {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": CONVERTED_SHIFT,
    },
    "transformer": TRANSFORMER_DEFAULTS | {"in_channels": 36},
    "vae": VAE_DEFAULTS,
}

_TEXT_ENCODER, _VAE = {"text_encoder": 5_680_910_336}, {"vae": 126_892_531}
#: Bytes of a weight on the hub: Wan 2.2's text encoder is there in bfloat16, 2.1's image encoder in float16.
_STORED = {"transformer": 4, "transformer_2": 4, "vae": 4, "text_encoder": 2}
#: A step at 832x480 with 81 frames and guidance.
_STEPS_14B = (
    PublishedStep(gpu="RTX 4090", gpu_gb=24, step_s=30.5, source="LightX2V's README, diffusers, Wan 2.1 on a 4090D"),
    PublishedStep(gpu="H100", gpu_gb=80, step_s=6.78, source="svdq, scaled up from 2 and 4 of 40 layers"),
    PublishedStep(gpu="H200", gpu_gb=141, step_s=6.50, source="svdq, scaled up from 2 of 40 layers"),
)
_WAN_2_1 = PublishedModel(
    layout="WanImageToVideoPipeline",
    facts={
        **PUBLISHED,
        "boundary_ratio": None,
        "has_image_encoder": True,
        "transformer": TRANSFORMER_DEFAULTS | {"in_channels": 36, "image_dim": 1280},
    },
    num_weights={"transformer": 16_394_878_784, "image_encoder": 632_076_800, **_TEXT_ENCODER, **_VAE},
    stored=_STORED | {"text_encoder": 4, "image_encoder": 2},
    steps=_STEPS_14B,
)
#: The published models by hub id. Numbers of weights are counted on their modules without contents.
MODELS = {
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": PublishedModel(
        layout="WanImageToVideoPipeline",
        facts=PUBLISHED,
        num_weights={"transformer": 14_288_901_184, "transformer_2": 14_288_901_184, **_TEXT_ENCODER, **_VAE},
        stored=_STORED,
        steps=_STEPS_14B,
    ),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": PublishedModel(
        layout="WanPipeline",
        facts={
            **PUBLISHED,
            "boundary_ratio": None,
            "expand_timesteps": True,
            "transformer": TRANSFORMER_DEFAULTS
            | {"num_attention_heads": 24, "in_channels": 48, "out_channels": 48, "ffn_dim": 14336, "num_layers": 30},
            "vae": VAE_DEFAULTS
            | {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "in_channels": 12, "scale_factor_spatial": 16},
        },
        num_weights={"transformer": 4_999_787_712, "vae": 704_688_668, **_TEXT_ENCODER},
        stored=_STORED,
        # 9 minutes a video of 50 steps, with its encode and decode.
        steps=(PublishedStep(gpu="RTX 4090", gpu_gb=24, step_s=10.5, source="Wan 2.2's README, 9 minutes a video"),),
    ),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _WAN_2_1,
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": _WAN_2_1,
    # Positions of both photos' tokens; nobody says how long a step of 1280x720 takes.
    "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers": replace(
        _WAN_2_1,
        facts={
            **_WAN_2_1.facts,
            "scheduler": {**PUBLISHED["scheduler"], "flow_shift": 16.0},
            "transformer": {**_WAN_2_1.facts["transformer"], "pos_embed_seq_len": 514},
        },
        num_weights={**_WAN_2_1.num_weights, "transformer": 16_395_536_704},
        steps=(),
    ),
}

# Elements alive at the peak, besides the weights: counted on the published modules with tensors without contents and
# attention as a fused kernel. The table is in docs/internals/performance.md.
#: A step, for each token and unit of the transformer's width; more with a timestep for each token (TI2V-5B).
STEP_ELEMENTS = {False: 11.2, True: 32.7}
#: A decode of the VAE, which works frame by frame: per pixel, and per pixel of all frames.
DECODE_ELEMENTS, FRAME_ELEMENTS = {False: 4870, True: 5380}, 3.1
#: A decode in tiles: pixels of a tile; and per pixel of all frames the overlapping tiles, their joined rows, the whole
#: and its clamped copy.
TILE_PIXELS, TILED_FRAME_ELEMENTS = 256 * 256, 14.3
#: An encode, per pixel: with two experts or CLIP, of the photo and as many gray frames as a video of 81 has; of
#: TI2V-5B the photo only.
ENCODE_ELEMENTS = {False: 4020, True: 2050}
_VAE_ITEM_BYTES = 4 * VAE_COPIES  # in float32, with what cuDNN copies of it


def complete(parameters: VideoParameters, facts: Facts) -> WanParameters:
    """Fill in what parameters leave open; raise InputError if this model cannot make such a video."""
    assert isinstance(parameters, WanParameters)
    ours = _defaults(facts)
    defaults = vars(ours) | facts.get("defaults", {})
    usual = {name: value for name, value in defaults.items() if getattr(parameters, name, "") is None}
    # A list of noise levels is for its number of steps.
    steps = {"steps": len(facts["sigmas"])} if isinstance(facts.get("sigmas"), list) else {}
    parameters = parameters.model_copy(update=usual | steps)
    assert parameters.width is not None
    assert parameters.height is not None
    pixels = parameters.width * parameters.height
    # What the VAE and the patches make one token.
    multiple = facts["vae"]["scale_factor_spatial"] * facts["transformer"]["patch_size"][1]
    for name in ("width", "height"):
        if getattr(parameters, name) % multiple:
            raise InputError(
                f"The {name} of {getattr(parameters, name)} pixels is no multiple of {multiple}, as {ours.title} needs."
            )
    if parameters.has_last_photo and not takes_last_photo(facts):
        raise InputError(
            f"{ours.title} takes no last frame; leave {'loop' if parameters.loop else 'the last photo'} out, or use a "
            f"model that takes one, such as {I2V_A14B.title}{' (boomerang works with all)' * parameters.loop}."
        )
    if facts["boundary_ratio"] is None:
        if parameters.guidance_scale_2 is not None:
            raise InputError(f"{ours.title} has one transformer, so it has no guidance_scale_2; leave that out.")
    elif parameters.guidance_scale_2 is None:
        parameters = parameters.model_copy(update={"guidance_scale_2": parameters.guidance_scale})  # as in diffusers
    if parameters.flow_shift is None:
        parameters = parameters.model_copy(update={"flow_shift": _shift(pixels, facts["scheduler"], ours)})
    if parameters.step_cache:
        check_step_cache(parameters, facts)
    return parameters


def check_step_cache(completed: WanParameters, facts: Facts) -> None:
    """Raise an InputError if none of the steps of a video can be skipped, with the reason."""
    if not any(skipped(completed, facts)):
        raise InputError(
            f"step_cache {completed.step_cache:g} skips none of {completed.steps} steps of {_defaults(facts).title}; "
            "give more steps or a larger number, or leave it out."
        )


def threshold_for(parameters: VideoParameters, facts: Facts, speedup: float) -> float:
    """Return the smallest `step_cache` that leaves at most 1/`speedup` of the steps; raises InputError if none does."""
    completed = complete(parameters, facts)
    return curve_of(completed, facts).threshold_for(_experts_of(completed, facts), speedup)


def skipped(completed: WanParameters, facts: Facts) -> list[bool]:
    """Return whether each step of a video with a step cache is skipped; raises InputError if the model has no curve."""
    return curve_of(completed, facts).skipped(_experts_of(completed, facts), completed.step_cache)


def curve_of(completed: WanParameters, facts: Facts) -> Curve:
    """Return the curve of the model for a video of this size; raises InputError if there is none."""
    ours, sigmas = _defaults(facts), facts.get("sigmas")
    if isinstance(sigmas, list):
        raise InputError(
            f"step_cache does not apply to the {completed.steps} steps of a model file with sigmas, all of "
            "which are needed; leave it out."
        )
    assert completed.width is not None
    assert completed.height is not None
    is_480p = completed.width * completed.height <= PIXELS_480P
    if (found := find_curve(ours.curve_480p if is_480p else ours.curve, facts)) is None:
        raise InputError(
            f"step_cache needs a curve, which {ours.title} has none of; leave it out, or measure one with "
            "`svdq model calibrate`."
        )
    if sigmas is not None and "step_cache" not in facts:
        _check_schedule(sigmas, completed.steps or 0, found)
    return found


def _check_schedule(name: str, steps: int, curve: Curve) -> None:
    """Raise InputError if the published curve, of steps evenly apart, says nothing about a schedule of ComfyUI."""
    if name not in EVEN_SCHEDULES:
        raise InputError(
            f"step_cache has no curve for the schedule {name}, whose steps are not evenly apart as those that the "
            "published curve was measured with; leave it out, or measure one with `svdq model calibrate`."
        )
    if steps * LEAST_SHARE < (measured := sum(map(len, curve.ratios.values()))):
        raise InputError(
            f"step_cache does not apply to {steps} steps, all of which are needed: the curve was measured with "
            f"{measured}; leave it out, or give more steps."
        )


def takes_last_photo(facts: Facts) -> bool:
    """Return whether a model takes a photo of the last frame."""
    # diffusers ignores it with expand_timesteps; the transformer of I2V-14B takes the embedding of one image only.
    return not facts["expand_timesteps"] and (not facts["has_image_encoder"] or needs_last_photo(facts))


def needs_last_photo(facts: Facts) -> bool:
    """Return whether a model makes videos between two photos only: its transformer has positions for both."""
    return facts["transformer"]["pos_embed_seq_len"] is not None


def _defaults(facts: Facts) -> Defaults:
    if facts["boundary_ratio"] is not None:
        return I2V_A14B
    if needs_last_photo(facts):
        return FLF2V_14B
    return TI2V_5B if facts["expand_timesteps"] else I2V_14B


def _shift(pixels: int, scheduler: Mapping[str, Any], ours: Defaults) -> float:
    """Return the shift of the model's own scheduler, or the authors' where diffusers' conversion wrote its default."""
    setting = SHIFT_SETTINGS[scheduler["_class_name"]]
    own = scheduler.get(setting)
    if own is not None and (setting, own) != ("flow_shift", CONVERTED_SHIFT):
        return float(own)
    return ours.shift_480p if pixels <= PIXELS_480P else ours.shift


def prior(facts: Facts) -> CostPrior:
    """Return what an H100 and an H200 showed at 832x480x81: an encode in 0.3 steps, and a decode in 0.6 or more.

    No GPU has shown the model that expands timesteps: its prior is a guess from the sizes of the modules.
    """
    if facts["expand_timesteps"]:
        # It encodes one frame only, and decodes 121 of them at 1280x704 between cheap steps.
        return CostPrior(encode_steps=0.1, decode_steps=1.5)
    return CostPrior(encode_steps=0.3, decode_steps=0.6)


def memory(activity: Activity, shape: MemoryShape, dtype: str, facts: Facts, *, has_decoder: bool) -> int:
    """Estimate the peak bytes of an activity, besides the weights; guidance does one pass after the other."""
    vae, is_expanded = facts["vae"], facts["expand_timesteps"]
    pixels = shape[0] * shape[1]
    # The published VAE has 96 channels at full resolution; TI2V-5B's has 256 for each patch of 2x2 pixels.
    width = (vae.get("decoder_base_dim") or vae["base_dim"]) / (256 if is_expanded else 96)
    if activity == "encode":
        return int(pixels * ENCODE_ELEMENTS[is_expanded] * width * _VAE_ITEM_BYTES)
    frames = shape[2]
    if activity == "decode" and shape[3] < frames and pixels > TILE_PIXELS:
        tile = TILE_PIXELS * DECODE_ELEMENTS[is_expanded] * width
        return int((tile + pixels * frames * TILED_FRAME_ELEMENTS) * _VAE_ITEM_BYTES)
    if activity == "decode":
        return int(pixels * (DECODE_ELEMENTS[is_expanded] * width + FRAME_ELEMENTS * frames) * _VAE_ITEM_BYTES)
    elements = STEP_ELEMENTS[is_expanded] + sum(shape[4:])  # with a residual for each pass
    return int(_tokens(pixels, frames, facts) * _hidden(facts) * elements * ITEM_BYTES[dtype])


def unit_costs(parameters: VideoParameters, facts: Facts) -> UnitCosts:
    """Return a segment for each expert that has steps; an expert without guidance makes one prediction of two.

    The unit of work is the work of a token in all layers but attention to other tokens: at 832x480 with 81 frames,
    attention is 49% of the work of the 14B models, and at 1280x720 69%.
    """
    assert isinstance(parameters, WanParameters)
    assert parameters.width is not None
    assert parameters.height is not None
    experts = _experts_of(parameters, facts)
    is_halved = parameters.guided and parameters.guidance_scale_2 == 1  # of the second expert
    are_skipped = skipped(parameters, facts) if parameters.step_cache else [False] * len(experts)
    costs = [
        0.0 if is_skipped else 0.5 if is_halved and expert == LOW_NOISE else 1.0
        for expert, is_skipped in zip(experts, are_skipped, strict=True)
    ]
    are_usual = not is_halved and not parameters.step_cache
    stops = {expert: index for index, expert in enumerate(experts, start=1)}  # contiguous, as noise levels fall
    segments = tuple(
        Segment(component=expert, start=start, stop=stop, costs=() if are_usual else tuple(costs[start:stop]))
        for start, (expert, stop) in zip([0, *stops.values()], stops.items(), strict=False)
    )
    tokens = _tokens(parameters.width * parameters.height, parameters.num_frames, facts)
    return UnitCosts(
        segments=segments, step_work=tokens * (1 + 0.15 * tokens / _hidden(facts)) * (1 + parameters.guided)
    )


def _experts_of(completed: WanParameters, facts: Facts) -> list[str]:
    assert completed.steps is not None
    assert completed.flow_shift is not None
    return experts_of(completed.steps, completed.flow_shift, facts)


def _tokens(pixels: int, frames: int, facts: Facts) -> int:
    vae = facts["vae"]
    side = vae["scale_factor_spatial"] * facts["transformer"]["patch_size"][1]
    return int(((frames - 1) // vae["scale_factor_temporal"] + 1) * pixels // side**2)


def _hidden(facts: Facts) -> int:
    transformer = facts["transformer"]
    return int(transformer["num_attention_heads"] * transformer["attention_head_dim"])


FAMILY = Family(
    name="wan",
    parameters=WanParameters,
    layouts=LAYOUTS,
    model="svdq.pipeline.models.wan.model:WanModel",
    tiny="svdq.pipeline.models.wan.tiny:write_tiny_wan",
    tiny_title="Wan 2.2 I2V-A14B with both of its experts",
    workflow_reader="svdq.pipeline.models.wan.workflow:READER",
    encoded=("prompt_embeds", "condition"),
    experts={"high": HIGH_NOISE, "low": LOW_NOISE},
    half="bf16",
    published_as="wan2",
    published=PUBLISHED,
    models=MODELS,
    unit_costs=unit_costs,
    num_blocks=lambda facts: int(facts["transformer"]["num_layers"]),
    read_facts=read_facts,
    use_scheduler=use_scheduler,
    use_step_cache=use_step_cache,
    takes_last_photo=takes_last_photo,
    needs_last_photo=needs_last_photo,
    threshold_for=threshold_for,
    calibrate="svdq.pipeline.models.wan.calibration:calibrate",
    complete=complete,
    prior=prior,
    memory=memory,
)
