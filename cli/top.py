"""`svdq top`: draws a snapshot of queues, ranks and videos in flight again and again, in colors."""

import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from select import select as wait_readable

import click
import redis
from rich.console import Console, ConsoleOptions, RenderableType, group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from svdq.cli import view
from svdq.cli.formatting import MAX_NAME, outage_of
from svdq.cli.jobs import print_snapshot
from svdq.cli.option_types import json_option, with_connection
from svdq.producer.status.snapshot import Snapshot, take

INTERVAL_S = 1.0  # seconds between two refreshes; ranks report about once a second


@click.command()
@json_option()
@with_connection
def top(connection: redis.Redis, as_json: bool) -> None:
    """Watch the queues, every rank, and the videos in flight as they move through the ranks.

    It runs until you press q or Ctrl-C. With --json or without a terminal it prints the state once, as `svdq status`.

    \b
    Examples:
      svdq top
    """
    console = Console()
    if as_json or not sys.stdout.isatty() or console.is_dumb_terminal:
        print_snapshot(connection, as_json)
        return
    # Like Ctrl-C, so that the terminal is restored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Suspending would leave the shell on our screen.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    with _keys() as is_quit_within, Live(console=console, screen=True, auto_refresh=False) as live:
        for snapshot, outage in _snapshots(connection):
            live.update(draw(snapshot, console.options, outage=outage), refresh=True)
            if is_quit_within(INTERVAL_S):
                return


@group()
def draw(snapshot: Snapshot, options: ConsoleOptions, *, outage: str = "") -> Iterator[RenderableType]:
    """Draw a snapshot in colors; `outage` says in a sentence why there is nothing newer."""
    parts = view.compose(snapshot, options.max_width, is_ascii=options.ascii_only, outage=outage, is_live=True)
    for part in parts:
        if not isinstance(part, view.Table):
            yield Text.assemble(*part)
            continue
        drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for i, header in enumerate(part.headers):
            is_flexible = i == part.flexible
            drawn.add_column(
                Text.assemble(*header),
                justify="right" if i in part.right else "left",
                no_wrap=not is_flexible,
                overflow="ellipsis",
                max_width=MAX_NAME if is_flexible else None,
            )
        for row in part.rows:
            # As Text, so that brackets in a name are not read as markup.
            drawn.add_row(*(Text.assemble(*cell, no_wrap=True, overflow="ellipsis") for cell in row))
        yield drawn


def _snapshots(connection: redis.Redis) -> Iterator[tuple[Snapshot, str]]:
    """Yield snapshots without end; while Redis does not answer, the last one and a sentence that says so."""
    snapshot, outage = take(connection), ""
    while True:
        yield snapshot, outage
        try:
            snapshot, outage = take(connection), ""
        except (redis.ConnectionError, redis.TimeoutError):
            outage = outage_of(snapshot.at)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read keys without echo; yield a function that waits some seconds for a key and returns whether it is q."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield lambda seconds: bool(wait_readable([], [], [], seconds)[0])  # sleeps
        return
    fd = sys.stdin.fileno()

    def is_quit_within(seconds: float) -> bool:
        if not wait_readable([fd], [], [], seconds)[0]:
            return False
        pressed = os.read(fd, 1024)
        return not pressed or b"q" in pressed  # nothing: the terminal is gone

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield is_quit_within
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
