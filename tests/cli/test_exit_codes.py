"""Exit codes that scripts rely on, each for its real cause, over the commands of the table."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest
from PIL import Image

from svdq.cli.main import cli
from tests.conftest import Cli
from tests.forks import Piped
from tests.reference import contexts

#: What each command is given, beyond its name, to be one that would do something.
ARGUMENTS: dict[str, list[str]] = {
    "svdq submit": ["photo.jpg"],
    "svdq batch": ["list.csv"],
    "svdq watch": [".", "--once"],
    "svdq wait": ["f" * 20],
    "svdq logs": ["f" * 20],
    "svdq report": ["--since", "1h"],
    "svdq fetch": ["f" * 20, "--output", "videos"],
    "svdq prune": ["--older-than", "30d", "--yes"],
    "svdq cancel": ["f" * 20],
    "svdq retry": ["--failed"],
    "svdq move": ["f" * 20, "--front"],
    "svdq mark": ["keep", "f" * 20],
    "svdq remove": ["f" * 20, "--yes"],
    "svdq worker": ["--burst", "--ranks", "1"],
    "svdq plan": ["--videos", "10", "--step-ms", "50"],
}
COMMANDS = [
    context
    for context in contexts(click.Context(cli, info_name="svdq", **cli.context_settings))
    if not isinstance(context.command, click.Group)
]
WITH_REDIS = [
    context.command_path
    for context in COMMANDS
    if any(parameter.name == "redis_url" for parameter in context.command.params)
    # `svdq serve` and `svdq mcp` run without Redis, too, and their answers say what is away.
    and context.command.name not in {"config", "doctor", "serve", "mcp"}
]


@pytest.fixture
def svdq(svdq_process: Cli) -> Cli:
    """Exit codes are a process's, whatever the command."""
    return svdq_process


@pytest.fixture(autouse=True)
def files(home: Path) -> None:
    """A photo and a list in the working folder."""
    Image.effect_noise((128, 128), 60).convert("RGB").save("photo.jpg")
    Path("list.csv").write_text("photo\nphoto.jpg\n")


def test_0_done(svdq: Cli) -> None:
    assert svdq("submit", "photo.jpg").returncode == 0
    assert svdq("list").returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["list --json", "submit photos --family svd", "--help"])
def test_1_the_output_cannot_be_written(svdq: Cli, arguments: str) -> None:
    Path("photos").mkdir()
    for number in range(3):
        Image.effect_noise((128, 128), number).save(f"photos/{number}.jpg")
    assert svdq("submit", "photo.jpg").returncode == 0
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "svdq.cli", *arguments.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "No space left" in done.stderr
    # A submission is whole, as with `svdq submit FOLDER | head`.
    assert len(svdq("list").stdout.splitlines()) == (4 if "photos" in arguments else 1)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_0_without_streams(svdq: Cli, closed: str) -> None:
    command = f"{sys.executable} -m svdq.cli submit photo.jpg {closed}"
    assert subprocess.run(command, shell=True).returncode == 0
    assert len(svdq("list").stdout.splitlines()) == 1


@pytest.mark.usefixtures("own_server")
def test_1_some_failed(svdq: Cli) -> None:
    Path("bad.jpg").write_text("no photo")
    done = svdq("submit", "photo.jpg", "bad.jpg", "--skip-bad")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1
    assert svdq("redis", "stop").returncode == 0
    assert svdq("redis", "url").returncode == 1


@pytest.mark.slow
def test_2_wrong_usage(svdq: Cli) -> None:
    def run(context: click.Context) -> "subprocess.CompletedProcess[str]":
        return svdq(*context.command_path.split()[1:], "--no-such-option")

    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(run, COMMANDS))
    wrong = [done for done in ends if (done.returncode, done.stdout, done.stderr.count("\n")) != (2, "", 1)]
    assert wrong == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "none.jpg"],
        ["submit", "list.csv"],
        ["batch", "none.csv"],
        ["inspect", "photo.jpg"],
        *([command, "f" * 20] for command in ("status", "wait", "logs")),
        ["worker", "--model", "/no/such/model"],
        ["worker", "--ranks", "99999"],
        ["worker", "--burst", "--until", ""],
        ["list", "--redis-url", "http://127.0.0.1/"],
        ["list", "--redis-url", ""],
        ["report", "--since", "yesterday-ish"],
        ["report", "--since", "1h", "--until", "2h"],
        ["report", "--since", "2999-01-01"],
        *(["gallery", *words] for words in (["-o", "video.mp4"], ["-o", "no/all.html"], ["nowhere"], ["--limit", "0"])),
        ["watch", "", "--once", "--on-success", "delete"],
        ["fetch", "--all", "--output", ""],
        ["config", "--storage", ""],
    ],
    ids=" ".join,
)
def test_2_wrong_input(svdq: Cli, arguments: list[str]) -> None:
    done = svdq(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert (done.stderr[:7], done.stderr.count("\n")) == ("Error: ", 1)
    assert {path.name for path in Path().iterdir()} == {"photo.jpg", "list.csv"}


@pytest.mark.slow
def test_3_redis_cannot_be_reached(svdq: Cli, home: Path) -> None:
    def run(command: str) -> "subprocess.CompletedProcess[str]":
        return svdq(*command.split()[1:], *ARGUMENTS.get(command, []), "--redis-url", "redis://:secret@127.0.0.1:1/0")

    # Together: each asks for two seconds, the time of a restart, before it gives up.
    with ThreadPoolExecutor(len(WITH_REDIS)) as pool:
        ends = dict(zip(WITH_REDIS, pool.map(run, WITH_REDIS), strict=True))
    assert len(ends) > 15
    assert {command: done.returncode for command, done in ends.items() if done.returncode != 3} == {}
    sentence = "Error: The Redis server redis://127.0.0.1:1 cannot be used"
    assert {command for command, done in ends.items() if sentence not in done.stderr} == set()
    assert {command for command, done in ends.items() if done.stderr.count("\n") != 1} == set()
    assert {command for command, done in ends.items() if "secret" in done.stdout + done.stderr} == set()
    # Only a watched folder has notes of its own, beside Redis.
    assert [path.name for path in home.iterdir()] == ["watch"], "nothing is stored, no server started"


@pytest.mark.parametrize(
    "arguments", [["submit", "photo.jpg"], ["batch", "list.csv"], ["report"], ["fetch", "--all", "-o", "v"]]
)
def test_3_storage_cannot_be_reached(svdq: Cli, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").write_text("")
    done = svdq(*arguments, "--storage", tmp_path / "file" / "storage")
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: ")


@pytest.mark.usefixtures("own_server")
def test_3_no_place_for_the_embedded_server(svdq: Cli, home: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "redis").write_text("no folder")
    assert svdq("list").returncode == 3
    (home / "redis").unlink()


def test_130_interrupted(svdq: Cli) -> None:
    job_id = svdq("submit", "photo.jpg").stdout.split()[0]
    with Piped("wait", job_id) as waiting:
        # It waits by the time that it says that nobody works.
        assert "No worker is running" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait() == 130
        left = waiting.stderr.read()
        assert left.startswith(f"Job {job_id} goes on; ")
        assert f"`svdq wait {job_id}`" in left
        assert f"`svdq cancel {job_id}`" in left
        assert "Traceback" not in left
