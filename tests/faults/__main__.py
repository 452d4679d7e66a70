"""`python -m tests.faults --campaign all --seed 7`: run campaigns and print their results."""

import os
import signal
import sys
from pathlib import Path

import click

from tests.faults.campaigns.bits import VIDEOS
from tests.faults.catalogue import CAMPAIGNS, SETS, run_campaign
from tests.faults.plan import Tally
from tests.faults.report import as_table, write_report


@click.command()
@click.option(
    "--campaign",
    "names",
    multiple=True,
    default=("all",),
    show_default=True,
    type=click.Choice([*SETS, *CAMPAIGNS]),
    help="What to run; may be given several times.",
)
@click.option("--seed", default=7, show_default=True, help="Of all that is random.")
@click.option("--jobs", type=click.IntRange(min=1), help="Jobs a campaign; default: each campaign's own number.")
@click.option("--ranks", type=click.IntRange(min=1), help="Ranks a group; default: each campaign's own number.")
@click.option("--hold-s", type=click.FloatRange(min=0), help="Seconds that a pause or a full disk lasts.")
@click.option(
    "--family",
    default="svd",
    show_default=True,
    type=click.Choice(list(VIDEOS)),
    help="Family of the untrained model; only for bits.",
)
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the results as JSON.")
def main(
    names: tuple[str, ...],
    seed: int,
    jobs: int | None,
    ranks: int | None,
    hold_s: float | None,
    family: str,
    report: Path | None,
) -> None:
    """Kill workers, Redis and disks under running jobs, and count what was lost. Exit code 1: something was."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this must not leave workers behind
    for name in [name for name in os.environ if name.startswith("SVDQ_")]:
        del os.environ[name]
    chosen = dict.fromkeys(campaign for name in names for campaign in SETS.get(name, (name,)))
    tallies: list[Tally] = []
    for name in chosen:
        click.echo(f"{name} …", err=True)
        tally = run_campaign(name, seed=seed, num_jobs=jobs, ranks=ranks, hold_s=hold_s, family=family)
        tallies.append(tally)
        for line in (*tally.troubles(), *(f"{name}: {note}" for note in tally.notes)):
            click.echo(line, err=True)
        if report is not None:
            asked = {"seed": seed, "jobs": jobs, "ranks": ranks, "hold_s": hold_s, "family": family}
            write_report(report, asked, tallies)
    click.echo(as_table(tallies))
    sys.exit(0 if all(tally.kept for tally in tallies) else 1)


if __name__ == "__main__":
    main()
