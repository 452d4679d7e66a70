"""`svdq completion`: the scripts that have a shell complete commands and options."""

import click

EXAMPLES = """\b
Examples:
  svdq completion bash > ~/.local/share/bash-completion/completions/svdq
  svdq completion zsh > ~/.zfunc/_svdq          with fpath+=~/.zfunc before compinit
  svdq completion fish > ~/.config/fish/completions/svdq.fish
"""


@click.command(epilog=EXAMPLES)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes svdq's commands, options and files in a shell.

    Each press of the tab key asks svdq itself, so the script need not be written again after an upgrade.
    """
    from click.shell_completion import get_completion_class

    from svdq.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "svdq", "_SVDQ_COMPLETE").source())  # noqa: TID251 - many lines, all ours
