"""Two hosts at one network, and what they share: a Redis with a password, append-only, and a bucket."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from PIL import Image

from svdq.producer.queue import connect
from svdq.producer.settings_loader import load_settings
from tests.conftest import S3_SECRET
from tests.hosts.network import Host, Network, NoHostsError
from tests.waiting import wait_until
from tests.worker.conftest import SCRIPTS, House
from tests.worker.own_redis import OwnRedis

PASSWORD = "password-of-the-tests"
#: The second one sorts after the first: torchrun numbers hosts by their names or addresses.
NAMES = ("alpha", "beta")


@dataclass
class Running:
    """A command that runs on a host."""

    nsenter: "subprocess.Popen[bytes]"
    log: Path

    @property
    def text(self) -> str:
        """What it has said."""
        return self.log.read_text(errors="replace")

    @property
    def process(self) -> psutil.Process:
        """The command itself."""
        return psutil.Process(self.nsenter.pid).children()[0]

    def said(self, words: str, times: int = 1) -> "Running":
        """Wait until it has said something so often."""
        wait_until(lambda: self.text.count(words) >= times, lambda: self.text)
        return self

    def ranks(self) -> dict[int, psutil.Process]:
        """Its ranks that are there at present."""
        found = {}
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error, KeyError):
                if "svdq.worker" in process.cmdline():
                    found[int(process.environ()["RANK"])] = process
        return found

    def kill(self) -> None:
        """End what a failed test has left running."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.nsenter.pid).children(recursive=True):
                process.kill()
        self.nsenter.kill()
        self.nsenter.wait()

    def end(self) -> int:
        """Wait for its end and return the exit code."""
        wait_until(lambda: self.nsenter.poll() is not None, lambda: self.text)
        return self.nsenter.returncode


@dataclass
class Lan:
    """The network, and a house whose things are shared over it."""

    network: Network
    house: House
    #: What each host has in its environment.
    shared: dict[str, str]
    running: list[Running] = field(default_factory=list)

    @property
    def alpha(self) -> Host:
        return self.network.hosts["alpha"]

    @property
    def beta(self) -> Host:
        return self.network.hosts["beta"]

    def start(self, host: Host, program: str, *arguments: object, **environment: str) -> Running:
        """Start a console script on a host."""
        log = self.house.folder / f"{host.name}{len(self.running)}.log"
        home = self.house.folder / f"home-{host.name}"
        command = [*host.command, str(SCRIPTS / program), *map(str, arguments)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.house.folder,
                env=self.house.environment(**self.shared, SVDQ_HOME=str(home), **environment),
            )
        wait_until(lambda: psutil.Process(process.pid).children() or process.poll() is not None)
        self.running.append(Running(process, log))
        return self.running[-1]

    def all_text(self) -> str:
        """Everything that was said, for a failed test."""
        return "\n".join(f"--- {running.log.name}\n{running.text}" for running in self.running)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    if not sys.platform.startswith("linux"):
        pytest.skip("network namespaces are Linux's")
    folder = tmp_path / "network"
    folder.mkdir()
    try:
        network = Network(NAMES, folder)
    except NoHostsError as error:
        pytest.skip(f"no hosts can be made here: {error}")
    yield network
    network.end()


@pytest.fixture
def bucket(network: Network, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, str]]]:
    """URL of a place in a bucket of an S3 server at the network, and the environment that it needs."""
    import s3fs  # seconds of a core

    server = pytest.importorskip("moto.server").ThreadedMotoServer(network.address, 0, verbose=False)
    server.start()
    environment = {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_ACCESS_KEY_ID": "AKIASVDQTEST",
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    name = f"svdq-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    yield f"s3://{name}/fleet", environment
    server.stop()


@pytest.fixture
def redis_url(network: Network, tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = OwnRedis(folder, "--bind", "127.0.0.1", network.address, "--requirepass", PASSWORD)
    yield f"redis://:{PASSWORD}@{network.address}:{server.port}/0"
    server.stop(signal.SIGKILL)


@pytest.fixture
def lan(
    network: Network,
    bucket: tuple[str, dict[str, str]],
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Lan]:
    for name in [name for name in os.environ if name.startswith("SVDQ_")]:
        monkeypatch.delenv(name)
    storage, environment = bucket
    photo = tmp_path / "photo.jpg"
    Image.effect_noise((160, 100), 60).convert("RGB").save(photo)
    settings = load_settings(home=tmp_path / "home", redis_url=redis_url, storage=storage)
    house = House(tmp_path, settings, connect(settings), photo)
    lan = Lan(network, house, {"SVDQ_REDIS_URL": redis_url, "SVDQ_STORAGE": storage, **environment})
    yield lan
    for running in lan.running:
        running.kill()
    house.leave()
    print(lan.all_text())  # shown when the test has failed
