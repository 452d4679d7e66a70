"""`svdq doctor` on healthy and broken servers, storages and model folders."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from svdq.producer.doctor_model import check_model

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


def findings(done: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, str]]:
    """What was found, by subject."""
    assert done.stderr == ""
    return {finding["subject"]: finding for finding in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model."""
    from svdq.pipeline.models.tiny import write_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it to break."""
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    yield folder
    shutil.rmtree(folder)


def test_a_machine_that_is_fit(svdq: Cli, home: Path, whole: Path) -> None:
    done = svdq("doctor", "--json", "--model", whole)
    found = findings(done)
    assert done.returncode == 0
    assert {"redis", "persistence", "maxmemory-policy", "storage", "free space", "model", "ffmpeg", "versions"} <= set(
        found
    )
    assert [finding for finding in found.values() if finding["level"] == "fail"] == []
    assert "untrained" in found["model"]["text"]
    assert list((home / "storage").glob("*.txt")) == []


def test_quick_looks_at_redis_and_storage_only(svdq: Cli) -> None:
    done = svdq("doctor", "--quick", "--model", "/no/such/model")
    assert done.returncode == 0
    subjects = [line.split()[1] for line in done.stdout.splitlines()]
    assert subjects == ["redis", "persistence", "maxmemory-policy", "storage", "free"]


def test_a_server_that_may_lose_jobs(svdq: Cli, connection: redis.Redis) -> None:
    connection.config_set("appendonly", "no")
    connection.config_set("maxmemory-policy", "allkeys-lru")
    done = svdq("doctor", "--quick", "--json")
    found = findings(done)
    assert done.returncode == 0
    assert found["persistence"]["level"] == found["maxmemory-policy"]["level"] == "warn"

    connection.config_set("maxmemory", "1gb")
    done = svdq("doctor", "--quick", "--json")
    assert done.returncode == 1
    assert findings(done)["maxmemory-policy"]["level"] == "fail"
    assert "noeviction" in findings(done)["maxmemory-policy"]["advice"]


def test_nothing_can_be_reached(svdq: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = svdq(
        "doctor", "--quick", "--json", "--redis-url", "redis://u:hidden@127.0.0.1:1/0", "--storage", tmp_path / "file"
    )
    found = findings(done)
    assert done.returncode == 1
    assert {name: finding["level"] for name, finding in found.items()} == {"redis": "fail", "storage": "fail"}
    assert "hidden" not in done.stdout


def test_a_machine_without_the_worker_extra(home: Path) -> None:
    # As in an environment that has the base install only: neither the modules nor their metadata are there.
    code = (
        "import importlib.metadata, sys\n"
        "gone = ('torch', 'imageio_ffmpeg', 'imageio-ffmpeg', 'numpy', 'safetensors')\n"
        "sys.modules.update(dict.fromkeys(gone))\n"
        "version = importlib.metadata.version\n"
        "def base_only(name):\n"
        "    if name in gone:\n"
        "        raise importlib.metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "importlib.metadata.version = base_only\n"
        "from svdq.cli.main import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "doctor", "--json"], capture_output=True, text=True, timeout=60)
    found = findings(done)
    assert done.returncode == 0
    assert found["worker extra"]["level"] == found["ffmpeg"]["level"] == "warn"
    assert "pip install 'svdq[worker]'" in found["worker extra"]["advice"]
    assert "NCCL" not in found


UNET = "unet/diffusion_pytorch_model.safetensors"


def rewrite_header(file: Path, change: Callable[[str], str]) -> None:
    """Change the text of a safetensors header."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(data[8 : 8 + length].decode()).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def shard(folder: Path) -> None:
    """Have an index name a second shard that is not there."""
    (folder / UNET).rename(folder / "unet/diffusion_pytorch_model-00001-of-00002.safetensors")
    shards = {"a": "diffusion_pytorch_model-00001-of-00002.safetensors"}
    shards["b"] = "diffusion_pytorch_model-00002-of-00002.safetensors"
    index = folder / "unet/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))


def cut(folder: Path) -> None:
    """Lose the end of a file, as a download that was interrupted."""
    with (folder / UNET).open("r+b") as file:
        file.truncate((folder / UNET).stat().st_size - 100)


def text_to_image(folder: Path) -> None:
    """Name another pipeline."""
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("StableVideoDiffusionPipeline", "StableDiffusionPipeline"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (shard, "00002-of-00002.safetensors is missing"),
        (cut, "bytes long where its header says"),
        (lambda folder: (folder / UNET).write_bytes(b"\xff" * 100), "header is corrupt"),
        (lambda folder: (folder / UNET).write_bytes(b"abc"), "header is corrupt"),
        (lambda folder: (folder / UNET).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda folder: (folder / UNET).rename(folder / "unet/weights.bin"), "pickles only"),
        (lambda folder: (folder / UNET).unlink(), "has no weights"),
        (lambda folder: rewrite_header(folder / UNET, lambda text: text.replace('"F32"', '"F8_E4M3"')), "as F8_E4M3"),
        (lambda folder: (folder / "vae/config.json").write_text("{"), "no readable vae/config.json"),
        (lambda folder: shutil.rmtree(folder / "image_encoder"), "has no image_encoder"),
        (text_to_image, "is a StableDiffusionPipeline; svdq needs a StableVideoDiffusionPipeline"),
    ],
)
def test_what_is_wrong_with_a_model(model: Path, damage: Callable[[Path], object], sentence: str) -> None:
    damage(model)
    [finding] = check_model(str(model))
    assert finding.level == "fail"
    assert sentence in f"{finding.text}; {finding.advice}"


def test_half_precision_only(model: Path) -> None:
    (model / UNET).rename(model / "unet/diffusion_pytorch_model.fp16.safetensors")
    assert [finding.level for finding in check_model(str(model))] == ["warn", "ok"]


@pytest.mark.parametrize(
    ("name", "level"),
    [("preview", "ok"), ("simulated:step_ms=5", "ok"), ("no/such/folder", "fail"), ("nobody/nothing-of-ours", "warn")],
)
def test_models_by_name(name: str, level: str) -> None:
    assert [finding.level for finding in check_model(name)] == [level]
