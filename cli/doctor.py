"""`svdq doctor`: check the installation."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import echo
from svdq.cli.main import EXIT_FAILED, redis_options, storage_option

if TYPE_CHECKING:
    from svdq.producer.doctor import Finding
    from svdq.producer.settings import Settings

EXAMPLES = """\b
Examples:
  svdq doctor
  svdq doctor --model /models/svd-xt
  svdq doctor --quick || systemctl restart redis
  svdq doctor --json | jq 'select(.level != "ok")'
"""


@click.command(epilog=EXAMPLES)
@click.option("--model", metavar="MODEL", help="Model to check: a folder, a hub id, preview [default: SVDQ_MODEL].")
@click.option("--quick", is_flag=True, help="Check only Redis and the storage, for a health check.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each finding, one a line.")
@storage_option
@redis_options
def doctor(model: str | None, quick: bool, as_json: bool, storage: str | None, redis_url: str | None) -> int:
    """Check Redis, storage, model, GPUs, ffmpeg and versions, and say how to fix what is wrong.

    The exit code is 0 when no check fails and 1 otherwise; warnings do not count.
    """
    from svdq.producer.settings import Settings

    settings = Settings.load(model=model, storage=storage, redis_url=redis_url)
    failed = False
    for finding in _findings(settings, quick=quick):
        failed = failed or finding.level == "fail"
        if as_json:
            echo(json.dumps(asdict(finding)))
        else:
            advice = f"; {finding.advice}" if finding.advice else ""
            echo(f"{finding.level:<4}  {finding.subject:<16}  {finding.text}{advice}")
    return EXIT_FAILED if failed else 0


def _findings(settings: "Settings", *, quick: bool) -> "Iterator[Finding]":
    from svdq.producer.doctor import check_packages, check_redis, check_storage

    found = itertools.chain(check_redis(settings), check_storage(settings))
    if quick:
        return found
    from svdq.producer.doctor_model import check_model
    from svdq.worker.doctor import check_machine

    return itertools.chain(found, check_model(settings.model), check_machine(), check_packages())
