"""`svdq cancel`, `retry`, `requeue`, `move`, `pause` and `resume`: what a user can have done to jobs and queues."""

from collections.abc import Callable, Iterable

import click

from svdq.cli.main import EXIT_FAILED, redis_options, storage_option
from svdq.cli.parameters import PRIORITIES
from svdq.cli.words import echo
from svdq.pipeline.errors import InputError


def _each_once(_context: click.Context, _argument: click.Parameter, job_ids: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(job_ids))


job_ids_argument = click.argument("job_ids", metavar="ID...", nargs=-1, required=True, callback=_each_once)


def _do(act: Callable[[str], str], job_ids: Iterable[str]) -> int:
    """Do something to jobs that were checked, say what, and return the exit code.

    One that somebody else has changed since then is told of, and the others are done all the same.
    """
    exit_code = 0
    for job_id in job_ids:
        try:
            echo(f"{job_id}  {act(job_id)}")
        except InputError as error:
            echo(f"Error: {error}", err=True)
            exit_code = EXIT_FAILED
    return exit_code


CANCEL_EXAMPLES = """\b
Examples:
  svdq cancel 1f0c… 2a7d…
  svdq list --status queued --json | jq -r .id | xargs svdq cancel
"""


@click.command(epilog=CANCEL_EXAMPLES)
@job_ids_argument
@redis_options
def cancel(job_ids: tuple[str, ...], redis_url: str | None) -> int:
    """Cancel jobs: queued ones at once, those in flight at their next step.

    All ids are looked up first: when one cannot be cancelled, none is.
    """
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    with session(Settings.load(redis_url=redis_url)) as connection:

        def act(job_id: str) -> str:
            return "cancelled" if control.cancel(connection, job_id) == "canceled" else "stops at its next step"

        control.check(connection, "cancel", job_ids)
        return _do(act, job_ids)


RETRY_EXAMPLES = """\b
Examples:
  svdq retry 1f0c…
  svdq retry --failed
"""


@click.command(epilog=RETRY_EXAMPLES)
@click.argument("job_ids", metavar="[ID]...", nargs=-1, callback=_each_once)
@click.option("--failed", is_flag=True, help="All failed jobs.")
@redis_options
def retry(job_ids: tuple[str, ...], failed: bool, redis_url: str | None) -> int:
    """Queue failed, stopped or cancelled jobs again, with the same id and seed, at the end of their queue.

    All ids are looked up first: when one cannot be queued, none is.
    """
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    if bool(job_ids) == failed:
        raise InputError("Give the ids of jobs, or --failed for all failed ones.")
    with session(Settings.load(redis_url=redis_url)) as connection:

        def act(job_id: str) -> str:
            control.retry(connection, job_id)
            return "queued"

        control.check(connection, "retry", job_ids)
        return _do(act, job_ids or control.failed_ids(connection))


REQUEUE_EXAMPLES = """\b
Examples:
  svdq requeue 1f0c…
"""


@click.command(epilog=REQUEUE_EXAMPLES)
@job_ids_argument
@storage_option
@redis_options
def requeue(job_ids: tuple[str, ...], storage: str | None, redis_url: str | None) -> int:
    """Render ended jobs again with the same id and seed, finished ones too.

    The files of before stay until new ones replace them. All ids are looked up first: when one cannot be queued, none
    is.
    """
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.storage.storage import Storage

    settings = Settings.load(redis_url=redis_url, storage=storage)
    place = Storage(settings.storage)
    with session(settings) as connection:

        def act(job_id: str) -> str:
            control.requeue(connection, place, job_id)
            return "queued"

        control.check(connection, "requeue", job_ids)
        return _do(act, job_ids)


MOVE_EXAMPLES = """\b
Examples:
  svdq move 1f0c… --front
  svdq move 1f0c… 2a7d… --priority high
"""


@click.command(epilog=MOVE_EXAMPLES)
@job_ids_argument
@click.option("--front", is_flag=True, help="To the front of the queue, in the order given.")
@click.option("--priority", type=click.Choice(PRIORITIES), help="To the queue of this priority.")
@redis_options
def move(job_ids: tuple[str, ...], front: bool, priority: str | None, redis_url: str | None) -> int:
    """Move queued jobs to the front of their queue, or to another priority.

    All ids are looked up first: when one cannot be moved, none is.
    """
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    if not front and priority is None:
        raise InputError("Say where to: --front, --priority high, default or low, or both.")
    with session(Settings.load(redis_url=redis_url)) as connection:

        def act(job_id: str) -> str:
            control.move(connection, job_id, front=front, priority=priority)
            return "moved"

        control.check(connection, "move", job_ids)
        # The last first, so that in the end the first stands in front.
        return _do(act, reversed(job_ids) if front else job_ids)


PAUSE_EXAMPLES = """\b
Examples:
  svdq pause && svdq resume
"""


@click.command(epilog=PAUSE_EXAMPLES)
@redis_options
def pause(redis_url: str | None) -> None:
    """Take no more jobs off the queues; those in flight are finished."""
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    with session(Settings.load(redis_url=redis_url)) as connection:
        control.pause(connection)
    echo("Paused; `svdq resume` goes on.")


RESUME_EXAMPLES = """\b
Examples:
  svdq resume
"""


@click.command(epilog=RESUME_EXAMPLES)
@redis_options
def resume(redis_url: str | None) -> None:
    """Take jobs again, also in groups that have paused because too much failed."""
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    with session(Settings.load(redis_url=redis_url)) as connection:
        for sentence in control.pauses(connection):
            echo(sentence)
        control.resume(connection)
    echo("Jobs are taken again.")
