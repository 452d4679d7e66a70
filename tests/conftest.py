"""Fixtures of all tests: a home for each test, and one real Redis server for each test process."""

import contextlib
import fcntl
import gc
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import redis
from PIL import Image

from svdq.producer.connection import session
from svdq.producer.embedded_redis import ensure_server, stop_server
from svdq.producer.settings import Settings
from svdq.producer.settings_loader import load_settings
from svdq.producer.storage.storage import Storage
from tests import forks
from tests.waiting import PATIENCE_S, wait_until

# Several test processes share the cores: torch's threads would spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On AMD's processors the sums of MKL depend on the addresses of weights; copies of weights have others than the file.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# How long an example takes is the machine's business.
# The same examples in each run: an example that is found by chance stops nobody else's change.
hypothesis.settings.register_profile("svdq", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile("svdq")

S3_SECRET = "s3-secret-of-the-tests"  # the secret key of the S3 server; it must turn up nowhere
Cli = Callable[..., "subprocess.CompletedProcess[str]"]  # `svdq` as a user runs it
#: Commands that start processes, catch signals or draw on terminals: each in a process of its own.
OF_THEIR_OWN = {"worker", "watch", "bench"}


def pytest_configure() -> None:
    """Undo what a test runner's surroundings leave in a process and its children; import without collecting garbage."""
    gc.disable()
    # pytest-xdist gives its workers the size of a terminal that is not theirs.
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        os.environ.pop(name, None)
    # A runner in the background of a shell is started deaf to Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, without what modules made: some 400,000 objects."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files with most slow tests first: one test process runs all of a file, so a long one must not begin last.

    A test that imports diffusers is slow: that takes 4 s of a core in each test process.
    """
    for item in items:
        if isinstance(item, pytest.Function) and {"tiny_model", "tiny_wan", "tiny_ltx"} & {*item.fixturenames}:
            item.add_marker("slow")
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -num_slow[item.path])


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the one Redis server of this test process; `home` empties it before each test."""
    folder = tmp_path_factory.mktemp("redis")
    url = ensure_server(folder)
    with redis.Redis.from_url(url) as client:
        client.config_set("appendfsync", "everysec")  # tests need no power-cut safety
    yield url
    stop_server(folder)


@pytest.fixture
def home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_redis: str
) -> Iterator[Path]:
    """SVDQ_HOME of this test, in an empty working folder, with the shared Redis server, emptied.

    A test that stops, restarts or configures a server uses `own_server` too.
    """
    for name in [name for name in os.environ if name.startswith("SVDQ_")]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("SVDQ_HOME", str(folder))
    if "own_server" not in request.fixturenames:
        with redis.Redis.from_url(shared_redis) as client:
            client.flushall()
        monkeypatch.setenv("SVDQ_REDIS_URL", shared_redis)
    yield folder
    stop_server(folder)


@pytest.fixture
def own_server(home: Path) -> Path:
    """Return the home; no Redis server is set, so that the first use starts the embedded one in it."""
    return home


@pytest.fixture
def settings(home: Path) -> Settings:
    return load_settings()


@pytest.fixture
def storage(settings: Settings) -> Storage:
    return Storage(settings.storage)


@pytest.fixture
def connection(settings: Settings) -> Iterator[redis.Redis]:
    with session(settings) as connection:
        yield connection


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of an S3 server on this machine."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.INFO)  # what is asked of it, for tests to read
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of an empty place in an S3 bucket, with credentials for it in the environment."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "AKIASVDQTEST",
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"svdq-{uuid.uuid4().hex}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    yield f"s3://{bucket}/some/prefix"
    s3fs.S3FileSystem(skip_instance_cache=True).rm(bucket, recursive=True)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the untrained model; all test processes of a run share it, so a test that changes it copies it."""
    return _tiny_model(tmp_path_factory, "svd")


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the untrained Wan model with two experts."""
    return _tiny_model(tmp_path_factory, "wan")


@pytest.fixture(scope="session")
def tiny_ltx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the untrained LTX-2.3, distilled."""
    return _tiny_model(tmp_path_factory, "ltx")


@pytest.fixture(scope="session")
def wide_wan(tiny_wan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny Wan with transformers that are wide enough for all types of GGUF."""
    import torch
    from diffusers import WanTransformer3DModel

    folder = tmp_path_factory.mktemp("wide") / "wan"
    shutil.copytree(tiny_wan, folder)
    for seed, component in enumerate(("transformer", "transformer_2")):
        config = json.loads((folder / component / "config.json").read_text())
        wide = config | {"num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 512, "num_layers": 1}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            WanTransformer3DModel.from_config(wide).save_pretrained(folder / component)
    return folder


def _tiny_model(tmp_path_factory: pytest.TempPathFactory, family: str) -> Path:
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / "tiny.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "tiny-svd").exists():
            # In a separate process: most tests of the command line do not need torch. One process writes all models,
            # since it spends most of its time importing diffusers.
            program = (
                "import gc, sys; gc.disable(); from svdq.cli.main import run; root, *families = sys.argv[1:]; "
                "sys.exit(max(run(['model', 'tiny', '--family', each, f'{root}/tiny-{each}']) for each in families))"
            )
            command = [sys.executable, "-c", program, str(root), "wan", "ltx", "svd"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return root / f"tiny-{family}"


@pytest.fixture
def until() -> Callable[..., object]:
    """Wait until something is true and return it."""
    return wait_until


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A small photograph-like JPEG."""
    path = tmp_path / "a photo.jpg"
    Image.effect_noise((320, 200), 60).convert("RGB").save(path, quality=90)
    return path


@pytest.fixture
def svdq_process(home: Path) -> Cli:
    """Run `svdq` in a process of its own."""

    def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        if forks.can_fork(environment):
            return forks.run(*map(str, arguments), **environment)
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", "from svdq.cli.main import main; main()", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, **environment},
        )

    return run


@pytest.fixture
def svdq(svdq_process: Cli) -> Cli:
    """Run `svdq` here, as its console script does; in a process of its own where it needs one."""
    from svdq.cli.main import run as run_here

    def run(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
        words = [str(argument) for argument in arguments]
        if environment or not words or words[0] in OF_THEIR_OWN:
            return svdq_process(*words, **environment)
        with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
            try:
                code = run_here(words)
            except SystemExit as error:
                code = error.code
        return subprocess.CompletedProcess(words, code, stdout.getvalue(), stderr.getvalue())

    return run
