"""`svdq cancel`, `retry`, `requeue`, `move`, `pause` and `resume`: what a user can have done to jobs and queues."""

import click

from svdq.cli.main import redis_options

job_ids_argument = click.argument("job_ids", metavar="ID...", nargs=-1, required=True)


CANCEL_EXAMPLES = """\b
Examples:
  svdq cancel 1f0c… 2a7d…
  svdq list --status queued --json | jq -r .id | xargs svdq cancel
"""


@click.command(epilog=CANCEL_EXAMPLES)
@job_ids_argument
@redis_options
def cancel(job_ids: tuple[str, ...], redis_url: str | None) -> None:
    """Cancel jobs: queued ones at once, those in flight at their next step."""
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    with session(Settings.load(redis_url=redis_url)) as connection:
        for job_id in job_ids:
            done = control.cancel(connection, job_id)
            click.echo(f"{job_id}  {'cancelled' if done == 'canceled' else 'stops at its next step'}")


RETRY_EXAMPLES = """\b
Examples:
  svdq retry 1f0c…
  svdq retry --failed
"""


@click.command(epilog=RETRY_EXAMPLES)
@click.argument("job_ids", metavar="[ID]...", nargs=-1)
@click.option("--failed", is_flag=True, help="All failed jobs.")
@redis_options
def retry(job_ids: tuple[str, ...], failed: bool, redis_url: str | None) -> None:
    """Queue failed, stopped or cancelled jobs again, with the same id and seed, at the end of their queue."""
    from svdq.pipeline.errors import InputError
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    if bool(job_ids) == failed:
        raise InputError("Give the ids of jobs, or --failed for all failed ones.")
    with session(Settings.load(redis_url=redis_url)) as connection:
        for job_id in job_ids or control.failed_ids(connection):
            control.retry(connection, job_id)
            click.echo(f"{job_id}  queued")


REQUEUE_EXAMPLES = """\b
Examples:
  svdq requeue 1f0c…
"""


@click.command(epilog=REQUEUE_EXAMPLES)
@job_ids_argument
@click.option("--storage", help="Folder or URL for photos and videos (SVDQ_STORAGE).")
@redis_options
def requeue(job_ids: tuple[str, ...], storage: str | None, redis_url: str | None) -> None:
    """Render ended jobs again with the same id and seed, finished ones too.

    The files of before stay until new ones replace them.
    """
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.storage.storage import Storage

    settings = Settings.load(redis_url=redis_url, storage=storage)
    with session(settings) as connection:
        for job_id in job_ids:
            control.requeue(connection, Storage(settings.storage), job_id)
            click.echo(f"{job_id}  queued")


MOVE_EXAMPLES = """\b
Examples:
  svdq move 1f0c… --front
  svdq move 1f0c… 2a7d… --priority high
"""


@click.command(epilog=MOVE_EXAMPLES)
@job_ids_argument
@click.option("--front", is_flag=True, help="To the front of the queue, in the order given.")
@click.option("--priority", help="To the queue of this priority: high, default or low.")
@redis_options
def move(job_ids: tuple[str, ...], front: bool, priority: str | None, redis_url: str | None) -> None:
    """Move queued jobs to the front of their queue, or to another priority."""
    from svdq.pipeline.errors import InputError
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings

    if not front and priority is None:
        raise InputError("Say where to: --front, --priority high, default or low, or both.")
    with session(Settings.load(redis_url=redis_url)) as connection:
        # The last first, so that in the end the first stands in front.
        for job_id in reversed(job_ids) if front else job_ids:
            control.move(connection, job_id, front=front, priority=priority)
    for job_id in job_ids:
        click.echo(f"{job_id}  moved")


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
    click.echo("Paused; `svdq resume` goes on.")


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
            click.echo(sentence)
        control.resume(connection)
    click.echo("Jobs are taken again.")
