"""`svdq redis`: manage the embedded Redis server."""

import click

from svdq.cli.formatting import echo


@click.group()
def redis() -> None:
    """Start or stop the embedded Redis server, or show its URL.

    Commands that need the server start it. It keeps running when they end, and keeps its data when it stops.
    """


START_EXAMPLES = """\b
Examples:
  svdq redis start
"""


@redis.command(epilog=START_EXAMPLES)
def start() -> None:
    """Start the server of this home if it is not running, and print its URL."""
    from svdq.producer.embedded_redis.server import ensure_server
    from svdq.producer.settings import Settings

    echo(ensure_server(Settings.load().home))


STOP_EXAMPLES = """\b
Examples:
  svdq redis stop
"""


@redis.command(epilog=STOP_EXAMPLES)
def stop() -> None:
    """Stop the server of this home; it keeps queued jobs."""
    from svdq.producer.embedded_redis.server import stop_server
    from svdq.producer.settings import Settings

    echo("Stopped; queued jobs are kept." if stop_server(Settings.load().home) else "The server was not running.")


URL_EXAMPLES = """\b
Examples:
  svdq redis url
  redis-cli -u $(svdq redis url) info memory
  rq info --queue-class svdq.producer.queue.SvdqQueue -u $(svdq redis url)
"""


@redis.command(epilog=URL_EXAMPLES)
def url() -> int:
    """Print the URL of the server of this home; the exit code is 1 if it is not running."""
    from svdq.producer.embedded_redis.server import running_url
    from svdq.producer.settings import Settings

    found = running_url(Settings.load().home)
    echo(found or "The server is not running; start it with `svdq redis start`.", err=not found)
    return 0 if found else 1
