"""`svdq setup`: what it asks, writes and leaves as it is; tests/test_recipes.py has it render a first video."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from svdq.cli.main import run
from svdq.producer.settings_loader import load_settings
from svdq.worker.launcher.gpus import all_gpus
from tests.conftest import Cli
from tests.hub import know, running
from tests.terminal import terminal

Setup = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bin_folder(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder on the PATH, in the home of a new user whose caches are empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for name in ("XDG_VIDEOS_DIR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("svdq.cli.units.BOOTED", tmp_path / "no systemd")
    know(monkeypatch, tmp_path / "hub")
    all_gpus.cache_clear()
    yield folder
    all_gpus.cache_clear()


@pytest.fixture
def setup(bin_folder: Path, svdq: Cli, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Setup:
    """Run `svdq setup --yes` where a job waits already, so that it renders none: exit code, stdout and stderr."""
    assert svdq("submit", photo, "--storage", tmp_path / "elsewhere").returncode == 0

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["setup", "--yes", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def put(program: Path, *lines: str) -> None:
    """Write a program of the shell."""
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o755)


@pytest.fixture
def gpu(bin_folder: Path) -> None:
    """A GPU of 24 GB, as nvidia-smi shows it."""
    put(
        bin_folder / "nvidia-smi",
        "test \"$1\" = -L && echo 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-a)' ||",
        "echo '0, NVIDIA GeForce RTX 4090, 24564, 24000'",
    )


def test_without_a_terminal_it_asks_nothing_unless_told_to_take_the_defaults(svdq: Cli, home: Path) -> None:
    done = svdq("setup")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "there is no terminal; --yes takes the defaults" in done.stderr
    assert not home.exists()


@pytest.mark.usefixtures("gpu")
def test_the_best_preset_is_the_default_and_nothing_is_written_before_it_is_here(setup: Setup, home: Path) -> None:
    code, shown, error = setup()
    assert re.search(
        r"^wan2.2-4step: 832x480, 81 frames, 4 steps; 3\d\.\d GB to fetch, (only )?[\d.]+ GB free.*; "
        r"300 videos take \d h \d+ min by published times\.$",
        shown,
        re.MULTILINE,
    )
    assert (code, "Next:" in shown) == (3, False)  # the hub cannot be reached
    again = r"^To go on from here: svdq setup --model wan2\.2-4step --storage /\S+ --no-night --yes$"
    assert re.search(again, error, re.MULTILINE)
    assert not (home / "svdq.toml").exists()


@pytest.mark.usefixtures("gpu")
def test_a_fetch_that_breaks_off_goes_on(
    setup: Setup, home: Path, tiny_wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(exist_ok=True)
    (home / "svdq.toml").write_text("# mine\nmax_pixels = 5_000_000\nmodel = 'preview' # for now\n")
    weights = "vae/diffusion_pytorch_model.safetensors"
    with running("stand-in/wan", tiny_wan) as hub:
        know(monkeypatch, tmp_path / "hub", hub.url)
        hub.breaks, hub.after_break = {weights: 1}, 403
        code, shown, error = setup("--model", "stand-in/wan")
        assert code == 2, error  # as of a token that has run out
        assert "To go on from here: svdq setup --model stand-in/wan " in error
        assert "model = 'preview'" in (home / "svdq.toml").read_text()
        hub.breaks, hub.after_break = {}, None
        before = [*hub.given]
        code, shown, _ = setup("--model", "stand-in/wan")
    assert code == 0
    assert weights in hub.given[len(before) :]
    assert not set(hub.given[len(before) :]) & set(before) - {weights, "model_index.json"}
    videos = tmp_path / "user" / "Videos" / "svdq"
    assert (home / "svdq.toml").read_text().splitlines() == [
        "# mine",
        "max_pixels = 5_000_000",
        'model = "stand-in/wan"',
        f'storage = "{videos}"',
    ]
    assert re.search(rf"^model in {home}/svdq.toml +it was preview$", shown, re.MULTILINE)
    assert "The example waits with 1 other job" in shown
    assert shown.endswith("Next:\n  svdq submit photos/ --recursive\n  svdq worker --burst\n")
    code, shown, _ = setup()
    assert (code, "Nothing was changed." in shown) == (0, True)


@pytest.mark.usefixtures("gpu")
def test_options_of_the_worker_that_the_model_needs_are_written(setup: Setup, home: Path, tiny_wan: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "svdq.toml").write_text("worker_options = '--offload blocks'\n")
    assert setup("--model", tiny_wan)[0] == 0
    assert load_settings().worker_options == "--experts resident"
    assert load_settings().model == str(tiny_wan)
    (home / "svdq.toml").write_text(f"worker_options = '--experts rounds'\nmodel = '{tiny_wan}'\n")
    assert setup()[0] == 0
    assert load_settings().worker_options == "--experts rounds", "a person's own"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--model", "no such model"), "'no such model' is not a hub id"),
        (("--model", "missing.toml"), "missing.toml"),
        (("--model", "preview", "--storage", "s3://key:hidden@bucket/x"), "A password does not go into svdq.toml"),
        (("--model", "preview", "--storage", "/dev/null/videos"), "There can be no folder '/dev/null/videos'"),
        (("--model", "preview", "--night"), "--night needs systemd"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(
    setup: Setup, home: Path, arguments: tuple[str, ...], reason: str
) -> None:
    code, shown, error = setup(*arguments)
    assert (code, error.count("\n")) == (2, 1), error
    assert reason in error
    assert "hidden" not in shown + error
    assert not (home / "svdq.toml").exists()


def test_a_model_that_does_not_fit_is_refused(setup: Setup, bin_folder: Path) -> None:
    lines = "test \"$1\" = -L && echo 'GPU 0: GTX 1050 (UUID: GPU-a)' || echo '0, GTX 1050, 4096, 4000'"
    put(bin_folder / "nvidia-smi", lines)
    code, _, error = setup("--model", "wan2.2-4step")
    assert (code, error.count("\n")) == (2, 1), error
    assert "does not fit 1 GPU of 4 GiB; `svdq plan --model wan2.2-4step` says what would" in error


def test_a_variable_comes_before_the_file(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SVDQ_MODEL", "simulated")
    code, _, error = setup("--model", "preview")
    assert (code, error.count("\n")) == (2, 1)
    assert "SVDQ_MODEL sets the model, and comes before svdq.toml" in error


@pytest.mark.usefixtures("own_server")
def test_the_night_is_a_timer_of_systemd(
    setup: Setup, bin_folder: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svdq.cli.units.BOOTED", tmp_path)
    for name in ("systemctl", "loginctl"):
        put(bin_folder / name, f'echo {name} "$@" >> {tmp_path}/calls')
    code, shown, error = setup("--night", "--storage", tmp_path / "videos")
    assert (code, error) == (0, ""), error
    units = tmp_path / "config/systemd/user"
    assert re.search(rf"^units in {units} +svdq deploy systemd --user --remove$", shown, re.MULTILINE)
    assert f"RequiresMountsFor={home} {tmp_path}/videos\n" in (units / "svdq-.service.d/local.conf").read_text()
    assert (tmp_path / "calls").read_text().splitlines() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now svdq-redis.service svdq-night.timer",
        "loginctl enable-linger",
    ]
    (tmp_path / "config/svdq/systemd.env").write_text("# mine\n")
    code, shown, _ = setup()
    assert (code, "Nothing was changed." in shown) == (0, True)
    assert (tmp_path / "config/svdq/systemd.env").read_text() == "# mine\n"


def test_what_was_changed_is_said_also_where_it_ends_early(
    setup: Setup, bin_folder: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svdq.cli.units.BOOTED", tmp_path)
    put(bin_folder / "systemctl", "echo Failed to connect to bus >&2", "exit 1")
    code, _, error = setup("--night", "--storage", tmp_path / "videos")
    assert code == 2
    assert re.search(rf"^storage in {home}/svdq.toml +remove the line$", error, re.MULTILINE)
    assert re.search(r"^To go on from here: .* --night --yes$", error, re.MULTILINE)
    assert "(Failed to connect to bus)" in error


@pytest.mark.slow
def test_a_wrong_answer_is_asked_again(bin_folder: Path, svdq: Cli, photo: Path, tmp_path: Path) -> None:
    svdq("submit", photo, "--storage", tmp_path / "elsewhere")
    with terminal("setup", HOME=str(tmp_path / "user"), size=(24, 500)) as screen:
        screen.read_until("[preview]: ")
        os.write(screen.ours, b"no such model\n")
        screen.read_until("is not a hub id")
        screen.read_until("[preview]: ")
        os.write(screen.ours, b"\n")
        screen.read_until(f"[{tmp_path}/user/Videos/svdq]: ")
        os.write(screen.ours, b"/dev/null/videos\n")
        screen.read_until("There can be no folder '/dev/null/videos'")
        os.write(screen.ours, b"videos\n")
        if Path("/run/systemd/system").is_dir():
            screen.read_until("[y/N]: ")
            os.write(screen.ours, b"\n")
        assert screen.end() == 0, screen.text
    assert load_settings().storage == str(Path("videos").absolute())
