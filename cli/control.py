"""`svdq cancel`, `retry`, `move`, `pause` and `resume`: change jobs and queues."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from svdq.cli.formatting import echo
from svdq.cli.main import EXIT_FAILED, Command, connect, redis_options, storage_option
from svdq.cli.option_types import name_option, since_option
from svdq.pipeline.errors import InputError
from svdq.producer.keys import PRIORITIES

if TYPE_CHECKING:
    from datetime import datetime

    import redis

    from svdq.producer.control import Action


def selection_options(*flags: str, since: str = "Jobs submitted") -> Callable[[Command], Command]:
    """Add the options that select jobs: IDs, the given flags of `all`, `queued` and `failed`, name and age."""
    help_texts = {"all": "All jobs that allow it.", "queued": "All queued jobs.", "failed": "All failed jobs."}

    def add(command: Command) -> Command:
        command = since_option(since)(command)
        command = name_option("Jobs")(command)
        for flag in reversed(flags):
            command = click.option(f"--{flag}", f"take_{flag}", is_flag=True, help=help_texts[flag])(command)
        return click.argument("job_ids", metavar="[ID]...", nargs=-1)(command)

    return add


def _selected(
    connection: "redis.Redis",
    action: "Action",
    job_ids: tuple[str, ...],
    *,
    name: str | None,
    since: "datetime | None",
    **flags: bool,
) -> list[str]:
    """Find the selected jobs; jobs selected by ID are all checked before the first one changes."""
    from svdq.producer import control
    from svdq.producer.selection import Selection, select

    chosen = [flag.removeprefix("take_") for flag, is_set in flags.items() if is_set]
    if bool(job_ids) == bool(chosen or name or since):
        raise InputError("Give either IDs of jobs or options that select jobs, such as --all; see --help.")
    statuses = tuple(flag for flag in chosen if flag != "all")
    selection = Selection(
        job_ids=job_ids, statuses=statuses or control.STATUSES_FOR[action], name=name or "", since=since
    )
    ids = select(connection, selection)
    if job_ids:
        control.check(connection, action, ids)
    elif not ids:
        echo("No jobs match.", err=True)
    return ids


def _do(act: Callable[[str], str], job_ids: Iterable[str]) -> int:
    """Apply an action to jobs, print the outcome of each, and return the exit code.

    A job that another process has changed meanwhile is reported; the others are still processed.
    """
    exit_code = 0
    for job_id in job_ids:
        try:
            echo(f"{job_id}  {act(job_id)}")
        except InputError as error:
            echo(f"Error: {error}", err=True)
            exit_code = EXIT_FAILED
    return exit_code


@click.command()
@selection_options("all", "queued")
@redis_options
def cancel(job_ids: tuple[str, ...], redis_url: str | None, **selection: Any) -> int:
    """Cancel jobs: waiting jobs become canceled at once, jobs in flight stop at their next step.

    IDs may be shortened to their first characters. If one of them cannot be canceled, none is.

    \b
    Examples:
      svdq cancel 1f0c 2a7d
      svdq cancel --queued
      svdq cancel --all --name 'cup*' --since 22:00
    """
    from svdq.producer import control

    with connect(redis_url=redis_url) as connection:

        def act(job_id: str) -> str:
            return "canceled" if control.cancel(connection, job_id) == "canceled" else "stops at its next step"

        return _do(act, _selected(connection, "cancel", job_ids, **selection))


@click.command()
@selection_options("all", "failed", since="Jobs that ended")
@click.option("--force", is_flag=True, help="Also finished jobs; their files stay until new ones replace them.")
@storage_option
@redis_options
def retry(job_ids: tuple[str, ...], force: bool, storage: str | None, redis_url: str | None, **selection: Any) -> int:
    """Queue failed, stopped or canceled jobs again, with the same id and seed, at the end of their queue.

    IDs may be shortened to their first characters. If one of them cannot be queued, none is.

    \b
    Examples:
      svdq retry 1f0c
      svdq retry --failed
      svdq retry --failed --since 12h
      svdq retry 1f0c --force
    """
    from svdq.producer import control
    from svdq.producer.queue import session
    from svdq.producer.settings import Settings
    from svdq.producer.storage.storage import Storage

    settings = Settings.load(redis_url=redis_url, storage=storage)
    place = Storage(settings.storage) if force else None
    with session(settings) as connection:

        def act(job_id: str) -> str:
            control.retry(connection, job_id, storage=place)
            return "queued"

        return _do(act, _selected(connection, "retry --force" if force else "retry", job_ids, **selection))


@click.command()
@selection_options("all")
@click.option("--front", is_flag=True, help="To the front of the queue, in the order given, else oldest first.")
@click.option("--priority", type=click.Choice(PRIORITIES), help="To the queue of this priority.")
@redis_options
def move(job_ids: tuple[str, ...], front: bool, priority: str | None, redis_url: str | None, **selection: Any) -> int:
    """Move queued jobs to the front of their queue, or to another priority.

    IDs may be shortened to their first characters. If one of them cannot be moved, none is.

    \b
    Examples:
      svdq move 1f0c --front
      svdq move 1f0c 2a7d --priority high
      svdq move --name 'cup*' --priority low
    """
    from svdq.producer import control

    if not front and priority is None:
        raise InputError("Give a destination: --front, --priority high, default or low, or both.")
    with connect(redis_url=redis_url) as connection:

        def act(job_id: str) -> str:
            control.move(connection, job_id, front=front, priority=priority)
            return "moved"

        ids = _selected(connection, "move", job_ids, **selection)
        # In reverse, so that the first job ends up in front.
        return _do(act, reversed(ids) if front else ids)


@click.command()
@redis_options
def pause(redis_url: str | None) -> None:
    """Stop taking jobs from the queues; jobs in flight are finished."""
    from svdq.producer import control

    with connect(redis_url=redis_url) as connection:
        control.pause(connection)
    echo("Paused until `svdq resume`.")


@click.command()
@redis_options
def resume(redis_url: str | None) -> None:
    """Resume taking jobs, also in groups that paused because too many jobs failed."""
    from svdq.producer import control

    with connect(redis_url=redis_url) as connection:
        for sentence in control.pauses(connection):
            echo(sentence)
        control.resume(connection)
    echo("Resumed; groups take jobs again.")
