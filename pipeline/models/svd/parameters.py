"""The parameters of a Stable Video Diffusion video: the arguments of diffusers' StableVideoDiffusionPipeline."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from svdq.pipeline.parameters import ChunkSize, Fps, Frames, Seed, Steps, VideoParameters, side

#: 8 for the VAE times 8 for the UNet's three halvings.
SIZE_MULTIPLE = 64

Side = Annotated[int, side(SIZE_MULTIPLE)]


class SvdParameters(VideoParameters):
    """The parameters of one video; frozen, and unknown fields are refused.

    Raises:
        pydantic.ValidationError: a value is out of range.
    """

    title: ClassVar[str] = "Stable Video Diffusion"
    side_multiple: ClassVar[int] = SIZE_MULTIPLE

    #: Not written, because the ids of earlier jobs were made without it.
    family: Literal["svd"] = Field(default="svd", exclude=True)
    #: None means the model's default (14 or 25).
    frames: Frames = None
    steps: Steps = 25
    width: Side = 1024
    height: Side = 576
    fps: Fps = 7
    motion_bucket_id: int = Field(
        default=127, ge=0, le=1023, description="Amount of motion; the model was trained with 1 to 255"
    )
    #: Standard deviation of the noise added to the photo before it is encoded.
    noise_aug_strength: float = Field(default=0.02, ge=0.0, le=10.0, description="Noise added to the photo")
    min_guidance_scale: float = Field(default=1.0, ge=0.0, le=100.0, description="Guidance of the first frame")
    #: Guidance is off if it is 1 or less.
    max_guidance_scale: float = Field(default=3.0, ge=0.0, le=100.0, description="Guidance of the last frame")
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
