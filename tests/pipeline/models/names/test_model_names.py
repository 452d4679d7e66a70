"""A model is looked up by its name once, without the network; ranks get what was found as JSON."""

import json
import shutil
import socket
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import family_named
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_name import PRESETS
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Role

CPU = torch.device("cpu")


def test_what_was_found_arrives_unchanged(tiny_model: Path, tiny_wan: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_wan, tmp_path / "model")
    scheduler = folder / "scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"lambda_min_clipped": float("-inf")}))
    for name in (str(tiny_model), str(folder), "preview", "simulated:step_ms=2,segments=1+3"):
        found = resolve(name, on_gpus=False)
        arrived = ResolvedModel.model_validate_json(found.model_dump_json())
        assert arrived == found
        assert arrived.name == name
    assert resolve(str(folder)).facts["scheduler"]["lambda_min_clipped"] == float("-inf")


def test_it_has_what_a_rank_needs_to_load_it(tiny_wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_wan.parent)
    found = resolve(tiny_wan.name, on_gpus=False)
    assert (found.name, found.folder) == (tiny_wan.name, tiny_wan), "wherever the rank is started"
    assert found.family is not None
    family = family_named(found.family)
    assert found.layout in family.layouts
    assert found.facts == family.read_facts(tiny_wan, "it")
    assert (found.timings, len(found.fingerprint or "")) == (None, 16)


@pytest.mark.parametrize(
    "name", ["no/such/folder", "/no/such/folder", "~/nowhere", "previw", "", "http://example.org/model"]
)
def test_a_name_that_is_no_model(name):
    with pytest.raises(InputError, match="There is no model folder"):
        open_model(resolve(name), Role(), CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wan2.2_4step", "or a name that `svdq model list` shows"),
        ("models/wan_high_noise.safetensors", "is the name of one weights file; write a model file"),
        ("wan-Q4_K_M.gguf", "is the name of one weights file; write a model file"),
        ("Wan-AI/Wan2.2-I2V-A14B", "has the authors' own files; give Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
        ("Wan-AI/Wan2.2-I2V-A14B@main", "has the authors' own files; give Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
        ("Wan-AI/Wan2.1-FLF2V-14B-720P", "authors' own files; give Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers"),
        ("Lightricks/LTX-2.3", "has the authors' own files; give diffusers/LTX-2.3-Distilled-Diffusers"),
        ("Lightricks/LTX-2.5", "has the authors' own files; give Lightricks/LTX-2.5-Diffusers"),
        ("someone/LTX-2.3", "The model someone/LTX-2.3 is not on this machine"),
        (
            PRESETS["wan2.2-4step-bf16"],
            "file 'wan2.2-4step-bf16' needs some of it; .* `svdq model pull wan2.2-4step-bf16`",
        ),
    ],
)
def test_a_name_that_is_nearly_a_model(hub_cache, name, says):
    with pytest.raises(InputError, match=says):
        resolve(name)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the hub; the network is refused."""

    def refuse(*_):
        raise AssertionError("opening a model must not cause network traffic")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_hub_id_that_is_not_here_is_not_fetched(hub_cache):
    with pytest.raises(InputError, match=r"^The model someone/some-model is not on this machine; fetch it with `svdq"):
        open_model(resolve("someone/some-model"), Role(), CPU, torch.float16)


def test_a_cached_hub_id_is_opened_with_half_precision_weights_for_float16(tiny_model, hub_cache):
    place = hub_cache / "models--someone--some-model"
    folder = shutil.copytree(tiny_model, place / "snapshots" / ("5" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("5" * 40)
    full = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = {name: tensor.half() for name, tensor in load_file(full).items()}
    weights["conv_out.bias"] = torch.full((4,), 7.0, dtype=torch.float16)
    save_file(weights, full.with_suffix(".fp16.safetensors"))
    for dtype, is_half in ((torch.float16, True), (torch.float32, False), (torch.bfloat16, False)):
        model = open_model(resolve("someone/some-model"), Role(), CPU, dtype)
        assert model.info.name == "someone/some-model"
        assert model.pipeline.unet.dtype == dtype
        assert bool((model.pipeline.unet.conv_out.bias == 7).all()) == is_half
    assert resolve(f"someone/some-model@{'5' * 40}").facts["num_frames"] == 14
