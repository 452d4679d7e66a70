"""The campaigns with their sizes, and how one is run."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.faults.arena import Arena
from tests.faults.campaigns import (
    able,
    bits,
    chains,
    clock,
    device,
    groups,
    kills,
    mixed,
    network,
    on_demand,
    owners,
    poison,
    redis_away,
    rounds,
    soak,
    storage,
    storages,
    windows,
)
from tests.faults.group import READY
from tests.faults.leftovers import leftovers
from tests.faults.plan import Size, Tally
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
    in_bucket: bool = False  # whether it is in a bucket of an S3 server


CAMPAIGNS = {
    "kill-rank": Campaign(run=kills.kill_rank),
    "kill-launcher": Campaign(run=kills.kill_launcher),
    "sigterm": Campaign(run=kills.sigterm),
    "kill-all": Campaign(run=kills.kill_all),
    "pause-free": Campaign(run=kills.pause_free, num_jobs=60),
    "chains": Campaign(run=chains.chains, num_jobs=60),
    "bits": Campaign(run=bits.bits, num_jobs=3),
    "redis-kill": Campaign(run=redis_away.redis_kill),
    "redis-embedded": Campaign(run=redis_away.redis_embedded),
    "redis-pause": Campaign(run=redis_away.redis_pause),
    "redis-full": Campaign(run=redis_away.redis_full),
    "redis-gone": Campaign(run=redis_away.redis_gone),
    "mixed": Campaign(run=mixed.mixed),
    "storage-full": Campaign(run=storage.storage_full, own_disk=True),
    "storage-slow": Campaign(run=storage.storage_slow, num_jobs=20, model=QUICK),
    "redis-restored": Campaign(run=storages.redis_restored, num_jobs=60),
    "two-servers": Campaign(run=storages.two_servers, num_jobs=40),
    "disk-away": Campaign(run=storages.disk_away, num_jobs=60, own_disk=True),
    "link-deleted": Campaign(run=storages.link_deleted, num_jobs=60),
    "two-groups": Campaign(run=groups.two_groups, ranks=2),
    "two-hosts": Campaign(run=groups.two_hosts, ranks=2),
    "network-folder": Campaign(run=network.network, ranks=2),
    "network-bucket": Campaign(run=network.network, ranks=2, in_bucket=True),
    **{
        where: Campaign(
            run=partial(windows.window, where=where), num_jobs=40, ranks=3 if where in windows.THREE_RANKS else 2
        )
        for where in windows.WINDOWS
    },
    "rounds": Campaign(
        run=rounds.rounds, num_jobs=40, ranks=1, model="simulated:step_ms=20,encode_ms=5,segments=8+12,load_ms=200"
    ),
    "on-demand": Campaign(run=on_demand.on_demand, num_jobs=48, ranks=2),
    "able": Campaign(run=able.able, num_jobs=60, ranks=2),
    "owners": Campaign(run=owners.owners, num_jobs=306, ranks=7, model="simulated:step_ms=20"),
    "poisoned-photo": Campaign(run=poison.poisoned_photo),
    "device": Campaign(run=device.device, num_jobs=60, ranks=7),
    "clock-steps": Campaign(run=clock.clock_steps, ranks=2),
    # Steps long enough that ranks hand samples over: the planner keeps shorter ones together.
    "soak": Campaign(run=soak.soak, num_jobs=3000, model="simulated:step_ms=20"),
}
SHORT = ("kill-rank", "mixed", "kill-all")  # what `make test` runs, small
NETWORK = ("network-folder", "network-bucket")
#: Names of several at once.
SETS = {"all": tuple(CAMPAIGNS), "windows": windows.WINDOWS, "network": NETWORK, "short": SHORT}


def run_campaign(
    name: str,
    *,
    seed: int,
    num_jobs: int | None = None,
    ranks: int | None = None,
    hold_s: float | None = None,
    family: str = "svd",
) -> Tally:
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
    arena = Arena(size=size, seed=seed, model=campaign.model, own_disk=campaign.own_disk, in_bucket=campaign.in_bucket)
    arena.tally.campaign = name
    keep = True
    try:
        try:
            campaign.run(arena)
        except Exception:  # noqa: BLE001 - what the harness could not do is a finding, too; its jobs are judged anyway
            arena.tally.broken.append(traceback.format_exc())
        arena.settle()
        judge(arena)
        arena.tally.took_s = time.monotonic() - began_at
        keep = not arena.tally.kept
        return arena.tally
    finally:
        arena.leave(keep=keep)


def judge(arena: Arena) -> None:
    """Compare the ends of the jobs with those that are expected."""
    tally = arena.tally
    verify(arena)
    if tally.may_do_again is not None and tally.most_steps_again > tally.may_do_again:
        tally.broken.append(f"{tally.most_steps_again} steps were done again, more than {tally.may_do_again}")
    if tally.num_rendered_again > tally.num_faults:  # a writer has one video at a time in its hands
        tally.broken.append(f"{tally.num_rendered_again} videos were rendered again")
    tally.num_jobs = len(arena.jobs)
    tally.leftovers = leftovers(arena)
    tally.num_starts = sum(group.text.count(READY) for group in arena.groups)
