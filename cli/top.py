"""`svdq top`: show queues, ranks and videos in flight, live on a terminal."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import outage_of
from svdq.cli.jobs import print_snapshot
from svdq.cli.main import connect, json_option, redis_options

if TYPE_CHECKING:
    import redis
    from rich.console import Console

    from svdq.producer.status.snapshot import Snapshot

#: Seconds between two refreshes; ranks report about once a second.
INTERVAL_S = 1.0


@click.command()
@json_option()
@redis_options
def top(as_json: bool, redis_url: str | None) -> None:
    """Watch the queues, every rank, and the videos in flight as they move through the ranks.

    It runs until you press q or Ctrl-C. With --json or without a terminal it prints the state once, as `svdq status`.

    \b
    Examples:
      svdq top
    """
    from rich.console import Console

    console = Console()
    with connect(redis_url=redis_url) as connection:
        if as_json or not sys.stdout.isatty() or console.is_dumb_terminal:
            print_snapshot(connection, as_json)
        else:
            _show(connection, console)


def _show(connection: "redis.Redis", console: "Console") -> None:
    """Draw on the terminal until the user quits."""
    from rich.live import Live

    from svdq.cli.view import draw

    # Treated like Ctrl-C, so that the terminal is restored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Suspending would leave the shell on our screen.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    with _keys() as is_quit_within, Live(console=console, screen=True, auto_refresh=False) as live:
        for snapshot, outage in _snapshots(connection):
            live.update(draw(snapshot, console.options, outage=outage, is_live=True), refresh=True)
            if is_quit_within(INTERVAL_S):
                return


def _snapshots(connection: "redis.Redis") -> "Iterator[tuple[Snapshot, str]]":
    """Yield snapshots without end; while Redis does not answer, the last one and a sentence that says so.

    Raises:
        UnavailableError: Redis does not answer the first time.
    """
    from redis.exceptions import ConnectionError as LostError
    from redis.exceptions import TimeoutError as SlowError

    from svdq.producer.status.snapshot import take

    snapshot, outage = take(connection), ""
    while True:
        yield snapshot, outage
        try:
            snapshot, outage = take(connection), ""
        except (LostError, SlowError):
            outage = outage_of(snapshot.at)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Read single keys from the terminal, without echo.

    Yields:
        A function that waits some seconds for a key and returns whether the key is q; any other key ends the wait.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])  # sleeps
        return
    import termios
    import tty

    fd = sys.stdin.fileno()

    def is_quit_within(seconds: float) -> bool:
        if not select.select([fd], [], [], seconds)[0]:
            return False
        pressed = os.read(fd, 1024)
        # Several keys may have arrived at once; a sequence that begins with an escape is one key, such as an arrow.
        # No key at all means that the terminal is gone.
        return not pressed or (not pressed.startswith(b"\x1b") and b"q" in pressed.lower())

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield is_quit_within
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
