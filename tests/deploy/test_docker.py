"""deploy/docker, as far as it can be looked at without an engine: no image is built here and no container is started.

One test runs the producer image's steps in a virtual environment instead.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from svdq.producer.embedded_redis import stop_server
from svdq.worker.launcher.launcher import STOP_S
from svdq.worker.launcher.torchrun import KILL_S

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
DOCKERFILES = ["Dockerfile.worker", "Dockerfile.producer"]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def filled_in(text: str) -> str:
    """The compose file as Docker Compose reads it with .env.example filled in."""
    environment = dict(re.findall(r"^(\w+)=(.*)$", (DOCKER / ".env.example").read_text(), re.MULTILINE))

    def value(match: re.Match[str]) -> str:
        name, kind, default = match.groups()
        assert name in environment, f"{name} is not in .env.example"
        return environment[name] or ("secret" if kind == ":?" else default)

    return re.sub(r"(?<!\$)\$\{(\w+)(:[-?])([^}]*)\}", value, text).replace("$$", "$")


@pytest.fixture(scope="module")
def compose() -> dict:
    return yaml.safe_load(filled_in((DOCKER / "compose.yaml").read_text()))


def test_compose_reads_the_file() -> None:
    compose_spec = pytest.importorskip("compose_spec")
    text = filled_in((DOCKER / "compose.yaml").read_text())

    def read(text: str) -> None:
        compose_spec.PyOptions(apply_merge=True).from_yaml(text).validate()

    read(text)
    with pytest.raises(ValueError, match="stop_grace"):
        read(text.replace("stop_grace_period", "stop_grace"))
    with pytest.raises(ValueError, match=r"videos|volume"):
        read(text.replace("\n  videos:\n", "\n"))


def test_commands_of_the_services_are_commands_of_ours(
    compose: dict, check_command: Callable[[list[str]], None], tmp_path: Path
) -> None:
    images = ("svdq-worker", "svdq-producer")
    ours = {name: service["command"] for name, service in compose["services"].items() if service["image"] in images}
    assert set(ours) == {"worker", "watch", "serve", "svdq"}
    for command in ours.values():
        check_command([str(tmp_path) if word == "/inbox" else word for word in command])


def test_a_stop_takes_less_time_than_docker_grants(compose: dict) -> None:
    granted = compose["services"]["worker"]["stop_grace_period"]
    assert int(granted.removesuffix("s")) > STOP_S + KILL_S


def test_nothing_but_this_machine_can_reach_the_services(compose: dict) -> None:
    ports = {name: service.get("ports", []) for name, service in compose["services"].items()}
    assert not ports["redis"]
    assert all(port.startswith("127.0.0.1:") for found in ports.values() for port in found)


@pytest.mark.skipif(HADOLINT is None, reason="there is no hadolint here")
@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_linter_finds_nothing(name: str) -> None:
    done = subprocess.run([str(HADOLINT), str(DOCKER / name)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_svdq_as_an_ordinary_user(name: str, check_command: Callable[[list[str]], None]) -> None:
    last = (DOCKER / name).read_text().rpartition("\nFROM ")[2]
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["10001"]
    [health] = re.findall(r"^HEALTHCHECK .* CMD (.*)$", last, re.MULTILINE)
    assert yaml.safe_load(health)[0] == "svdq"
    check_command(yaml.safe_load(health)[1:])


def test_the_images_get_all_that_is_installed_and_nothing_else() -> None:
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {rule[1:] for rule in rules if rule.startswith("!")}
    assert rules[1] == "*"
    packages = re.findall(r'^"svdq\.\w+" = "(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert allowed == {*packages, "LICENSE", "README.md", "constraints.txt", "pyproject.toml"}


def test_the_steps_of_the_producer_image(tmp_path: Path, photo: Path) -> None:
    """The commands of the Dockerfile, with other paths; then svdq as in the image: without torch."""
    source, target, home = tmp_path / "src", tmp_path / "svdq", tmp_path / "home"
    for name in (rule[1:] for rule in (ROOT / ".dockerignore").read_text().splitlines() if rule.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    text = (DOCKER / "Dockerfile.producer").read_text()
    steps = text.partition(" AS build\n")[2].partition("\nFROM ")[0].replace("\\\n", " ")
    commands = [line.removeprefix("RUN ") for line in steps.splitlines() if line.startswith("RUN ")]
    assert len(commands) == 2
    for command in commands:
        command = command.replace("--mount=type=cache,target=/root/.cache/pip", "").replace("${EXTRAS}", "serve,s3")
        command = command.replace("/opt/svdq", str(target)).replace("/src", str(source))
        words = shlex.split(command.replace("python3 ", f"{sys.executable} ", 1) if "-m venv" in command else command)
        subprocess.run(words, check=True, timeout=280)

    def run(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        environment = {"PATH": "/usr/bin:/bin", "SVDQ_HOME": str(home)}
        command = [str(target / "bin" / program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)

    try:
        submitted = run("svdq", "submit", str(photo), "--frames", "2", "--family", "svd")
        assert (submitted.returncode, submitted.stderr) == (0, "")
        job_id = submitted.stdout.split()[0]
        status = run("svdq", "status", job_id)
        assert (status.returncode, status.stderr) == (0, "")
        assert "queued" in status.stdout
        assert run("svdq", "doctor", "--quick").returncode == 0
        units = run("svdq", "deploy", "systemd", "--user")
        (path,) = re.findall(r'^PATH="?([^"\n]*)', units.stdout, re.MULTILINE)
        assert path.split(":")[0] == f"{target}/bin", "where the units find svdq"
        torch = run("python", "-c", "import torch")
        assert "No module named 'torch'" in torch.stderr
        assert run("python", "-m", "pip", "check").returncode == 0
    finally:
        stop_server(home)
