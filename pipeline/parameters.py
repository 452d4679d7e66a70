"""The parameters of one video: the arguments of diffusers' StableVideoDiffusionPipeline. Does not import torch.

Names and defaults are diffusers' own wherever diffusers has the argument.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from svdq.pipeline.errors import InputError

#: Formats of video files.
Format = Literal["mp4", "gif", "webp", "png"]
#: How a photo of another aspect ratio is fitted to width x height.
Fit = Literal["crop", "pad", "stretch"]

#: The sides of a video must be multiples of this many pixels: 8 for the VAE times 8 for the UNet's three halvings.
SIZE_MULTIPLE = 64
#: Largest side in pixels.
MAX_SIDE = 4096

Side = Annotated[int, Field(ge=SIZE_MULTIPLE, le=MAX_SIDE, multiple_of=SIZE_MULTIPLE)]


class VideoParameters(BaseModel):
    """The parameters of one video; frozen, and unknown fields are refused.

    Raises:
        pydantic.ValidationError: a value is out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    #: None means the model's default (14 or 25), filled in when a worker takes the job.
    frames: int | None = Field(default=None, ge=1, le=1024, description="Number of frames")
    #: diffusers: num_inference_steps.
    steps: int = Field(default=25, ge=1, le=1000, description="Denoising steps")
    #: Pixels.
    width: Side = 1024
    #: Pixels.
    height: Side = 576
    #: Of the file and of the model's conditioning.
    fps: int = Field(default=7, ge=1, le=120, description="Frames a second")
    motion_bucket_id: int = Field(
        default=127, ge=0, le=1023, description="Amount of motion; the model was trained with 1 to 255"
    )
    #: Standard deviation of the noise added to the photo before it is encoded.
    noise_aug_strength: float = Field(default=0.02, ge=0.0, le=10.0, description="Noise added to the photo")
    min_guidance_scale: float = Field(default=1.0, ge=0.0, le=100.0, description="Guidance of the first frame")
    #: Guidance is off if it is 1 or less.
    max_guidance_scale: float = Field(default=3.0, ge=0.0, le=100.0, description="Guidance of the last frame")
    #: None means as many as fit into memory. Changes pixels, so it is recorded.
    decode_chunk_size: int | None = Field(default=None, ge=1, le=1024, description="Frames decoded at a time")
    #: Seed of the video's only random generator.
    seed: int = Field(ge=0, le=2**63 - 1, description="Seed of the noise")

    @model_validator(mode="after")
    def _guidance_in_order(self) -> Self:
        if self.min_guidance_scale > self.max_guidance_scale:
            raise ValueError(
                f"min_guidance_scale {self.min_guidance_scale} is larger than max_guidance_scale "
                f"{self.max_guidance_scale}"
            )
        return self

    @classmethod
    def of_shape(cls, text: str) -> Self:
        """Parse a shape such as 1024x576x25 (width, height, frames); other parameters have their defaults.

        Raises:
            InputError: the text is not a shape.
        """
        try:
            width, height, frames = (int(item) for item in text.split("x"))
            return cls(width=width, height=height, frames=frames, seed=0)
        except ValueError as error:  # pydantic's ValidationError is one
            raise InputError(
                f"{text!r} is not a shape; write it as WIDTHxHEIGHTxFRAMES with sides in multiples of 64, "
                "such as 1024x576x25."
            ) from error

    @property
    def num_frames(self) -> int:
        """The number of frames, once it is filled in."""
        assert self.frames is not None, "frames are filled in when a worker takes the job"
        return self.frames

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance is on (diffusers: do_classifier_free_guidance)."""
        return self.max_guidance_scale > 1
