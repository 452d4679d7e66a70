"""docs/cli.md says what the commands say, and every command says how it is used."""

from pathlib import Path

import click
import pytest

from svdq.cli.main import cli
from tests.reference import contexts, reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
CONTEXTS = list(contexts(click.Context(cli, info_name="svdq", **cli.context_settings)))
GROUPS, COMMANDS = (
    [context for context in CONTEXTS if isinstance(context.command, click.Group) is is_group]
    for is_group in (True, False)
)


def test_the_page_is_what_the_commands_say() -> None:
    is_same = PAGE.read_text(encoding="utf-8") == reference()
    assert is_same, "the commands have changed: python -m tests.reference > docs/cli.md"


@pytest.mark.parametrize("context", COMMANDS, ids=lambda context: context.command_path)
def test_every_command_shows_examples_and_explains_its_options(context: click.Context) -> None:
    options = [parameter for parameter in context.command.params if isinstance(parameter, click.Option)]
    if {parameter.name for parameter in context.command.params} - {"redis_url"}:
        assert f"  {context.command_path}" in context.get_help().partition("Examples:")[2]
    assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize("context", GROUPS, ids=lambda context: context.command_path)
def test_groups_describe_their_commands_in_whole_sentences(context: click.Context) -> None:
    """click cuts what does not fit into a line."""
    assert "..." not in context.get_help().partition("Commands:")[2]
