"""`svdq config`: values, where they come from, and no secrets."""

import json
from pathlib import Path

import pytest

from svdq.producer.settings import Settings
from tests.conftest import Cli


def test_values_and_sources(svdq: Cli, home: Path) -> None:
    home.mkdir()
    (home / "svdq.toml").write_text(
        "max_attempts = 5\nstall_s = 60\nmodel = 'simulated'\nworker_options = '--ranks 2'\n"
    )
    Path("svdq.toml").write_text('stall_s = 90\nframes = 14\nstorage = "videos"\n')
    done = svdq(
        "config",
        "--json",
        *("--model", "preview"),
        SVDQ_OWNER="studio",
        SVDQ_MAX_PIXELS="1000",
        SVDQ_REDIS_URL="redis://me:hidden@h:1/0",
        SVDQ_NOTIFY="json://me:hidden@h/x ntfy://topic",
        SVDQ_WEBHOOK_URL="https://example.com/hidden",
        SVDQ_WEBHOOK_SECRET=f"whsec_{'hidden00' * 5}",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert list(found) == list(Settings.model_fields)
    assert found == {
        "home": {"value": str(home), "source": "SVDQ_HOME"},
        "redis_url": {"value": "redis://h:1", "source": "SVDQ_REDIS_URL"},
        "storage": {"value": str(Path("videos").absolute()), "source": str(Path("svdq.toml").absolute())},
        "model": {"value": "preview", "source": "flag"},
        "owner": {"value": "studio", "source": "SVDQ_OWNER"},
        "fair": {"value": True, "source": "default"},
        "wait_for_able": {"value": False, "source": "default"},
        "max_waiting": {"value": None, "source": "default"},
        "max_pixels": {"value": 1000, "source": "SVDQ_MAX_PIXELS"},
        "max_attempts": {"value": 5, "source": str(home / "svdq.toml")},
        "notify": {"value": ["json://***", "ntfy://***"], "source": "SVDQ_NOTIFY"},
        "webhook_url": {"value": "https://***", "source": "SVDQ_WEBHOOK_URL"},
        "webhook_secret": {"value": "***", "source": "SVDQ_WEBHOOK_SECRET"},
        "stall_s": {"value": 90.0, "source": str(Path("svdq.toml").absolute())},
        "memory_limit": {"value": None, "source": "default"},
        "weights": {"value": "auto", "source": "default"},
        "wait_for_gpu": {"value": True, "source": "default"},
        "worker_options": {"value": "--ranks 2", "source": str(home / "svdq.toml")},
        "on_demand": {"value": None, "source": "default"},
        "loras": {"value": None, "source": "default"},
        "output": {"value": "", "source": "default"},
        "upscaler": {"value": None, "source": "default"},
        "keep_latents": {"value": False, "source": "default"},
        "mark": {"value": True, "source": "default"},
        "c2pa_cert": {"value": None, "source": "default"},
        "c2pa_key": {"value": None, "source": "default"},
        "serve_token": {"value": None, "source": "default"},
        "metrics_address": {"value": "127.0.0.1", "source": "default"},
        "trace": {"value": None, "source": "default"},
    }


@pytest.mark.usefixtures("own_server")
def test_a_table_without_secrets(svdq: Cli) -> None:
    done = svdq("config", "--storage", "s3://key:hidden@bucket/x?token=hidden")
    assert done.returncode == 0
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    assert rows[0][0] == "setting"
    assert "hidden" not in done.stdout
    assert "the embedded server" in done.stdout
    assert "None" not in done.stdout


def test_a_variable_with_a_typing_error(svdq: Cli) -> None:
    done = svdq("config", SVDQ_MODLE="simulated")
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert "SVDQ_MODLE is no setting" in done.stderr


def test_a_bad_setting(svdq: Cli) -> None:
    done = svdq("config", SVDQ_STALL_S="never")
    assert (done.returncode, done.stdout) == (2, "")
    assert "SVDQ_STALL_S" in done.stderr
