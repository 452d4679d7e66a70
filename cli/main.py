"""The `svdq` command: its subcommands, each imported only when it runs, and how errors end it."""

import contextlib
import errno
import gc
import importlib
import io
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

import click
from click.shell_completion import CompletionItem

from svdq.pipeline.errors import InputError, SvdqError

#: Headings of `svdq --help` -> name of a command -> (module:attribute, one-line help).
SECTIONS = {
    "Make videos": {
        "submit": ("svdq.cli.submit:submit", "Submit photos to be made into videos."),
        "batch": ("svdq.cli.submit:batch", "Submit the photos of a list, each with its own parameters."),
        "caption": ("svdq.cli.caption:caption", "Write a prompt beside each photo, by a vision model."),
        "watch": ("svdq.cli.watch:watch", "Submit photos as they are dropped into a folder."),
        "worker": ("svdq.cli.worker:worker", "Start a group of ranks that renders queued jobs."),
        "serve": ("svdq.cli.serve.command:serve", "Serve a web page and the /v1/videos API."),
        "mcp": ("svdq.cli.mcp:mcp", "Serve agents by the Model Context Protocol."),
    },
    "Follow jobs": {
        "status": ("svdq.cli.jobs:status", "Show queues, workers and jobs in flight, or single jobs."),
        "list": ("svdq.cli.jobs:list_jobs", "List the newest jobs."),
        "wait": ("svdq.cli.wait:wait", "Wait for jobs and print the paths of their videos."),
        "top": ("svdq.cli.top:top", "Watch queues, ranks and videos in flight."),
        "logs": ("svdq.cli.jobs:logs", "Show what workers logged about a job."),
        "report": ("svdq.cli.results:report", "Summarize a run."),
    },
    "Use videos": {
        "gallery": ("svdq.cli.results:gallery", "Write a page of the finished videos."),
        "fetch": ("svdq.cli.results:fetch", "Copy finished videos into a folder."),
        "inspect": ("svdq.cli.results:inspect", "Show how a video was made."),
        "mark": ("svdq.cli.control:mark", "Mark videos to keep or to reject."),
        "remove": ("svdq.cli.results:remove", "Remove single videos with their files."),
        "prune": ("svdq.cli.results:prune", "Remove old videos, photos and checkpoints."),
    },
    "Change jobs": {
        "cancel": ("svdq.cli.control:cancel", "Cancel jobs, queued or in flight."),
        "retry": ("svdq.cli.control:retry", "Queue failed, stopped or canceled jobs again."),
        "move": ("svdq.cli.control:move", "Move queued jobs to the front, or to another priority."),
        "pause": ("svdq.cli.control:pause", "Stop taking jobs from the queues."),
        "resume": ("svdq.cli.control:resume", "Resume taking jobs."),
    },
    "Set up": {
        "setup": ("svdq.cli.setup:setup", "Choose a model, fetch it, and render a first video."),
        "model": ("svdq.cli.model:model", "List, fetch and check models."),
        "doctor": ("svdq.cli.machine:doctor", "Check the installation and say how to fix it."),
        "config": ("svdq.cli.machine:config", "Show the settings and where they come from."),
        "redis": ("svdq.cli.machine:redis", "Start or stop the embedded Redis server."),
        "deploy": ("svdq.cli.deploy:deploy", "Write units that run svdq as a service."),
    },
    "Measure and plan": {
        "bench": ("svdq.cli.bench:bench", "Measure the pipeline."),
        "plan": ("svdq.cli.plan:plan", "Say what a model needs of GPUs, and how long videos take."),
    },
}
COMMANDS = {name: entry for commands in SECTIONS.values() for name, entry in commands.items()}

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
#: Why the output cannot be written: a full disk, a used-up quota, a file size limit, a broken disk.
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class LazyGroup(click.Group):
    """A group that lists its commands from a table, and imports a command only to run it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        # click suggests the nearest of these names for a wrong one.
        self.commands = dict.fromkeys(COMMANDS, self)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name, help=text) for name, (_, text) in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, commands in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{width}}", text) for name, (_, text) in commands.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="svdq", message="svdq %(version)s")
def cli() -> None:
    """Turn photos into short videos in bulk.

    \b
    svdq submit photo.jpg        put a photo in the queue
    svdq worker                  render the photos in the queue
    svdq wait ID                 wait for a video and print its path
    """
    if not gc.isenabled():  # `main` has turned it off
        gc.freeze()  # the command and all that it has imported stay
        gc.enable()
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("The working folder has been removed; change to one that exists, such as `cd ~`.") from error


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; print an error of ours as one sentence on stderr."""
    try:
        result = cli.main(list(arguments), prog_name="svdq", standalone_mode=False)
        sys.stdout.flush()
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.message, err=True)  # noqa: TID251 - many lines
        return EXIT_BAD_INPUT
    except click.ClickException as error:
        text, context = error.format_message(), getattr(error, "ctx", None)
        help_of = f" See `{context.command_path} --help`." if context else ""
        return _complain(f"{text}{'' if text.endswith(('.', '?', '?)')) else '.'}{help_of}", error.exit_code)
    except SvdqError as error:
        return _complain(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output has closed the pipe, as `svdq list | head` does.
        _drop_output()
        return EXIT_FAILED
    except OSError as error:
        # Errors of the output name no file; others are handled where a file is used.
        if error.filename is None and error.errno in CANNOT_WRITE:
            _drop_output()
            return _complain(f"The output cannot be written ({error.strerror}).", EXIT_FAILED)
        raise
    except Exception as error:
        from svdq.pipeline.imports import import_failure

        if (broken := import_failure(error)) is None:
            raise
        return _complain(str(broken), broken.exit_code)
    return result if isinstance(result, int) else 0


def main() -> None:
    """Run the console script."""
    # The shell's `>&-` closes a stream; the next file to be opened would take its number, also in ranks.
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the end
            os.set_inheritable(getattr(sys, name).fileno(), True)
    # A terminal that is not UTF-8 lacks characters that names and prompts may have.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # pydantic looks for plugins in the metadata of all installed packages.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Imports leave no garbage, and the last collection takes a twelfth of the time of a short command.
    gc.disable()
    code = run(sys.argv[1:])
    gc.disable()
    sys.exit(code)


def _drop_output() -> None:
    """Drop the buffered output, which Python would write once more at its end."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(sentence: str, exit_code: int) -> int:
    # Imported here so that the command table imports only click.
    from svdq.cli.formatting import echo

    echo(f"Error: {' '.join(sentence.split())}", err=True)
    return exit_code


def notify_systemd() -> None:
    """Notify systemd that the service is ready, with a datagram to the socket in NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
            manager.send(b"READY=1")


class StopSignals:
    """A stop request by SIGINT or SIGTERM; a second signal ends the process at once."""

    def __init__(self) -> None:
        self.number = 0  # the signal, or 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A shell makes its background jobs ignore Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_set(self) -> bool:
        """Return whether a signal has arrived."""
        return self.number != 0

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number
