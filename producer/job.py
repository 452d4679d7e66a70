"""What a job is: a photo in storage, the parameters of its video and the files that are wanted. Knows no Redis.

A job is stored as JSON in the keyword arguments of an RQ job. Its id is made from its content, so that the same
submission again finds the existing job.
"""

import hashlib
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from svdq.pipeline.parameters import VideoParameters

#: The files that can be written for a video.
Format = Literal["mp4", "gif", "webp", "png"]
#: How a photo of another shape is brought to width x height.
Fit = Literal["crop", "pad", "stretch"]

INPUT_KEY = re.compile(r"inputs/[0-9a-f]{64}\.[a-z0-9]{1,5}")


class Job(VideoParameters):
    """One photo to one video; frozen, and unknown fields are refused.

    Raises:
        pydantic.ValidationError: a value is out of its range, or the image is not a key under inputs/.
    """

    #: Storage key of the photo: inputs/<sha256>.<ext>
    image: str
    #: Stem of the original file's name; outputs are named after it.
    name: str = Field(min_length=1, max_length=200)
    #: Files to write, at least one.
    formats: Annotated[tuple[Format, ...], Field(min_length=1, strict=False)] = ("mp4",)
    #: What is done to a photo of another shape.
    fit: Fit = "crop"

    @field_validator("image")
    @classmethod
    def _image_is_an_input(cls, image: str) -> str:
        if not INPUT_KEY.fullmatch(image):
            raise ValueError(f"{image!r} is not of the form inputs/<sha256>.<ext>")
        return image

    @field_validator("name")
    @classmethod
    def _name_is_a_file_name(cls, name: str) -> str:
        if not name.isprintable() or "/" in name or "\\" in name or name.startswith("."):
            raise ValueError(f"{name!r} cannot be the name of a file")
        return name

    @property
    def parameters(self) -> VideoParameters:
        """What the pipeline needs to know of it."""
        return VideoParameters(**{field: getattr(self, field) for field in VideoParameters.model_fields})

    def digest(self, *, seed_was_drawn: bool, nonce: str = "") -> str:
        """Make the job's id: 20 hex digits of the SHA-256 of its content.

        A seed that was drawn for the user does not count, so that the same submission again is the same job.
        A `nonce` makes it another job in any case.
        """
        content = self.model_dump_json(exclude={"name", "seed"} if seed_was_drawn else {"name"})
        return hashlib.sha256(f"{content}{nonce}".encode()).hexdigest()[:20]
