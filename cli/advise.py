"""`svdq advise`: show where the time of a run goes, and what would help most."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import echo, echo_json
from svdq.cli.main import connect, json_option, redis_options

if TYPE_CHECKING:
    from svdq.pipeline.planning.advice import Remedy
    from svdq.pipeline.planning.recordings import Profile
    from svdq.producer.status.ranks import GroupStatus

EXAMPLES = """\b
Examples:
  svdq advise                       the groups that are running now
  svdq advise bench.json            what svdq bench --json bench.json wrote
"""


@click.command(epilog=EXAMPLES)
@click.argument("recording", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option("group")
@redis_options
def advise(recording: Path | None, as_json: bool, redis_url: str | None) -> None:
    """Show where the time goes, which resource limits the run, and the one change that would help most.

    RECORDING is a file of svdq bench --json. Without it, the running groups are analyzed, by their figures of the last
    ten seconds.
    """
    from svdq.pipeline.planning.advice import advise as advise_on
    from svdq.pipeline.planning.recordings import read_profile

    profiles = [read_profile(recording)] if recording is not None else _live(redis_url)
    for profile in profiles:
        advice = advise_on(profile)
        if as_json:
            echo_json({"source": profile.source, "busy": profile.busy, **asdict(advice)})
            continue
        echo(f"{profile.source}:", advice.time, f"This would help most: {_remedy(advice.best)}")
        echo(*(f"After that: {_remedy(other)}" for other in advice.others))


def _remedy(remedy: "Remedy") -> str:
    return f"{remedy.text} Expected: {remedy.factor:.2f} times as many videos."


def _live(redis_url: str | None) -> "list[Profile]":
    """Build the profiles of all groups that have finished a video."""
    from svdq.pipeline.errors import InputError
    from svdq.producer.status.ranks import read_groups

    with connect(redis_url=redis_url) as connection:
        groups = read_groups(connection)
    profiles = [profile for group in groups if (profile := _profile(group)) is not None]
    if not profiles:
        raise InputError(
            "No running group has finished a video; name a recording, or try again after svdq worker has finished one."
        )
    return profiles


def _profile(group: "GroupStatus") -> "Profile | None":
    """Build the current profile of a group; None before its first video and while a rank is missing."""
    from svdq.cli.plan import costs_of, shape_name
    from svdq.pipeline.planning.recordings import Profile

    intake = group.intake
    if intake is None or not intake.costs or len(group.ranks) != group.ranks[0].num_ranks:
        return None
    costs = intake.costs[-1]
    steps = next((rank.steps for rank in group.ranks if rank.steps), 25)
    busy = tuple(min(1.0, rank.busy_share) for rank in group.ranks)
    idle = 1 - sum(busy) / len(busy)
    is_writing = any(condition.job_ids for condition in group.conditions)
    return Profile(
        source=f"Group {group.name}, {shape_name(costs)}, {steps} steps, the last ten seconds",
        video=costs_of(costs, steps),
        busy=busy,
        no_jobs=idle if not is_writing and len(intake.in_flight) < len(busy) else 0.0,
        writing=idle if is_writing else 0.0,
    )
