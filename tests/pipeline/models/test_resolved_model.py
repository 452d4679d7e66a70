"""A model is looked up and checked once; ranks get what was found as JSON."""

import json
import shutil
from pathlib import Path

import pytest

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import family_named
from svdq.pipeline.models.model_names import resolve
from svdq.pipeline.models.resolved_model import ResolvedModel


def copied(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    return folder


def test_what_was_found_arrives_unchanged(tiny_model: Path, tiny_wan: Path, tmp_path: Path) -> None:
    folder = copied(tiny_wan, tmp_path / "model")
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


def test_components_that_are_loaded_in_float32_need_full_weights(tiny_wan: Path, tmp_path: Path) -> None:
    """Half precision ones of the VAE do not do, although the ranks are on GPUs."""
    folder = copied(tiny_wan, tmp_path / "model")
    weights = folder / "vae/diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".fp16.safetensors"))
    with pytest.raises(InputError, match=r"The vae of the model .* has half precision weights only"):
        resolve(str(folder), on_gpus=True)
