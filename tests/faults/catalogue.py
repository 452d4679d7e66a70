"""The campaigns with their sizes, and how one is run."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.faults.arena import Arena
from tests.faults.campaigns import (
    bits,
    chains,
    clock,
    device,
    groups,
    kills,
    mixed,
    poison,
    redis_away,
    rounds,
    soak,
    storage,
    windows,
)
from tests.faults.group import READY
from tests.faults.leftovers import leftovers
from tests.faults.plan import Size
from tests.faults.report import Outcome
from tests.faults.verify import verify

#: A step as long as a short one on a GPU, slept through.
SIMULATED = "simulated:step_ms=50"
QUICK = "simulated:step_ms=2"  # steps so quick that everything else is the load


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """One kind of trouble, and what it takes."""

    #: Submits jobs, starts workers and injects faults; what is left is waited for.
    run: Callable[[Arena], None]
    num_jobs: int = 100
    ranks: int = 3
    model: str = SIMULATED
    own_disk: bool = False  # whether its storage is on a small disk


CAMPAIGNS = {
    "kill-rank": Campaign(run=kills.kill_rank),
    "kill-launcher": Campaign(run=kills.kill_launcher),
    "sigterm": Campaign(run=kills.sigterm),
    "kill-all": Campaign(run=kills.kill_all),
    "chains": Campaign(run=chains.chains, num_jobs=60),
    "bits": Campaign(run=bits.bits, num_jobs=4),
    "redis-kill": Campaign(run=redis_away.redis_kill),
    "redis-embedded": Campaign(run=redis_away.redis_embedded),
    "redis-pause": Campaign(run=redis_away.redis_pause),
    "redis-gone": Campaign(run=redis_away.redis_gone),
    "mixed": Campaign(run=mixed.mixed, model="simulated:step_ms=50"),
    "storage-full": Campaign(run=storage.storage_full, own_disk=True),
    "storage-slow": Campaign(run=storage.storage_slow, num_jobs=20, model=QUICK),
    "two-groups": Campaign(run=groups.two_groups, ranks=2),
    "two-hosts": Campaign(run=groups.two_hosts, ranks=2),
    "after-pop": Campaign(run=windows.after_pop, num_jobs=40, ranks=2),
    "after-admission": Campaign(run=windows.after_admission, num_jobs=40, ranks=2),
    "after-rename": Campaign(run=windows.after_rename, num_jobs=40, ranks=2),
    "before-acknowledgement": Campaign(run=windows.before_acknowledgement, num_jobs=40, ranks=2),
    "during-prepare": Campaign(run=windows.during_prepare, num_jobs=40, ranks=2),
    "during-encode": Campaign(run=windows.during_encode, num_jobs=40),
    "during-decode": Campaign(run=windows.during_decode, num_jobs=40),
    "frames-in-transit": Campaign(run=windows.frames_in_transit, num_jobs=40),
    "during-write": Campaign(run=windows.during_write, num_jobs=40, ranks=2),
    "rounds": Campaign(
        run=rounds.rounds, num_jobs=40, ranks=1, model="simulated:step_ms=20,encode_ms=5,segments=8+12,load_ms=200"
    ),
    "poisoned-photo": Campaign(run=poison.poisoned_photo),
    "device": Campaign(run=device.device, num_jobs=60, ranks=7),
    "clock-steps": Campaign(run=clock.clock_steps, ranks=2),
    # Steps long enough that ranks hand samples over: the planner keeps shorter ones together.
    "soak": Campaign(run=soak.soak, num_jobs=3000, model="simulated:step_ms=20"),
}
SHORT = ("kill-rank", "mixed", "kill-all")  # what `make test` runs, small
SETS = {"all": tuple(CAMPAIGNS), "windows": windows.WINDOWS, "short": SHORT}  # names of several at once


def run_campaign(
    name: str,
    *,
    seed: int,
    num_jobs: int | None = None,
    ranks: int | None = None,
    hold_s: float | None = None,
    family: str = "svd",
) -> Outcome:
    """Run one campaign in an arena of its own and judge it; the files of a failed one are kept.

    Args:
        name: one of CAMPAIGNS.
        seed: of all that is random in it.
        num_jobs: instead of the campaign's own number.
        ranks: the same.
        hold_s: seconds that a pause or a full disk lasts, instead of the campaign's own.
        family: of the untrained model, for campaigns with one.
    """
    campaign = CAMPAIGNS[name]
    size = Size(num_jobs=num_jobs or campaign.num_jobs, ranks=ranks or campaign.ranks, hold_s=hold_s, family=family)
    began_at = time.monotonic()
    arena = Arena(size=size, seed=seed, model=campaign.model, own_disk=campaign.own_disk)
    keep = True
    try:
        try:
            campaign.run(arena)
        except Exception:  # noqa: BLE001 - what the harness could not do is a finding, too; its jobs are judged anyway
            arena.tally.broken.append(traceback.format_exc())
        arena.settle()
        outcome = replace(judge(name, arena), took_s=time.monotonic() - began_at)
        keep = not outcome.kept
        return outcome
    finally:
        arena.leave(keep=keep)


def judge(name: str, arena: Arena) -> Outcome:
    """Compare the ends of the jobs with those that are expected."""
    verdict, tally = verify(arena), arena.tally
    if tally.most_steps_again is not None and verdict.most_steps_again > tally.most_steps_again:
        tally.broken.append(f"{verdict.most_steps_again} steps were done again, more than {tally.most_steps_again}")
    if verdict.num_rendered_again > tally.num_faults:  # a writer has one video at a time in its hands
        tally.broken.append(f"{verdict.num_rendered_again} videos were rendered again")
    return Outcome(
        campaign=name,
        num_jobs=len(arena.jobs),
        num_faults=tally.num_faults,
        lost=tuple(verdict.lost),
        duplicated=tuple(verdict.duplicated),
        wrong=tuple(verdict.wrong),
        leftovers=tuple(leftovers(arena)),
        broken=tuple(tally.broken),
        recoveries_s=tuple(tally.recoveries_s),
        num_starts=sum(group.text.count(READY) for group in arena.groups),
        num_rendered_again=verdict.num_rendered_again,
        most_steps_again=verdict.most_steps_again,
        notes=tuple(tally.notes),
    )
