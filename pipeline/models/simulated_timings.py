"""What the name of a simulated model says of its costs, such as simulated:step_ms=50. Imports no torch."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdq.pipeline.errors import InputError


class Timings(BaseModel):
    """What a simulated model pretends to cost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Milliseconds of a denoising step.
    step_ms: float = Field(50.0, ge=0)
    #: Milliseconds of an encode.
    encode_ms: float = Field(0.0, ge=0)
    #: Milliseconds of a decode.
    decode_ms: float = Field(0.0, ge=0)
    #: Milliseconds of the first use of a shape.
    warm_ms: float = Field(0.0, ge=0)
    #: How many times slower than `step_ms` this rank's steps are.
    slowdown: float = Field(1.0, gt=0)
    #: For tests of faults: a video of this seed kills its process in its fourth step, or its last if it has fewer.
    kill_seed: int | None = None
    #: For tests of faults: a video of this seed never comes out of that step.
    hang_seed: int | None = None
    #: For tests of faults: to decode more frames than this at a time runs out of memory.
    decodable_frames: int | None = Field(None, ge=1)
    #: For tests of faults: the latents of a video of this seed become NaN.
    nan_seed: int | None = None


def timings_of(name: str) -> Timings:
    """Read the name `simulated` or `simulated:step_ms=50,decode_ms=100`.

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
