"""The `svdq` command: a table of commands, each imported only when it is called, and how errors end.

Imports nothing but click, so that `svdq --help` and shell completion answer at once.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from svdq.pipeline.errors import SvdqError

#: name -> (module:attribute, one-line help)
COMMANDS = {
    "submit": ("svdq.cli.submit:submit", "Submit photos to be made into videos."),
    "batch": ("svdq.cli.batch:batch", "Submit the photos of a list, each with parameters of its own."),
    "watch": ("svdq.cli.watch:watch", "Submit photos as they are dropped into a folder."),
    "status": ("svdq.cli.jobs:status", "Show queues, workers and jobs in flight, or single jobs."),
    "list": ("svdq.cli.jobs:list_jobs", "List the newest jobs."),
    "wait": ("svdq.cli.wait:wait", "Wait for jobs and print where their videos are."),
    "top": ("svdq.cli.top.top:top", "Watch queues, ranks and videos in flight."),
    "logs": ("svdq.cli.logs:logs", "Show what workers logged about a job."),
    "report": ("svdq.cli.report:report", "Tell what a night's work came to."),
    "gallery": ("svdq.cli.gallery:gallery", "Write a page of the finished videos."),
    "fetch": ("svdq.cli.files:fetch", "Bring finished videos into a folder."),
    "prune": ("svdq.cli.files:prune", "Remove old videos, photos and checkpoints."),
    "inspect": ("svdq.cli.inspect:inspect", "Show how a video was made."),
    "cancel": ("svdq.cli.control:cancel", "Cancel jobs, queued or in flight."),
    "retry": ("svdq.cli.control:retry", "Queue failed, stopped or canceled jobs again."),
    "move": ("svdq.cli.control:move", "Move queued jobs to the front, or to another priority."),
    "pause": ("svdq.cli.control:pause", "Take no more jobs off the queues."),
    "resume": ("svdq.cli.control:resume", "Take jobs again."),
    "worker": ("svdq.cli.worker:worker", "Start a group of ranks that renders queued jobs."),
    "redis": ("svdq.cli.redis:redis", "Start or stop the embedded Redis server."),
    "model": ("svdq.cli.model:model", "Fetch models, or make one for trying out."),
    "bench": ("svdq.cli.bench:bench", "Measure the pipeline."),
    "plan": ("svdq.cli.plan:plan", "Tell how many GPUs so many videos need, and what they cost."),
    "advise": ("svdq.cli.advise:advise", "Tell where the time goes, and what would help most."),
    "deploy": ("svdq.cli.deploy:deploy", "Write units that run svdq as a service."),
    "doctor": ("svdq.cli.doctor:doctor", "Look whether everything is there, and say what to do."),
    "config": ("svdq.cli.config:config", "Show the settings and where they come from."),
    "completion": ("svdq.cli.completion:completion", "Print the script that completes commands in a shell."),
}

#: Headings of `svdq --help`, and the commands below each.
SECTIONS = {
    "Make videos": ("submit", "batch", "watch", "worker"),
    "Follow jobs": ("status", "list", "wait", "top", "logs", "report"),
    "Use videos": ("gallery", "fetch", "inspect", "prune"),
    "Change jobs": ("cancel", "retry", "move", "pause", "resume"),
    "Set up": ("model", "doctor", "config", "redis", "deploy", "completion"),
    "Measure and plan": ("bench", "plan", "advise"),
}

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
#: What a shell reports of a program that Ctrl-C ended.
EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


class LazyGroup(click.Group):
    """A group that knows its commands by name and help, and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete from the table, so that a press of the tab key imports no command."""
        names = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table into `--help`; click's own way would import every command."""
        width = max(map(len, COMMANDS))
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{width}}", COMMANDS[name][1]) for name in names])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="svdq", message="svdq %(version)s")
def cli() -> None:
    """Turn photos into short videos in bulk.

    \b
    svdq submit photo.jpg        put a photo in the queue
    svdq worker                  start making videos of what is in the queue
    svdq wait ID                 wait for one and print where it is
    """  # noqa: D301 - \b is click's mark for a paragraph to be left as it is


def redis_options(command: Command) -> Command:
    """Add the flag of every command that talks to Redis."""
    return click.option("--redis-url", metavar="URL", help="Redis server [default: embedded, or SVDQ_REDIS_URL].")(
        command
    )


def storage_option(command: Command) -> Command:
    """Add the flag of every command that reads or writes the storage."""
    return click.option("--storage", metavar="URL", help="Folder or URL [default: under the home, or SVDQ_STORAGE].")(
        command
    )


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; errors of ours become one sentence on stderr."""
    try:
        result = cli.main(list(arguments), prog_name="svdq", standalone_mode=False)
        sys.stdout.flush()
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.message, err=True)  # noqa: TID251 - many lines
        return EXIT_BAD_INPUT
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except SvdqError as error:
        return _complain(str(error), error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has gone, as `svdq list | head` does; what is still buffered has nowhere to go.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def main() -> None:
    """Be the console script."""
    sys.exit(run(sys.argv[1:]))


def _complain(sentence: str, exit_code: int) -> int:
    # Imported here: the table of commands imports nothing but click.
    from svdq.cli.formatting import echo

    echo(f"Error: {' '.join(sentence.split())}", err=True)
    return exit_code
