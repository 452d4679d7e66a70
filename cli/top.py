"""`svdq top`: show queues, ranks and videos in flight, live on a terminal, else once or as JSON."""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from svdq.cli.formatting import clock, echo, echo_json
from svdq.cli.main import connect, json_option, redis_options
from svdq.cli.option_types import Number

if TYPE_CHECKING:
    import redis

    from svdq.producer.status.snapshot import Snapshot

#: Seconds between two refreshes; ranks report about once a second.
INTERVAL_S = 1.0


@click.command()
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=Number(0.1, 3600),
    help=f"Seconds between two refreshes [default: {INTERVAL_S:g}]; repeats also without a terminal.",
)
@json_option("refresh")
@redis_options
def top(interval_s: float | None, as_json: bool, redis_url: str | None) -> None:
    """Watch the queues, every rank, and the videos in flight as they move through the ranks.

    On a terminal it runs until you press q or Ctrl-C. Without a terminal it prints the state once, as `svdq status`.

    \b
    Examples:
      svdq top                           live view
      svdq top --json --interval 5       one JSON object a line, every five seconds
    """
    with connect(redis_url=redis_url) as connection:
        if not as_json and _is_live_terminal():
            _show(connection, interval_s or INTERVAL_S)
        else:
            _print(connection, interval_s, as_json)


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
            outage = f"Redis has not answered since {clock(snapshot.at)}; retrying."


def _print(connection: "redis.Redis", interval_s: float | None, as_json: bool) -> None:
    """Print the state once, or repeatedly if an interval is given; report an outage of Redis once."""
    was_out = False
    for snapshot, outage in _snapshots(connection):
        if outage and not was_out:
            echo(outage, err=True)
        elif not outage and as_json:
            echo_json(snapshot.as_json())
        elif not outage:
            from svdq.cli.view import lines_of

            echo(*lines_of(snapshot))
        was_out = bool(outage)
        sys.stdout.flush()
        if interval_s is None:
            return
        time.sleep(interval_s)


def _show(connection: "redis.Redis", interval_s: float) -> None:
    """Draw on the terminal until the user quits."""
    from rich.console import Console
    from rich.live import Live

    from svdq.cli.view import View

    # Treated like Ctrl-C, so that the terminal is restored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Suspending would leave the shell on our screen.
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    with _keys() as is_quit_within, Live(console=Console(), screen=True, auto_refresh=False) as live:
        for snapshot, outage in _snapshots(connection):
            live.update(View(snapshot, outage=outage, is_live=True), refresh=True)
            if is_quit_within(interval_s):
                return


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


def _is_live_terminal() -> bool:
    """Return whether the terminal can redraw in place."""
    from rich.console import Console

    return sys.stdout.isatty() and not Console().is_dumb_terminal
