"""`svdq completion`: print shell completion scripts."""

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

    The script calls svdq for each completion, so an upgrade of svdq does not require a new script.
    """
    from click.shell_completion import get_completion_class

    from svdq.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "svdq", "_SVDQ_COMPLETE").source())  # noqa: TID251 - many lines, all ours
