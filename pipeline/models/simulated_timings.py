"""Parses the costs in the name of a simulated model, such as simulated:step_ms=50. Does not import torch."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdq.pipeline.errors import InputError


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
