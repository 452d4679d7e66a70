"""The parameters of a Wan video: the arguments of diffusers' WanImageToVideoPipeline. Does not import torch."""

import unicodedata
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from svdq.pipeline.parameters import MAX_FRAMES, ChunkSize, Fps, Frames, Seed, Steps, VideoParameters, side

#: 8 for the VAE times 2 for the transformer's patches.
SIZE_MULTIPLE = 16
#: The VAE compresses the frames after the first by fours.
FRAME_STEP = 4
#: Characters of a prompt. The text encoder reads its first 512 tokens, some 2,000 characters of English.
MAX_PROMPT = 5000

_SPACES = "\t\n\r"


def _one_more_than_a_multiple(frames: int | None) -> int | None:
    if frames is not None and (rest := (frames - 1) % FRAME_STEP):
        fewer = frames - rest
        more = f" and {fewer + FRAME_STEP}" if fewer + FRAME_STEP <= MAX_FRAMES else ""
        raise ValueError(f"1 more than a multiple of {FRAME_STEP}, the nearest being {fewer}{more}")
    return frames


def _printable(prompt: str | None) -> str | None:
    """Refuse control characters: a prompt is shown on terminals and written to the JSON beside the video."""
    for character in prompt or "":
        if unicodedata.category(character) == "Cc" and character not in _SPACES:
            raise ValueError(f"text without control characters; it has {character!r}")
    return prompt


Side = Annotated[int | None, side(SIZE_MULTIPLE)]
_Text = Annotated[str, Field(max_length=MAX_PROMPT), AfterValidator(_printable)]


class WanParameters(VideoParameters):
    """The parameters of one video; frozen, and unknown fields are refused. None means the model's default.

    Raises:
        pydantic.ValidationError: a value is out of range.
    """

    title: ClassVar[str] = "Wan"
    side_multiple: ClassVar[int] = SIZE_MULTIPLE
    frame_step: ClassVar[int] = FRAME_STEP

    family: Literal["wan"] = "wan"
    frames: Annotated[Frames, AfterValidator(_one_more_than_a_multiple)] = None
    steps: Steps | None = None  # type: ignore[assignment]  # the pipeline gets numbers
    width: Side = None  # type: ignore[assignment]
    height: Side = None  # type: ignore[assignment]
    fps: Fps | None = None  # type: ignore[assignment]
    prompt: _Text = Field(default="", description="What happens in the video")
    #: "" is none; None means the model's own.
    negative_prompt: _Text | None = Field(default=None, description="What to avoid")
    #: Guidance is off if it is 1 or less.
    guidance_scale: float | None = Field(
        default=None, ge=0.0, le=100.0, description="Guidance by the prompt; of two experts, that of the noisy steps"
    )
    guidance_scale_2: float | None = Field(
        default=None, ge=0.0, le=100.0, description="Guidance of the expert of the other steps"
    )
    #: Moves steps to higher noise.
    flow_shift: float | None = Field(default=None, ge=0.01, le=100.0, description="Shift of the noise levels")
    #: The VAE decodes frame by frame. A number below that of the frames decodes in tiles, which changes pixels.
    decode_chunk_size: ChunkSize = None
    seed: Seed

    def smaller_chunk(self, chunk: int) -> int:
        """Return 1, for tiles: the VAE decodes frame by frame in any case, so fewer frames at a time save nothing."""
        return 1

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance is on; a scale that is left to the model counts as on.

        As in diffusers, the first scale decides for all steps: two experts with 3.5 and 1 compute both predictions, and
        with 1 and 3.5 one.
        """
        return self.guidance_scale is None or self.guidance_scale > 1
