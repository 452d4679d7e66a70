"""`svdq doctor` on healthy and broken servers, storages and model folders."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import torch
from safetensors.torch import save_file

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.names.model_names import resolve
from svdq.producer.connection import server_url
from svdq.producer.settings import Settings
from svdq.worker.doctor import Finding, check_model, check_upscaler, limited
from tests.conftest import Cli
from tests.hub import know
from tests.loading_redis import loading_redis
from tests.pipeline.models.wan_files import write_model_file
from tests.proxy import Proxy
from tests.upscaling import torchvision, write_upscaler
from tests.waiting import PATIENCE_S


def findings(done: "subprocess.CompletedProcess[str]") -> dict[str, dict[str, str]]:
    """The findings by subject."""
    assert done.stderr == ""
    return {finding["subject"]: finding for finding in map(json.loads, done.stdout.splitlines())}


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it to break."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    yield folder
    shutil.rmtree(folder)


def test_nothing_is_wrong(svdq: Cli, home: Path, tiny_model: Path) -> None:
    done = svdq("doctor", "--json", "--model", tiny_model)
    found = findings(done)
    assert done.returncode == 0
    assert {"redis", "persistence", "maxmemory-policy", "storage", "free space", "model", "ffmpeg", "versions"} <= set(
        found
    )
    assert [finding for finding in found.values() if finding["level"] == "fail"] == []
    assert "untrained" in found["model"]["text"]
    assert list((home / "storage").glob("*.txt")) == []


def test_a_trained_model_says_what_the_default_video_needs_of_a_gpu(model: Path) -> None:
    """By the constants that a worker plans with: 8.3 GB of a step, 1 GB that libraries work in, and the weights."""
    (model / "UNTRAINED.md").unlink()
    config = model / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_frames": 25}))
    found = {finding.subject: finding for finding in check_model(str(model))}
    weights = sum(file.stat().st_size for file in model.glob("*/*.safetensors")) / 2  # kept in float32
    said = re.fullmatch(
        r"1024x576 with 25 frames needs at most about (\d+\.\d) GB of a GPU in float16", found["memory"].text
    )
    assert said is not None
    assert float(said[1]) == pytest.approx(8.32 + 1 + weights / 1e9, abs=0.06)


def test_a_model_with_experts_says_what_a_rank_with_one_of_them_needs(tiny_wan: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_wan, tmp_path / "wan")
    (folder / "UNTRAINED.md").unlink()
    found = {finding.subject: finding for finding in check_model(str(folder))}
    assert found["model"].level == found["memory"].level == "ok"
    said = re.fullmatch(
        r"832x480 with 81 frames needs at most about [\d.]+ GB of a GPU in bfloat16, [\d.]+ GB on a rank with "
        r"one of the two experts, or [\d.]+ GB on a rank that works in rounds",
        found["memory"].text,
    )
    assert said is not None, found["memory"].text


def test_a_published_model_that_is_not_here_says_what_it_needs_of_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, tmp_path / "hub")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, NVIDIA GeForce RTX 4090, 24564, 24000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    missing, fetch, files, *ways, times = check_model("Wan-AI/Wan2.2-I2V-A14B-Diffusers")
    assert missing.level == "fail"
    assert fetch.text.startswith("126.2 GB to fetch")
    assert files.text.startswith("of the transformer, take int8 (int8 is 1.76 times as fast")
    fitting = [way.text for way in ways if "fits the 24.5 GB of 1 GPU of 24 GiB, 300 videos in 109 h" in way.text]
    assert [text.partition(":")[0] for text in fitting] == [
        "`svdq worker --experts rounds --approximate int8`",
        "`svdq worker --experts rounds --offload blocks`",
    ]
    assert "too much for 1 GPU of 24 GiB" in ways[0].text
    assert "30.5 s" in times.text
    # Two experts of 14.3 billion weights, the text encoder and the VAE.
    assert times.text.endswith("not measured here; a worker reads 69.0 GB for its first video")


@pytest.mark.parametrize(
    ("capability", "weights", "says"),
    [
        ("8.9", "auto", "layers multiply in fp8, as the files store them"),
        ("8.6", "auto", "weights in fp8 are made in the type computed in"),
        ("8.9", "made", "weights in fp8 are made in the type computed in"),
    ],
)
def test_a_model_in_fp8_says_whether_layers_multiply_in_it(
    tiny_wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: str, weights: str, says: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '0, {capability}'; echo '1, 12.0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    model = write_model_file(tmp_path, tiny_wan, "fp8.safetensors", lora=False)
    found = {finding.subject: finding for finding in check_model(str(model), weights)}
    assert (found["weights"].level, found["weights"].text) == ("ok", says)


def test_quick_looks_at_redis_and_storage_only(svdq: Cli) -> None:
    done = svdq("doctor", "--quick", "--model", "/no/such/model")
    assert done.returncode == 0
    subjects = [line.split()[1] for line in done.stdout.splitlines()]
    assert subjects == ["redis", "persistence", "maxmemory-policy", "storage", "free"]


@pytest.mark.usefixtures("own_server")
def test_a_server_that_may_lose_jobs_is_warned_of(svdq: Cli, connection: redis.Redis) -> None:
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


def test_a_server_and_a_storage_that_cannot_be_reached_fail(svdq: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = svdq(
        "doctor", "--quick", "--json", "--redis-url", "redis://u:hidden@127.0.0.1:1/0", "--storage", tmp_path / "file"
    )
    found = findings(done)
    assert done.returncode == 1
    assert {name: finding["level"] for name, finding in found.items()} == {"redis": "fail", "storage": "fail"}
    assert "hidden" not in done.stdout


@pytest.mark.parametrize(("ffmpeg", "level"), [(None, "warn"), ("PATH", "ok"), ("IMAGEIO_FFMPEG_EXE", "ok")])
def test_the_base_install_is_warned_that_it_cannot_render(
    home: Path, tmp_path: Path, ffmpeg: str | None, level: str
) -> None:
    program = tmp_path / "programs" / "ffmpeg"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho ffmpeg version 7.1")
    program.chmod(0o700)
    paths = {"PATH": str(program.parent), "IMAGEIO_FFMPEG_EXE": str(program)}
    environment = {**os.environ, "PATH": str(tmp_path), **({ffmpeg: paths[ffmpeg]} if ffmpeg else {})}
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
    command = [sys.executable, "-c", code, "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)
    found = findings(done)
    assert done.returncode == 0
    assert (found["worker extra"]["level"], found["ffmpeg"]["level"]) == ("warn", level)
    assert "pip install '.[worker]'" in found["worker extra"]["advice"]


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
        (shard, "is missing; get it again"),
        (cut, "is cut off or no safetensors file"),
        (lambda folder: (folder / UNET).write_bytes(b"\xff" * 100), "is cut off or no safetensors file"),
        (lambda folder: (folder / UNET).write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda folder: (folder / UNET).rename(folder / "unet/weights.bin"), "has no weights but weights.bin"),
        (lambda folder: (folder / UNET).unlink(), "has no weights"),
        (lambda folder: rewrite_header(folder / UNET, lambda text: text.replace('"F32"', '"I32"')), "as I32"),
        (lambda folder: shutil.rmtree(folder / "image_encoder"), "has no image_encoder"),
        (text_to_image, "is a StableDiffusionPipeline; svdq needs a StableVideoDiffusionPipeline"),
    ],
)
def test_a_damaged_model_fails_with_the_sentence_of_the_worker(
    model: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(model)
    [finding] = check_model(str(model))
    assert finding.level == "fail"
    assert sentence in f"{finding.text}; {finding.advice}"
    assert str(model) in finding.text
    # The worker says the same, before any rank starts.
    with pytest.raises(InputError, match=re.escape(sentence)) as caught:
        resolve(str(model))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_files_of_a_model_file_are_checked_as_by_model_check(model: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(f'base = "{model}"\n[weights]\nunet = "unet.safetensors"\n')
    shutil.copy(model / UNET, tmp_path / "unet.safetensors")
    finding = next(check_model(str(mine)))
    assert (finding.level, finding.text) == ("ok", f"mine, from {model}; its files belong together")
    shutil.copy(model / "vae" / Path(UNET).name, tmp_path / "unet.safetensors")
    finding = next(check_model(str(mine)))
    assert (finding.level, "has no weight of the unet of the model mine by a name that svdq knows" in finding.text) == (
        "fail",
        True,
    )


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (lambda folder: shutil.rmtree(folder / "unet"), "has no unet"),
        (lambda folder: (folder / "unet/config.json").unlink(), "has no readable unet/config.json"),
        (lambda folder: (folder / UNET).unlink(), "has no weights"),
    ],
)
def test_a_model_of_the_hub_that_is_not_complete_is_to_be_pulled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], object], words: str
) -> None:
    """diffusers, when interrupted, leaves the index and some of the rest in the hub's cache."""
    know(monkeypatch, tmp_path / "hub")
    place = tmp_path / "hub/models--someone--some-model"
    folder = shutil.copytree(model, place / "snapshots" / ("5" * 40))
    (place / "refs").mkdir()
    (place / "refs/main").write_text("5" * 40)
    lose(folder)
    sentence = rf"{words}.*; fetch it again with `svdq model pull someone/some-model`"
    [finding] = check_model("someone/some-model")
    assert re.search(sentence, finding.text)
    with pytest.raises(InputError, match=sentence):
        resolve("someone/some-model")


def test_doctor_and_worker_end_with_a_sentence(svdq: Cli, model: Path) -> None:
    cut(model)
    done = svdq("doctor", "--model", model)
    assert done.returncode == 1
    assert f"{model / UNET} of the model {model} is" in done.stdout
    done = svdq("worker", "--model", model, "--ranks", "1")
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: {model / UNET} of the model {model} is")
    assert done.stderr.count("\n") == 1


def test_half_precision_only(model: Path) -> None:
    (model / UNET).rename(model / "unet/diffusion_pytorch_model.fp16.safetensors")
    assert [finding.level for finding in check_model(str(model))] == ["warn", "ok"]
    resolve(str(model), on_gpus=True)
    with pytest.raises(InputError, match=r"^The unet of .* has half precision weights only"):
        resolve(str(model), on_gpus=False)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("preview", "ok"),
        ("simulated:step_ms=5", "ok"),
        ("simulated:foo", "fail"),
        ("no/such/folder", "fail"),
        ("nobody/nothing-of-ours", "fail"),
        ("~nobody-of-that-name/model", "fail"),
        ("m" * 300, "fail"),
    ],
)
def test_models_by_name(name: str, level: str) -> None:
    assert [finding.level for finding in check_model(name)] == [level]


def test_an_upscaler_is_loaded_as_by_a_worker(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(name: str | None) -> list[Finding]:
        return [*check_upscaler(settings.model_copy(update={"upscaler": name}))]

    assert check(None) == []
    with torchvision(tmp_path):
        file = write_upscaler(tmp_path / "tiny.safetensors")
        assert check(str(file)) == [Finding("upscaler", "ok", str(file))]
        save_file({"conv.weight": torch.zeros(3, 3)}, tmp_path / "other.safetensors")
        (other,) = check(str(tmp_path / "other.safetensors"))
        assert (other.level, "is no upscaler that spandrel knows" in other.text) == ("fail", True)
    (none,) = check("none")
    assert (none.level, none.text.startswith("There is no upscaler 'none'")) == ("fail", True)
    monkeypatch.setitem(sys.modules, "spandrel", None)
    (missing,) = check(str(file))
    assert missing.text.startswith("Upscaling needs spandrel; to install it, ")


def test_what_does_not_answer_is_a_failed_check(settings: Settings) -> None:
    never = threading.Event()

    def check(_: Settings) -> Iterator[Finding]:
        never.wait(60)
        yield Finding("storage", "ok", "it answers after all")

    (finding,) = limited(0.1, check, settings)
    assert (finding.subject, finding.level) == ("storage", "fail")
    assert "no answer in 0.1 s" in finding.text
    never.set()
    (finding,) = limited(60, check, settings)
    assert finding.level == "ok"


@pytest.mark.slow
def test_a_server_that_loads_its_data_is_waited_for(svdq: Cli, tmp_path: Path, caplog) -> None:
    with loading_redis(tmp_path / "redis.sock", 30) as pings:  # longer than a health check waits for the storage
        done = svdq("doctor", "--quick", "--json", "--redis-url", f"unix://{tmp_path}/redis.sock")
    assert len(pings) == 31
    assert findings(done)["redis"]["level"] == "ok"
    assert caplog.messages == ["Redis loads its data; waiting for it."]


@pytest.mark.slow
def test_a_server_that_accepts_and_does_not_answer_fails(svdq: Cli, settings: Settings) -> None:
    with Proxy(server_url(settings)) as proxy:
        proxy.silent.set()
        done = svdq("doctor", "--quick", "--json", "--redis-url", proxy.url)
        proxy.shutdown()
    assert done.returncode == 1
    assert {name: each["level"] for name, each in findings(done).items() if name != "free space"} == {
        "redis": "fail",
        "storage": "ok",
    }
