"""The names of models: preview, simulated with its costs, a folder, or a hub id. Does not import torch."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from svdq.pipeline.errors import InputError
from svdq.pipeline.planning.binding import parse_segments

#: The form of a hub id: organisation/model, optionally with @ and a branch, tag or commit.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?")


def has_weights(name: str) -> bool:
    """Return whether a model's name, as in SVDQ_MODEL, is a folder or a hub id, not a model made in code."""
    return name != "preview" and name.partition(":")[0] != "simulated"


def split_id(name: str) -> tuple[str, str | None]:
    """Split a hub id into `organisation/model` and the revision after an @, if there is one.

    Raises:
        InputError: the name is not a hub id.
    """
    if name.count("@") > 1:
        raise InputError(f"{name!r} names two revisions; give one, after an @ or with --revision.")
    if not HUB_ID.fullmatch(name):
        raise InputError(
            f"{name!r} is not a hub id; write it as organisation/model, or organisation/model@revision, such as "
            "stabilityai/stable-video-diffusion-img2vid-xt."
        )
    repository, _, revision = name.partition("@")
    return repository, revision or None


class Timings(BaseModel):
    """The simulated costs of a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Milliseconds of a denoising step.
    step_ms: float = Field(50.0, ge=0)
    #: Milliseconds of an encode.
    encode_ms: float = Field(0.0, ge=0)
    #: Milliseconds of a decode.
    decode_ms: float = Field(0.0, ge=0)
    #: Milliseconds of the first use of a shape.
    warm_ms: float = Field(0.0, ge=0)
    #: Two experts, each of which does some of the steps: 15+25 of 40, and of other numbers in proportion.
    segments: Annotated[tuple[int, int], BeforeValidator(parse_segments)] | None = None
    #: Factor by which this rank's steps are slower than `step_ms`.
    slowdown: float = Field(1.0, gt=0)
    #: For fault tests: a video with this seed kills its process in its fourth step, or in its last if it has fewer.
    kill_seed: int | None = None
    #: For fault tests: a video with this seed hangs in that step.
    hang_seed: int | None = None
    #: For fault tests: decoding more frames than this at a time runs out of memory.
    decodable_frames: int | None = Field(None, ge=1)
    #: For fault tests: the latents of a video with this seed become NaN.
    nan_seed: int | None = None


def timings_of(name: str) -> Timings:
    """Parse the name `simulated` or `simulated:step_ms=50,decode_ms=100`.

    Raises:
        InputError: a setting is unknown or not a number.
    """
    settings: dict[str, Any] = {}
    for item in filter(None, name.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        settings[key] = value
    try:
        return Timings.model_validate(settings)
    except ValidationError as error:
        raise InputError(
            f"The model {name!r} cannot be simulated ({error.errors()[0]['msg']}); write it like "
            f"simulated:step_ms=50,decode_ms=100 with any of {', '.join(Timings.model_fields)}."
        ) from error
