"""Options of several commands, and types that click lacks: past times, steps of experts, paths.

Settings, Redis and jobs are imported only when a command runs, because each command imports this module.
"""

import contextlib
import functools
import math
import os
import unicodedata
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from svdq.cli.formatting import QUIET
from svdq.pipeline.errors import UnavailableError
from svdq.producer.keys import STATUSES

Command = TypeVar("Command", bound=Callable[..., Any])

MANY = 20  # smallest number of things of which commands print totals in place of a line each
#: Names of options that most people never need, for the help of commands with many.
ADVANCED = {
    *("attention", "checkpoints", "compile", "decode_chunk_size", "depends_on", "dtype", "experts"),
    *("log_format", "memory_limit", "metrics_address", "metrics_port", "redis_url", "storage", "trace"),
    *("wait_for_gpu", "warmup", "weights"),
}

redis_option = click.option(
    "--redis-url",
    metavar="URL",
    is_eager=True,  # times are of its clock
    help="Redis server [default: embedded, or SVDQ_REDIS_URL].",
)


def with_options(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    """Add options to a command, in the order of its help."""
    for option in reversed(options):
        command = option(command)
    return command


def storage_options(command: Command) -> Command:
    """Add `--storage` and `--redis-url`."""
    help_text = "Folder or URL [default: under the home, or SVDQ_STORAGE]."
    return click.option("--storage", metavar="URL", help=help_text)(redis_option(command))


def with_settings(command: Command) -> Command:
    """Add `--storage` and `--redis-url`, and hand over the settings with them as `settings`."""

    @functools.wraps(command)
    def loaded(*args: Any, storage: str | None, redis_url: str | None, **others: Any) -> Any:
        from svdq.producer.settings_loader import load_settings

        return command(*args, settings=load_settings(storage=storage, redis_url=redis_url), **others)

    return storage_options(cast(Command, loaded))


def with_connection(command: Command) -> Command:
    """Add `--redis-url`, and hand over a connection to that server as `connection`."""

    @functools.wraps(command)
    def connected(*args: Any, redis_url: str | None, **others: Any) -> Any:
        from svdq.producer.connection import session
        from svdq.producer.settings_loader import load_settings

        with session(load_settings(redis_url=redis_url)) as connection:
            return command(*args, connection=connection, **others)

    return redis_option(cast(Command, connected))


def json_option(thing: str = "") -> Callable[[Command], Command]:
    """Return the decorator that adds `--json`: one JSON object, or one for each thing."""
    each = f" for each {thing}, one a line" if thing else ""
    return click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object{each}.")


def amount_options(things: str) -> Callable[[Command], Command]:
    """Return the decorator that adds `--verbose`, a line for each thing, also of many, and `--quiet`."""
    verbose = click.option("--verbose", "-v", is_flag=True, help=f"Print a line for each of many {things}, too.")
    quiet_help = "Print only warnings and errors, and what --json asks for."
    quiet = click.option("--quiet", "-q", is_flag=True, expose_value=False, callback=_silence, help=quiet_help)
    return lambda command: verbose(quiet(command))


def _silence(context: click.Context, _parameter: click.Parameter, is_quiet: bool) -> None:
    context.meta[QUIET] = is_quiet


class SectionedCommand(click.Command):
    """A command whose help lists its options in sections, the advanced ones last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            # click also has records of arguments, which the usage line shows.
            if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
                sections.setdefault(self.section_of(parameter), []).append(record)
        for title in sorted(sections, key="Advanced".__eq__):
            with formatter.section(title):
                formatter.write_dl(sections[title])

    def section_of(self, option: click.Option) -> str:
        """Return the title of the section of an option."""
        return "Advanced" if option.name in ADVANCED else "Options"


class NumberRange(click.FloatRange):
    """A number in a range; `click.FloatRange` accepts nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number; give one such as 50.", param, ctx)
        return number


MILLISECONDS = NumberRange(0, 1e9)  # at most eleven days
STEP_MS = NumberRange(0, 1e9, min_open=True)


def past_time(context: click.Context, option: click.Parameter, value: str | None) -> datetime | None:
    """Parse a time that has passed, such as 22:00, 2027-01-31, or 12h ago, by the clock of Redis in a callback."""
    from svdq.producer.connection import time_by_redis
    from svdq.producer.settings_loader import load_settings
    from svdq.producer.text import parse_past

    if value is None or context.resilient_parsing:
        return None
    settings, now = load_settings(redis_url=context.params.get("redis_url")), datetime.now().astimezone()
    if settings.redis_url:  # the embedded server has the clock of this machine
        with contextlib.suppress(UnavailableError):  # which not all commands need, and others say
            now = time_by_redis(settings)
    return parse_past(value, option.opts[0], now)


def since_option(what: str, default: str | None = None) -> Callable[[Command], Command]:
    """Return the decorator that adds `--since`."""
    help_text = f"{what} since then: 22:00, 2027-01-31, 12h."
    return click.option(
        "--since", metavar="TIME", callback=past_time, default=default, show_default=bool(default), help=help_text
    )


def _composed(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    # File names of macOS have accents and letters apart, names of jobs do not.
    return None if value is None else unicodedata.normalize("NFC", value)


#: Short forms of `--status`.
_FLAGS = {"all": "All jobs that allow it.", "queued": "All queued jobs.", "failed": "All failed jobs."}


def ids_of_jobs(context: click.Context, _argument: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the id of a job in a shell: the newest ones, each with its name and status."""
    from svdq.pipeline.errors import SvdqError
    from svdq.producer.connection import session
    from svdq.producer.settings_loader import load_settings
    from svdq.producer.status.selection import list_jobs

    try:
        with session(load_settings(redis_url=context.params.get("redis_url"))) as connection:
            views = list_jobs(connection, 1000)
    except SvdqError:
        return []  # a shell has no place for a sentence
    fitting = [view for view in views if view.id.startswith(incomplete)]
    return [CompletionItem(view.id, help=f"{view.name}, {view.status}") for view in fitting]


def mine() -> tuple[str, ...]:
    """Return the owners whose jobs are this user's; jobs without an owner are everybody's."""
    from svdq.producer.settings_loader import load_settings

    return (load_settings().owner, "")


def selection_options(*flags: str, since: str = "Jobs submitted") -> Callable[[Command], Command]:
    """Return the decorator that adds IDs, `flags` (of `_FLAGS`), status, name and age, and hands over a `selection`."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def with_selection(
            *args: Any,
            statuses: tuple[str, ...],
            name: str | None,
            owner: str | None,
            are_mine: bool,
            take_all: bool = False,
            **others: Any,
        ) -> Any:
            from svdq.producer.status.selection import Selection

            taken = tuple(flag for flag in flags if flag != "all" and others.pop(f"take_{flag}"))
            selection = Selection(
                job_ids=others.pop("job_ids"),
                statuses=statuses + taken,
                name=name or "",
                owners=mine() if are_mine else (owner,) if owner else (),
                since=others.pop("since"),
                take_all=take_all,
            )
            return command(*args, selection=selection, **others)

        options = [click.argument("job_ids", metavar="[ID]...", nargs=-1, shell_complete=ids_of_jobs)]
        options += [click.option(f"--{flag}", f"take_{flag}", is_flag=True, help=_FLAGS[flag]) for flag in flags]
        options += [
            click.option(
                "--status", "statuses", multiple=True, type=click.Choice(STATUSES), help="Only this status; repeatable."
            ),
            click.option("--name", metavar="PATTERN", callback=_composed, help="Jobs with this name, such as 'cup*'."),
            click.option("--mine", "are_mine", is_flag=True, help="My jobs, and those without an owner."),
            click.option("--owner", metavar="NAME", help="Jobs of this owner."),
            since_option(since),
        ]
        return with_options(cast(Command, with_selection), options)

    return add


def parse_experts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse the steps of two experts, such as 15+25, in a callback."""
    from svdq.pipeline.planning.binding import parse_segments

    try:
        return None if value is None else parse_segments(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not understood: {error}") from error


def _expanded(
    kind: click.Path, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
) -> str:
    from svdq.pipeline.errors import InputError
    from svdq.producer.settings import given_path

    try:
        return os.fspath(given_path(os.fspath(value))) if str(value).startswith("~") else os.fspath(value)
    except InputError as error:
        kind.fail(str(error), param, ctx)


class GivenPath(click.Path):
    """A path as `settings.given_path` reads it, and not empty, as of a variable that is not set."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty; check the variable that it comes from.", param, ctx)
        return super().convert(_expanded(self, value, param, ctx), param, ctx)


class OutputFile(click.Path):
    """A writable file in an existing folder, with one of the given suffixes if any are given."""

    def __init__(self, *suffixes: str) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from svdq.pipeline.errors import InputError
        from svdq.producer.files import check_target

        value = _expanded(self, value, param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        # An existing file is written in place: it may be /dev/stdout, whose folder is not writable.
        if self._suffixes or not os.path.exists(value):
            try:
                check_target(path, self._suffixes)
            except (InputError, OSError) as error:
                self.fail(str(error), param, ctx)
        return path
