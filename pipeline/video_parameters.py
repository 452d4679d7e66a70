"""The parameters that videos of all families have, named as in diffusers. Does not import torch."""

import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable
from operator import not_
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonDict

from svdq.pipeline.errors import InputError

Format = Literal["mp4", "gif", "webp", "png", "wav"]
Fit = Literal["crop", "pad", "stretch"]  # how a photo of another aspect ratio is fitted to width x height

MAX_FPS = 120  # largest rate of a file, in frames a second
MAX_SIDE = 4096  # largest side in pixels, also of upscaled frames: the H.264 decoders of most GPUs end there
MAX_UPSCALE = 8  # largest factor of `upscale`
MAX_FRAMES = 1024
MAX_LORAS = 16  # of a video
MAX_PROMPT = 5000  # characters; text encoders read 512 or 1024 tokens, some 2,000 or 4,000 characters of English

# The title of a field is its label in the form of the page; without one, that is its name. A field with MAIN is shown
# first there. With SPEEDUP it may be a text such as 1.5x, for the value of `Family.threshold_for`.
MAIN: JsonDict = {"main": True}
SPEEDUP: JsonDict = {"speedup": True}

# Fields that all families have, with the same limits.
#: None means the model's default, filled in when a worker takes the job.
Frames = Annotated[int | None, Field(ge=1, le=MAX_FRAMES, description="Number of frames")]
Steps = Annotated[int, Field(ge=1, le=1000, description="Denoising steps")]  # diffusers: num_inference_steps
#: Of the file and, where the model has it, of its conditioning.
Fps = Annotated[int, Field(ge=1, le=MAX_FPS, title="Frames a second", description="Frames a second")]
#: None means as many as fit into memory. Changes pixels, so it is recorded.
ChunkSize = Annotated[
    int | None,
    Field(ge=1, le=MAX_FRAMES, title="Frames decoded at a time", description="Frames decoded at a time"),
]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1, description="Seed of the noise")]


def _printable(prompt: str | None) -> str | None:
    """Refuse control characters: a prompt is shown on terminals and written to the JSON beside the video."""
    for character in prompt or "":
        if unicodedata.category(character) == "Cc" and character not in "\t\n\r":
            raise ValueError(f"text without control characters; it has {character!r}")
    return prompt


# Fields of the families whose models read prompts, and may end on a photo.
Prompt = Annotated[str, Field(max_length=MAX_PROMPT), AfterValidator(_printable)]
Loop = Annotated[bool, Field(exclude_if=not_, description="End the video on its first frame, so that it loops")]
#: Names the photo that is the last frame; what it names is up to the caller. None: there is none.
LastImage = Annotated[
    str | None, Field(exclude_if=not_, title="Last frame", description="Photo that is the last frame")
]

#: The experts that a LoRA may be for, of models with two: for the noisy steps, and for the others.
Expert = Literal["high", "low"]
_HALVES = re.compile(r",(?=\s*(?:high|low)=)")
_FACTOR, _SIZE = re.compile(r"\d(\.\d{1,3})?"), re.compile(r"(\d{2,4})[xX](\d{2,4})")


class LoraChoice(BaseModel):
    """A LoRA that a job chooses: a file in the workers' folder of LoRAs."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, max_length=1000)  # its path in that folder, without `.safetensors`
    strength: float = Field(1.0, ge=-10, le=10)  # factor on all that it adds
    expert: Expert | None = Field(None, exclude_if=not_)  # None: for all denoising components
    #: As of `lora_folder.digest_of`, by which workers find the file; "" until the name is looked up.
    digest: str = Field("", pattern=r"^([0-9a-f]{16})?$", exclude_if=not_)

    @field_validator("name")
    @classmethod
    def _is_printable(cls, name: str) -> str:
        if not name.isprintable():
            raise ValueError(f"{name!r} cannot be the name of a file")
        return name

    def __str__(self) -> str:
        return f"{self.expert + '=' if self.expert else ''}{self.name}:{self.strength:g}"

    @classmethod
    def parse(cls, text: str) -> tuple[Self, ...]:
        """Parse `NAME`, `NAME:STRENGTH` or `high=NAME,low=NAME:STRENGTH`, each half alone, too; raises ValueError.

        A strength at the end is for both halves.
        """
        found: list[Self] = []
        for half in reversed(_HALVES.split(text)):
            expert, equals, rest = half.strip().partition("=")
            is_half = bool(equals) and expert in ("high", "low")
            name, strength = _split_strength(rest if is_half else half.strip())
            strength = found[0].strength if strength is None and found else 1.0 if strength is None else strength
            values = {"name": name.removesuffix(".safetensors"), "strength": strength}
            found.insert(0, cls.model_validate(values | ({"expert": expert} if is_half else {})))
        return tuple(found)


def _split_strength(text: str) -> tuple[str, float | None]:
    name, colon, strength = text.rpartition(":")
    try:
        return (name.strip(), float(strength)) if colon else (text, None)
    except ValueError:
        return text, None  # a colon in its name


class VideoParameters(BaseModel):
    """The parameters of one video; pydantic.ValidationError if a value is out of range or unknown."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", strict=True, allow_inf_nan=False)

    title: ClassVar[str]  # the family of models in messages
    side_multiple: ClassVar[int]  # the sides of a video must be multiples of this many pixels
    frame_step: ClassVar[int] = 1  # frame counts are 1 more than a multiple of this
    usual: ClassVar[tuple[int, int]]  # frames, and frames a second, of most models; where they are left to the model
    #: Sizes to choose from, with their words: WxH, `auto` for the shape of the photo, or `auto:WxH` in as many pixels.
    sizes: ClassVar[tuple[tuple[str, str], ...]] = (("auto", "as each photo"),)

    if TYPE_CHECKING:
        # Each family declares these itself: the ids of jobs are made from their JSON, in the order of the fields. What
        # a family leaves open (None) is filled in when a worker takes the job; the pipeline gets numbers.
        family: str
        frames: int | None
        steps: int
        width: int
        height: int
        fps: int
        decode_chunk_size: int | None
        seed: int

    # Left out of the JSON unless they are given, because the ids of earlier jobs were made without them.
    loras: tuple[LoraChoice, ...] = Field(
        default=(),
        max_length=MAX_LORAS,
        strict=False,
        exclude_if=not_,
        title="LoRA",
        description="LoRA of the workers' folder SVDQ_LORAS, with its strength; for two experts high=A,low=B:0.8",
    )
    upscale: str = Field(
        default="",
        exclude_if=not_,
        description="Upscale the frames by a factor, such as 2, or to WIDTHxHEIGHT, with the workers' SVDQ_UPSCALER",
    )

    @field_validator("upscale")
    @classmethod
    def _is_factor_or_size(cls, upscale: str) -> str:
        if not upscale:
            return upscale
        if _FACTOR.fullmatch(upscale) and 1 <= float(upscale) <= MAX_UPSCALE:
            return f"{float(upscale):g}"
        size = _SIZE.fullmatch(upscale)
        if size and all(each % 2 == 0 and 16 <= each <= MAX_SIDE for each in map(int, size.groups())):
            return "x".join(str(int(each)) for each in size.groups())
        raise ValueError(
            f"a factor from 1 to {MAX_UPSCALE}, such as 2, or a size with even sides of at most {MAX_SIDE}, such as "
            "1920x1080"
        )

    @model_validator(mode="after")
    def _upscaled_sides_have_a_limit(self) -> Self:
        if self.upscale and self.width and self.height and max(self.shown_size) > MAX_SIDE:
            width, height = self.shown_size
            raise ValueError(
                f"upscale {self.upscale} makes {width}x{height} of {self.width}x{self.height}, and sides have at most "
                f"{MAX_SIDE} pixels"
            )
        return self

    @classmethod
    def of_shape(cls, text: str) -> Self:
        """Parse a shape such as 1024x576x25 (width, height, frames); raises InputError if it is none of this family."""
        try:
            width, height, frames = (int(item) for item in text.split("x"))
            return cls.model_validate({"width": width, "height": height, "frames": frames, "seed": 0})
        except ValueError as error:  # pydantic's ValidationError is one
            of_frames = f" and frames 1 more than a multiple of {cls.frame_step}" if cls.frame_step > 1 else ""
            raise InputError(
                f"{text!r} is not a shape; write it as WIDTHxHEIGHTxFRAMES with sides in multiples of "
                f"{cls.side_multiple}{of_frames}, such as 1024x576x25."
            ) from error

    @property
    def num_frames(self) -> int:
        """The number of frames, once it is filled in."""
        assert self.frames is not None, "frames are filled in when a worker takes the job"
        return self.frames

    @property
    def shown_size(self) -> tuple[int, int]:
        """Width and height of the frames in the files: upscaled, in even numbers of pixels, or the model's."""
        if size := _SIZE.fullmatch(self.upscale):
            return int(size[1]), int(size[2])
        factor = float(self.upscale or 1) / 2
        return (2 * round(self.width * factor), 2 * round(self.height * factor))

    def smaller_chunk(self, chunk: int) -> int:
        """Return the decode_chunk_size to try after one above 1 with which a decode does not fit into memory."""
        return (chunk + 1) // 2

    @property
    @abstractmethod
    def guided(self) -> bool:
        """Whether classifier-free guidance is on (diffusers: do_classifier_free_guidance)."""


class PromptedParameters(VideoParameters):
    """Parameters of a family that reads prompts, and may end on a photo; its VAE decodes in tiles or as a whole."""

    if TYPE_CHECKING:
        # Declared by each family, as above.
        prompt: str
        negative_prompt: str | None
        loop: bool
        last_image: str | None

    @model_validator(mode="after")
    def _one_last_frame(self) -> Self:
        if self.loop and self.last_image is not None:
            raise ValueError("loop and last_image exclude each other")
        if self.has_last_photo and self.frames == 1:
            raise ValueError(f"frames 1 leaves no room for {'loop' if self.loop else 'last_image'}")
        return self

    @property
    def has_last_photo(self) -> bool:
        """Whether a photo is its last frame: another one or, in a loop, the first again."""
        return self.loop or self.last_image is not None

    def smaller_chunk(self, chunk: int) -> int:
        """Return 1, for tiles: a VAE of videos gains nothing from fewer frames at a time."""
        return 1


def one_more_than_a_multiple(step: int) -> Callable[[int | None], int | None]:
    """Return the check of a number of frames whose first one is encoded alone, and the others `step` at a time."""

    def check(frames: int | None) -> int | None:
        if frames is not None and (rest := (frames - 1) % step):
            fewer = frames - rest
            more = f" and {fewer + step}" if fewer + step <= MAX_FRAMES else ""
            raise ValueError(f"1 more than a multiple of {step}, the nearest being {fewer}{more}")
        return frames

    return check


def side(multiple: int) -> object:
    """Return the limits of a side in pixels."""
    return Field(ge=multiple, le=MAX_SIDE, multiple_of=multiple)
