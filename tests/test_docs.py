"""The documentation names what exists: every command and setting, linked files and headings, pinned versions."""

import re
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pytest

from svdq.cli.main import cli
from svdq.producer.job import VIDEO_FIELDS
from svdq.producer.settings import ENV_PREFIX, Settings
from svdq.producer.submitting.photo_requests import COLUMNS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
PIN = re.compile(r"([A-Za-z0-9._-]+)==[0-9][0-9a-z.]*")


def commands(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    """Every command of a group with its full name, those of groups in it included."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix} {name}")
        if not isinstance(command, click.Group) or command.invoke_without_command:
            yield f"{prefix} {name}", command


COMMANDS = dict(commands(cli, "svdq"))


def anchor(heading: str) -> str:
    """The name that a heading gets in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_reference_has_every_command() -> None:
    assert {"svdq submit", "svdq redis stop"} <= COMMANDS.keys()
    reference = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"\n## {name}\n" not in reference] == []


def test_the_readme_names_a_few_commands_that_exist() -> None:
    rows = re.findall(r"^\| `(svdq[a-z ]*[a-z])", README, re.MULTILINE)
    assert 5 <= len(rows) <= 12
    assert set(rows) <= COMMANDS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_only_commands_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    named = re.findall(r"`svdq ([a-z]+)", text) + re.findall(r"^svdq ([a-z]+)", blocks, re.MULTILINE)
    assert set(named) <= {name.split()[1] for name in COMMANDS}


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "cli.md"], ids=lambda page: page.stem)
def test_commands_on_pages_have_only_options_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for words, rest in re.findall(r"svdq ((?:[a-z]+ )?[a-z]+)\b([^`\n|#]*)", text):
        found = COMMANDS.get(f"svdq {words}") or COMMANDS.get(f"svdq {words.split()[0]}")
        if found is not None:
            options = {option for parameter in found.params for option in parameter.opts} | {"--help"}
            assert set(re.findall(r" (--?[a-z][a-z-]*)", rest.partition(" -- ")[0])) <= options, f"svdq {words}{rest}"


def test_configuration_has_every_setting() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(SVDQ_\w+)` \|", page, re.MULTILINE)
    assert rows == [f"{ENV_PREFIX}{name.upper()}" for name in Settings.model_fields]


def test_the_pages_name_every_column_and_option() -> None:
    lists = (ROOT / "docs" / "submitting.md").read_text(encoding="utf-8")
    table = lists.partition("| column |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert set(named) == set(COLUMNS) - {"formats", "loras"}
    sentence = re.search(r"^`SubmitOptions` has .*?\.$", (ROOT / "docs" / "python.md").read_text("utf-8"), re.M | re.S)
    assert sentence is not None
    assert set(re.findall(r"`([a-z0-9_]+)`", sentence[0])) == set(VIDEO_FIELDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, fragment = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert target.resolve().is_relative_to(ROOT), link
        if fragment:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in map(anchor, headings), link


def test_tables_have_no_escaped_pipes_in_code() -> None:
    """GitHub shows a pipe there, and the site the backslash, too."""
    assert [page.name for page in PAGES if re.search(r"`[^`\n]*\\\|", page.read_text(encoding="utf-8"))] == []


def test_the_site_shows_lists_and_blocks_of_code_as_github_does() -> None:
    """It takes a block within a list as running text, and a list by less than four spaces as part of the outer one."""
    wrong = re.compile("^ +```|^ {1,3}- ", re.MULTILINE)
    prose = {page.name: re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S) for page in PAGES}
    assert [name for name, text in prose.items() if wrong.search(text)] == []


def test_the_tests_that_pages_name_exist() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(?:tests/[\w/]*/)?(test_\w+\.py)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert named <= {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def test_constraints_pin_what_is_needed_and_name_no_address() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [line for line in pins if not PIN.fullmatch(line)] == []

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = pyproject["project"]["optional-dependencies"]
    pinned = {canonical(line) for line in pins}
    installed = (extras[name] for name in ("worker", "serve", "metrics", "notify", "plot"))
    needed = {canonical(line) for line in chain(pyproject["project"]["dependencies"], *installed)}
    needed |= {canonical(line) for line in pyproject["dependency-groups"]["dev"]}
    assert needed - pinned == {"svdq"}  # an extra that others include


def canonical(requirement: str) -> str:
    """The name that a requirement begins with, in its one canonical spelling."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def first_column(page: str, heading: str) -> set[str]:
    """The names in backticks in the first column of the table whose heading line begins so."""
    table = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n| {heading}")[2].partition("\n\n")[0]
    return set(re.findall(r"`([\w-]+)`", "\n".join(row.split("|")[1] for row in table.splitlines()[2:])))


def test_the_threads_of_a_rank_have_the_names_of_the_page() -> None:
    named = {name.removesuffix("N") for name in first_column("internals/architecture.md", "thread |")}
    assert len(named) > 5
    code = "\n".join(path.read_text("utf-8") for name in ("pipeline", "worker") for path in (ROOT / name).rglob("*.py"))
    assert [name for name in named if not re.search(rf'name(?:_prefix)?=f?"{name}', code)] == []


def test_the_messages_of_the_troubleshooting_page_are_in_the_code() -> None:
    """Each fixed part of a message, between the `…`, is in a string of the product."""
    joined = re.compile(r'"\s*\n\s*f?"')
    sources = [path for folder in ("cli", "pipeline", "producer", "worker") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(joined.sub("", path.read_text(encoding="utf-8")) for path in sources)
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` (?:\(log\) )?\|", page, re.MULTILINE)
    assert len(messages) > 25
    parts = [part.strip() for message in messages for part in message.split("…") if len(part.strip()) > 3]
    assert [part for part in parts if part not in code] == []
