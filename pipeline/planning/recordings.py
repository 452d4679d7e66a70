"""Reads files of `svdq bench --json`: the costs of a video, and how busy each rank was."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from svdq.pipeline.costs import Costs
from svdq.pipeline.errors import InputError
from svdq.pipeline.planning.capacity import VideoCosts

#: Ranks of one group at most: what is above is a mistake.
_MAX_RANKS = 4096
#: Any unit of time: some thousand years in microseconds.
_Time = Annotated[float, Field(ge=0, le=1e17)]
_Positive = Annotated[float, Field(ge=1e-9, le=1e17)]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A measured group: the costs of its videos, and how busy its ranks were."""

    #: Description of the source, for display.
    source: str
    #: The costs of a video, with a step time for each of the K ranks.
    video: VideoCosts
    #: Share of the time in which each rank computed for videos.
    busy: tuple[float, ...]
    #: Share of the time of all ranks in which they were idle while fewer videos were in flight than there are ranks.
    no_jobs: float = 0.0
    #: The same while finished videos waited to be written.
    writing: float = 0.0

    @property
    def mean_busy(self) -> float:
        """Mean busy share of the ranks."""
        return sum(self.busy) / len(self.busy)


class _Run(BaseModel):
    """What is used of a run of `svdq bench --json`."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    ranks: int = Field(ge=1, le=_MAX_RANKS)
    steps: int = Field(ge=1, le=1000)
    segments: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] | None = None
    step_ms: _Positive
    encode_ms: _Time
    decode_ms: _Time
    busy_share: list[Annotated[float, Field(ge=0, le=1.01)]] = Field(min_length=1, max_length=_MAX_RANKS)


class _Recording(BaseModel):
    """What is used of a file of `svdq bench --json`."""

    runs: list[_Run] = Field(min_length=1)


def read_profile(path: Path) -> Profile:
    """Read the largest group of a file of `svdq bench --json`.

    Raises:
        InputError: the file has other content.
    """
    try:
        runs = _Recording.model_validate_json(path.read_bytes()).runs
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a file of svdq bench --json.") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        reason = ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))
        raise InputError(
            f"{path} has no run of a group in it ({reason}); give a file of svdq bench --json of "
            "this version, without --burst."
        ) from error
    run = max(runs, key=lambda run: run.ranks)
    costs = Costs(
        step_s=(run.step_ms / 1000,) * run.ranks, encode_s=run.encode_ms / 1000, decode_s=run.decode_ms / 1000
    )
    return Profile(
        source=f"{path}, a group of {run.ranks}",
        video=VideoCosts(steps=run.steps, costs=costs, segments=run.segments),
        busy=tuple(min(1.0, share) for share in run.busy_share),
    )
