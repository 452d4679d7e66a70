"""`python -m tests.fuzz --seconds 3600 --seed 9`: mutate valid input of every reader and look for tracebacks."""

import os
import sys
import tempfile
from pathlib import Path

import click

from tests.fuzz.apart import run_apart
from tests.fuzz.targets import TARGETS


@click.command()
@click.option("--seconds", default=3600.0, show_default=True, help="Of all targets together.")
@click.option("--seed", default=9, show_default=True, help="Of the mutations.")
@click.option("--target", "names", multiple=True, type=click.Choice([*TARGETS]), help="Only this; several times.")
def main(seconds: float, seed: int, names: tuple[str, ...]) -> None:
    """Fuzz the readers of foreign data. Exit code 1: an exception that is not documented, a hang or a leak."""
    for name in [name for name in os.environ if name.startswith("SVDQ_")]:
        del os.environ[name]
    names = names or tuple(TARGETS)
    saved = Path(tempfile.mkdtemp(prefix="svdq-fuzz-"))
    print(f"Inputs that are found: {saved}", flush=True)
    print(
        "| target | inputs | inputs/s | refused | findings | slowest, ms | growth, MiB |\n|---|---|---|---|---|---|---|"
    )
    found = []
    for name in names:
        outcome = run_apart(name, saved, seed, seconds / len(names))
        found += outcome.findings.values()
        print(
            f"| {name} | {outcome.num_inputs:,} | {outcome.num_inputs / max(outcome.seconds, 1e-9):.0f} "
            f"| {outcome.num_refused / max(outcome.num_inputs, 1):.0%} | {len(outcome.findings)} "
            f"| {outcome.slowest_s * 1000:.0f} | {outcome.growth_bytes >> 20} |",
            flush=True,
        )
    print(*found, sep="\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
