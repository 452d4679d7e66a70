"""`svdq cancel`, `retry`, `move`, `mark`, `pause` and `resume`: change jobs and queues."""

import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import click
import redis

from svdq.cli.formatting import echo, echo_json
from svdq.cli.main import EXIT_FAILED
from svdq.cli.option_types import ids_of_jobs, json_option, mine, selection_options, with_connection, with_settings
from svdq.pipeline.errors import InputError
from svdq.producer import job_control, keys, pauses
from svdq.producer.connection import session
from svdq.producer.job_control import Action
from svdq.producer.queue import statuses
from svdq.producer.settings import Settings
from svdq.producer.status.selection import Selection, complete_ids, select
from svdq.producer.text import count
from svdq.producer.verdicts import record_verdict


def _selected(connection: redis.Redis, action: Action, selection: Selection) -> list[str]:
    """Find the selected jobs; jobs selected by ID are all checked before the first one changes."""
    selection = selection.among(job_control.STATUSES_FOR[action])
    if selection.job_ids:
        ids = complete_ids(connection, selection.job_ids)
        for job_id, status in zip(ids, statuses(connection, ids), strict=True):
            if action == "cancel" and status == "finished":
                raise InputError(f"Job {job_id!r} is finished; `svdq remove {job_id}` removes it with its video.")
        job_control.check(connection, action, ids)
        return ids
    ids = [view.id for view in select(connection, selection)]
    if not ids:
        others = select(connection, replace(selection, owners=())) if selection.owners else []
        hint = f" {count(len(others), 'such job')} of other owners." if others else ""
        echo(f"No jobs match.{hint}", err=True)
    return ids


Outcomes = Iterable[tuple[str, str | InputError]]  # ids of jobs, each with what came of it


def _those_selected(connection: redis.Redis, action: Action, selection: Selection, outcomes: Outcomes) -> Outcomes:
    """Leave out jobs that were selected by their status and have changed since then: a group may have ended them."""
    for job_id, outcome in outcomes:
        if isinstance(outcome, InputError) and not selection.job_ids:
            (status,) = statuses(connection, [job_id])
            if status not in job_control.STATUSES_FOR[action]:
                continue
        yield job_id, outcome


def _print(outcomes: Outcomes, as_json: bool) -> int:
    exit_code = 0
    for job_id, outcome in outcomes:
        if isinstance(outcome, InputError):
            echo(f"Error: {outcome}", err=True)
            exit_code = EXIT_FAILED
        if as_json:
            key = "error" if isinstance(outcome, InputError) else "outcome"
            echo_json({"id": job_id, key: str(outcome)})
        elif not isinstance(outcome, InputError):
            echo(f"{job_id}  {outcome}")
    return exit_code


@click.command()
@selection_options("all", "queued")
@click.option("--everybody", is_flag=True, help="With --queued: also the jobs of other owners.")
@json_option("job")
@with_connection
def cancel(connection: redis.Redis, selection: Selection, everybody: bool, as_json: bool) -> int:
    """Cancel jobs: waiting jobs become canceled at once, jobs in flight stop at their next step.

    IDs may be shortened to their first characters. If one of them cannot be canceled, none is. --queued cancels only
    your own jobs, unless --everybody or --owner says otherwise.

    \b
    Examples:
      svdq cancel 1f0c 2a7d
      svdq cancel --queued
      svdq cancel --queued --everybody
      svdq cancel --name 'cup*' --since 22:00
      svdq cancel --status scheduled
    """
    if tuple(selection.statuses) == ("queued",) and not (everybody or selection.owners or selection.take_all):
        selection = replace(selection, owners=mine())
    ids = _selected(connection, "cancel", selection)
    outcomes: Outcomes
    if selection.statuses and not selection.job_ids and set(selection.statuses) <= set(job_control.WAITING):
        # What has started meanwhile goes on.
        outcomes = [(job_id, "canceled") for job_id in job_control.cancel_waiting(connection, ids)]
    else:
        outcomes = _those_selected(connection, "cancel", selection, job_control.cancel_many(connection, ids))
    stops = "stopping" if as_json else "stops at its next step"
    return _print(((job_id, stops if outcome == "stopping" else outcome) for job_id, outcome in outcomes), as_json)


@click.command()
@selection_options("all", "failed", since="Jobs that ended")
@click.option("--force", is_flag=True, help="Also finished jobs; their files stay until new ones replace them.")
@json_option("job")
@with_settings
def retry(settings: Settings, selection: Selection, force: bool, as_json: bool) -> int:
    """Queue failed, stopped or canceled jobs again, with the same id and seed, at the end of their queue.

    IDs may be shortened to their first characters. If one of them cannot be queued, none is.

    \b
    Examples:
      svdq retry --failed --since 12h
      svdq retry --status canceled --name 'cup*'
      svdq retry 1f0c --force
    """
    from svdq.producer.storage.storage import Storage

    place = Storage.open_for_command(settings.storage) if force else None
    action: Action = "retry --force" if force else "retry"
    with session(settings) as connection:
        ids = _selected(connection, action, selection)
        outcomes = job_control.retry_many(connection, ids, storage=place)
        return _print(_those_selected(connection, action, selection, outcomes), as_json)


@click.command()
@selection_options("all")
@click.option("--front", is_flag=True, help="To the front of the queue, in the order given, else oldest first.")
@click.option("--priority", type=click.Choice(keys.PRIORITIES), help="To the queue of this priority.")
@json_option("job")
@with_connection
def move(connection: redis.Redis, selection: Selection, front: bool, priority: str | None, as_json: bool) -> int:
    """Move queued jobs to the front of their queue, or to another priority.

    IDs may be shortened to their first characters. If one of them cannot be moved, none is.

    \b
    Examples:
      svdq move 1f0c --front
      svdq move 1f0c 2a7d --priority high
      svdq move --name 'cup*' --priority low
    """
    if not front and priority is None:
        raise InputError("Give a destination: --front, --priority high, default or low, or both.")

    def moved(job_ids: Iterable[str]) -> Iterator[tuple[str, str | InputError]]:
        for job_id in job_ids:
            try:
                job_control.move(connection, job_id, front=front, priority=priority)
                yield job_id, "moved"
            except InputError as error:  # another process has changed it meanwhile
                yield job_id, error

    ids = _selected(connection, "move", selection)
    # In reverse, so that the first job ends up in front.
    outcomes = moved(reversed(ids) if front else ids)
    return _print(_those_selected(connection, "move", selection, outcomes), as_json)


@click.command()
@click.argument("verdict", type=click.Choice(["keep", "reject", "none"]))
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True, shell_complete=ids_of_jobs)
@json_option("job")
@with_settings
def mark(settings: Settings, verdict: str, job_ids: Sequence[str], as_json: bool) -> int:
    """Mark videos to keep or to reject; `none` removes the mark. Videos marked to keep are never pruned or replaced.

    The web page shows and sets the same marks. IDs may be shortened to their first characters, even if Redis has
    forgotten them.

    \b
    Examples:
      svdq mark keep 1f0c 2a7d
      svdq mark none 1f0c
    """
    from svdq.producer.results.fetch import ids_of
    from svdq.producer.storage.storage import Storage

    with session(settings) as connection:
        ids = ids_of(connection, Storage.open_for_command(settings.storage), job_ids)
        record_verdict(connection, ids, None if verdict == "none" else verdict)  # type: ignore[arg-type]
        return _print(((job_id, verdict) for job_id in ids), as_json)


@click.command()
@click.option("--free", is_flag=True, help="Also free the GPUs: videos stop after their step, and go on later.")
@click.option("--here", is_flag=True, help="With --free: on this host only.")
@json_option()
@with_connection
def pause(connection: redis.Redis, free: bool, here: bool, as_json: bool) -> None:
    """Stop taking jobs from the queues; jobs in flight are finished.

    With --free, jobs in flight are not finished: they stop after their present step, or after 10 s, and return to
    the front of the queue with their checkpoints. Ranks end, so that other programs have all of the GPUs within 15
    s. This lasts until `svdq resume`, also after a reboot.

    \b
    Examples:
      svdq pause
      svdq pause --free          the GPUs of all hosts
      svdq pause --free --here   those of this host; the others go on
    """
    if here and not free:
        raise InputError("--here needs --free: `svdq pause --free --here`.")
    if not free:
        pauses.pause(connection)
        echo_json({"paused": True}) if as_json else echo("Paused until `svdq resume`.")
        return
    host = socket.gethostname() if here else None
    pauses.free(connection, host)
    where = f"on {host}" if host else "on all hosts"
    if as_json:
        echo_json({"paused": True, "freed": host or keys.ALL_HOSTS})
    else:
        echo(f"Paused {where} until `svdq resume`; the GPUs are free within 15 s.")


@click.command()
@click.option("--here", is_flag=True, help="Only end `svdq pause --free --here` of this host.")
@json_option()
@with_connection
def resume(connection: redis.Redis, here: bool, as_json: bool) -> None:
    """Resume taking jobs, also in groups that paused because too many jobs failed, or that freed their GPUs.

    \b
    Examples:
      svdq resume
      svdq resume --json | jq -r '.reasons[]'
    """
    host = socket.gethostname() if here else None
    before = pauses.read_pauses(connection)
    pauses.resume(connection, host)
    after = pauses.read_pauses(connection) if here else []
    ended = [each.text for each in before if each not in after]
    if as_json:
        echo_json({"paused": any(each.host in (None, host) for each in after), "reasons": ended})
    elif here and pauses.stop_all(after):
        echo(*ended, *after)
    else:
        echo(*ended, "Resumed; groups take jobs again.")
