"""`svdq top`: show queues, ranks and samples in flight, live on a terminal, else once or as JSON."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import clock, echo
from svdq.cli.main import redis_options
from svdq.cli.option_types import Number

if TYPE_CHECKING:
    import redis

    from svdq.producer.status.snapshot import Snapshot

#: Seconds between two refreshes; ranks report about once a second.
INTERVAL_S = 1.0
#: Width of the output when it does not go to a terminal.
PLAIN_WIDTH = 120


@click.command()
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option("--watch", is_flag=True, help="Keep printing with --json or without a terminal.")
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=Number(0.1, 3600),
    help=f"Seconds between two refreshes; implies --watch.  [default: {INTERVAL_S:g}]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each refresh, one a line.")
@redis_options
def top(once: bool, watch: bool, interval_s: float | None, as_json: bool, redis_url: str | None) -> None:
    """Watch the queues, every rank, and the videos in flight as they move through the ranks.

    On a terminal it runs until you press q or Ctrl-C. Without a terminal it prints the state once and exits.

    \b
    Examples:
      svdq top                           live view
      svdq top --once                    print once
      svdq top --json --interval 5       one JSON object a line, every five seconds
    """  # noqa: D301 - click's \b keeps the formatting of the next paragraph
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    watch = watch or interval_s is not None
    if once and watch:
        raise click.UsageError("--once prints once and --watch or --interval repeats; give one of them.")
    interval_s = INTERVAL_S if interval_s is None else interval_s
    with session(Settings.load(redis_url=redis_url)) as connection:
        if not (once or as_json) and _is_live_terminal():
            _show(connection, interval_s)
            return
        for refresh in _refreshes(connection):
            if refresh.is_new:
                _print(refresh.snapshot, as_json)
            elif refresh.away_for == 1:
                echo(refresh.away, err=True)
            if not watch:
                return
            time.sleep(interval_s)


@dataclass(frozen=True, kw_only=True)
class _Refresh:
    """One state of everything to show."""

    #: The newest snapshot.
    snapshot: "Snapshot"
    #: Why there is no newer snapshot, as a sentence; "" when Redis answers.
    away: str = ""
    #: Number of failed attempts in a row to reach Redis.
    away_for: int = 0

    @property
    def is_new(self) -> bool:
        return not self.away


def _refreshes(connection: "redis.Redis") -> Iterator[_Refresh]:
    """Yield snapshots without end, also while Redis is unreachable; raise if it is unreachable at the start."""
    from redis.exceptions import ConnectionError as LostError
    from redis.exceptions import TimeoutError as SlowError

    from svdq.producer.status.snapshot import take

    refresh = _Refresh(snapshot=take(connection))
    while True:
        yield refresh
        try:
            refresh = _Refresh(snapshot=take(connection))
        except (LostError, SlowError):
            since = clock(refresh.snapshot.at)
            away = f"Redis has not answered since {since}; retrying."
            refresh = _Refresh(snapshot=refresh.snapshot, away=away, away_for=refresh.away_for + 1)


def _show(connection: "redis.Redis", interval_s: float) -> None:
    """Draw on the terminal until the user quits."""
    from rich.console import Console
    from rich.live import Live

    from svdq.cli.top.keys import Keys
    from svdq.cli.top.view import View

    # Treated like Ctrl-C, so that the terminal is restored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        for refresh in _refreshes(connection):
            live.update(View(refresh.snapshot, away=refresh.away, is_live=True), refresh=True)
            if keys.leave_within(interval_s):
                return


def _print(snapshot: "Snapshot", as_json: bool) -> None:
    """Print one snapshot, without trailing blanks."""
    if as_json:
        echo(json.dumps(snapshot.as_json()))
    else:
        import shutil

        from rich.console import Console

        from svdq.cli.top.view import View

        console = Console(width=shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns)
        with console.capture() as captured:
            console.print(View(snapshot))
        for line in captured.get().splitlines():
            echo(line.rstrip())
    sys.stdout.flush()


def _is_live_terminal() -> bool:
    """Return whether the terminal can redraw in place."""
    from rich.console import Console

    return sys.stdout.isatty() and not Console().is_dumb_terminal
