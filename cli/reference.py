"""`python -m svdq.cli.reference > docs/cli.md`: the reference of all commands, made of their help texts."""

from collections.abc import Iterator

import click

from svdq.cli.main import cli

#: Columns of the help texts, whatever the terminal has.
WIDTH = 100

INTRODUCTION = """# Commands

Written by `python -m svdq.cli.reference > docs/cli.md` from the commands' own `--help`; not edited by hand.

## Exit codes

| code | what it says |
|---|---|
| 0 | All that was asked for is done. |
| 1 | Some of it failed: a video, a photo left out by `--skip-bad`, a finding of `svdq doctor`. |
| 2 | Wrong usage or input; nothing was done. |
| 3 | Redis, the storage or a program that is needed cannot be reached. |
| 130 | Interrupted by Ctrl-C. |

What went wrong stands in one sentence on stderr.

The exit code of `svdq worker` tells of the worker, not of its videos: a burst with a failed video exits with 0
(`svdq report` and `--report` tell what failed), and so does a worker that Ctrl-C ends.

## Shell completion

`svdq completion bash`, `zsh` and `fish` print a script that completes commands, options and files; where to put it
stands [below](#svdq-completion).
"""


def reference() -> str:
    """Write the reference: Markdown, a section for each command."""
    root = click.Context(cli, info_name="svdq", terminal_width=WIDTH, max_content_width=WIDTH, **cli.context_settings)
    sections = [f"## {context.command_path}\n\n```text\n{help_text(context)}\n```\n" for context in contexts(root)]
    return "\n".join([INTRODUCTION, *sections])


def help_text(context: click.Context) -> str:
    """Write what `--help` prints, without space at the ends of lines."""
    return "\n".join(line.rstrip() for line in context.get_help().splitlines()).strip()


def contexts(parent: click.Context) -> Iterator[click.Context]:
    """Give the command of a context, and all commands below it."""
    yield parent
    group = parent.command
    if isinstance(group, click.Group):
        for name in group.list_commands(parent):
            command = group.get_command(parent, name)
            assert command is not None
            yield from contexts(click.Context(command, info_name=name, parent=parent, **command.context_settings))


if __name__ == "__main__":
    click.echo(reference(), nl=False)  # noqa: TID251 - many lines, all ours
