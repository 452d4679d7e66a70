"""`svdq report`: summarize a run."""

import json
from functools import partial

import click

from svdq.cli.formatting import echo
from svdq.cli.main import redis_options, storage_option

EXAMPLES = """\b
Examples:
  svdq report --since 22:00
  svdq report --since 2027-01-30T22:00 --until 2027-01-31T06:00
  svdq report --since 7d --json
"""


@click.command(epilog=EXAMPLES)
@click.option("--since", metavar="TIME", default="24h", show_default=True, help="Start: 22:00, 2027-01-31, 12h.")
@click.option("--until", metavar="TIME", help="End, in the same formats [default: now].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@storage_option
@redis_options
def report(since: str, until: str | None, as_json: bool, storage: str | None, redis_url: str | None) -> None:
    """Summarize a period: finished videos, pace, failures with their reasons, and what is left.

    The figures come from Redis and from the JSON beside the videos, which outlives the jobs in Redis.
    """
    from datetime import datetime

    from svdq.pipeline.errors import InputError
    from svdq.producer.queue import session
    from svdq.producer.results.run_records import jobs_left, records_from_redis, records_from_storage
    from svdq.producer.results.run_report import summarise
    from svdq.producer.settings import Settings
    from svdq.producer.storage.storage import Storage
    from svdq.producer.timeparse import parse_past

    now = datetime.now().astimezone()
    first = parse_past(since, "--since", now)
    last = parse_past(until, "--until", now) if until else now
    if last <= first:
        raise InputError(f"--until {until!r} is not after --since {since!r}; give a later time.")
    settings = Settings.load(redis_url=redis_url, storage=storage)
    warn = partial(echo, err=True)
    with session(settings) as connection:
        records = [
            *records_from_redis(connection, first, last, warn),
            *records_from_storage(Storage(settings.storage), first, warn),
        ]
        left = jobs_left(connection)
    found = summarise(records, left, since=first, until=last)
    if as_json:
        echo(json.dumps(found.as_json()))
    else:
        for line in found.lines():
            echo(line)
