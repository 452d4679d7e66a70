"""The entry point: what is imported when, and how commands end."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import click
import pytest
import redis

from svdq.cli import main
from svdq.pipeline.errors import InputError, SampleError, SvdqError, UnavailableError
from svdq.producer.job_log import LogEntry, append_log
from tests.conftest import Cli
from tests.forks import Piped
from tests.queued import add


def modules_after(*arguments: object) -> set[str]:
    """The modules that a command has imported by its end."""
    code = (
        "import sys; from svdq.cli.main import run; code = run(sys.argv[1:]);"
        "print('MODULES', *sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("MODULES ")[2].split())


HEAVY = {"torch", "diffusers", "transformers", "numpy"}
#: What only single commands need: each takes a tenth of the time of a command, or more.
LATE = HEAVY | {
    *(
        "PIL",
        "apprise",
        "fsspec",
        "huggingface_hub",
        "jinja2",
        "psutil",
        "rich",
        "starlette",
        "tinytag",
        "tomllib",
        "uvicorn",
    ),
    "svdq.producer.storage.storage",
}


def test_help_imports_nothing_but_click() -> None:
    assert not modules_after("--help") & (HEAVY | {"redis", "rq", "pydantic", "PIL", "rich", "fsspec"})
    # The options of submit come from the job's pydantic model.
    assert not modules_after("submit", "--help") & (HEAVY | {"redis", "rq", "PIL", "rich", "fsspec"})


def test_submit_imports_no_torch(home: Path, photo: Path) -> None:
    assert not modules_after("submit", photo) & (HEAVY | {"rich", "fsspec", "tinytag"})


@pytest.mark.parametrize("arguments", [["status"], ["list", "--status", "failed"], ["pause"]])
def test_commands_that_only_talk_to_redis_import_little(home: Path, arguments: list[str]) -> None:
    modules = modules_after(*arguments)
    assert modules & LATE == set()
    # Without jobs there is nothing to estimate.
    assert arguments != ["status"] or "svdq.pipeline.models.families" not in modules


@pytest.mark.parametrize("command", ["submit", "worker"])
def test_advanced_options_come_last(svdq: Cli, command: str) -> None:
    plain, advanced = svdq(command, "--help").stdout.split("Advanced:")
    assert "--redis-url" in advanced
    assert "--redis-url" not in plain
    assert "--help" in plain


@pytest.mark.parametrize("name", main.COMMANDS)
def test_table(name: str) -> None:
    module, _, attribute = main.COMMANDS[name][0].partition(":")
    command = getattr(importlib.import_module(module), attribute)
    assert isinstance(command, click.Command)
    assert command.name == name


def test_version_and_unknown_command(svdq: Cli) -> None:
    assert svdq("--version").stdout.startswith("svdq 0.")
    done = svdq("xyzzy")
    assert (done.returncode, done.stderr) == (2, "Error: No such command 'xyzzy'. See `svdq --help`.\n")
    done = svdq("sumbit", "photo.jpg")
    assert done.returncode == 2
    assert done.stderr == "Error: No such command 'sumbit'. Did you mean 'submit'? See `svdq --help`.\n"


def test_a_wrong_use_names_the_help(svdq: Cli) -> None:
    done = svdq("submit")
    assert (done.returncode, done.stderr) == (2, "Error: Missing argument 'PHOTO...'. See `svdq submit --help`.\n")


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (InputError("A.\nB"), 2, "Error: A. B"),
        (UnavailableError("A."), 3, "Error: A."),
        (SvdqError("A."), 1, "Error: A."),
        (SampleError("A."), 1, "Error: A."),
        (KeyboardInterrupt(), 130, ""),
        (click.UsageError("A."), 2, "Error: A. See `svdq status --help`."),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, exit_code: int, said: str
) -> None:
    @click.command()
    def command() -> None:
        raise error

    monkeypatch.setattr(main.LazyGroup, "get_command", lambda *_: command)
    assert main.run(["status"]) == exit_code
    assert capsys.readouterr().err.strip() == said


@pytest.mark.parametrize("arguments", [["status"], ["submit", "photo.jpg"], ["config"]])
def test_a_removed_working_folder_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    assert main.run(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: The working folder has been removed")
    assert error.count("\n") == 1


def test_a_reader_that_goes_away(connection: redis.Redis) -> None:
    job = add(connection, 1)

    def log(text: str) -> None:
        with connection.pipeline() as pipeline:
            append_log(pipeline, job.id, [LogEntry.now(rank=0, host="here", level="INFO", text=text, at=1.0)])
            pipeline.execute()

    log("one")
    with Piped("logs", "--follow", job.id) as process:
        assert process.stdout.readline().endswith("one\n")
        process.stdout.close()
        log("two")
        assert (process.stderr.read(), process.wait()) == ("", main.EXIT_FAILED)


def test_every_command_is_below_one_heading_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(main.COMMANDS) == sum(map(len, main.SECTIONS.values()))
    main.run(["--help"])
    shown = capsys.readouterr().out
    assert all(f"\n{heading}:\n" in shown for heading in main.SECTIONS)
    assert all(f"\n  {name} " in shown for name in main.COMMANDS)
