"""Reads files of `svdq bench --json`: the costs of a video, and how busy each rank was."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

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

    through: str
    ranks: int = Field(ge=1, le=_MAX_RANKS)
    steps: int = Field(ge=1, le=1000)
    segments: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] | None = None
    step_ms: _Positive
    encode_ms: _Time
    decode_ms: _Time
    busy_share: list[Annotated[float, Field(ge=0, le=1.01)]] = Field(min_length=1, max_length=_MAX_RANKS)


def read_profile(path: Path) -> Profile:
    """Read a file of `svdq bench --json`.

    Raises:
        InputError: the file has other content.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise InputError(f"{path} cannot be read ({reason}); give a file of svdq bench --json.") from error
    if not isinstance(document, dict) or not document.get("runs"):
        raise InputError(f"{path} has no runs; give a file of svdq bench --json (without --burst).")
    try:
        runs = TypeAdapter(list[_Run]).validate_python(document["runs"])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{path} was not written by svdq bench --json of this version ({where}: {first['msg']}); measure again."
        ) from error
    return _from_runs(runs, str(path))


def _from_runs(runs: Sequence[_Run], source: str) -> Profile:
    """Take the largest group of a bench."""
    pipelines = [run for run in runs if run.through != "replicas"]
    if not pipelines:
        raise InputError(f"{source} has no run through a pipeline in it; run svdq bench with --json.")
    run = max(pipelines, key=lambda run: run.ranks)
    costs = Costs(
        step_s=(run.step_ms / 1000,) * run.ranks, encode_s=run.encode_ms / 1000, decode_s=run.decode_ms / 1000
    )
    return Profile(
        source=f"{source}, {run.ranks} ranks",
        video=VideoCosts(steps=run.steps, costs=costs, segments=run.segments),
        busy=tuple(min(1.0, share) for share in run.busy_share),
    )
