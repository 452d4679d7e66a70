"""Command lines of svdq as text to type into a shell: quoted, with `--` before files whose names begin with a dash."""

import shlex
from collections.abc import Sequence


def arguments_of(command: str, *files: object, options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the arguments of a command such as "model pull": its files, then its options; after `--` if need be."""
    names = [*map(str, files)]
    if any(name.startswith("-") for name in names):
        return (*command.split(), *options, "--", *names)
    return (*command.split(), *names, *options)


def svdq_command(command: str, *files: object, options: Sequence[str] = ()) -> str:
    """Return the command line of a command with files and options."""
    return joined(arguments_of(command, *files, options=options))


def joined(arguments: Sequence[str]) -> str:
    """Return the command line that has these arguments."""
    return f"svdq {shlex.join(arguments)}"


def variable(name: str, value: object) -> str:
    """Return a variable as it stands before a command: SVDQ_MODEL='my model.toml'."""
    return f"{name}={shlex.quote(str(value))}"
