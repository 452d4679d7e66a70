import hashlib
import json

import pytest
import torch
from click.testing import CliRunner

from svdq.cli.main import cli
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_folder import UNTRAINED, is_untrained
from svdq.pipeline.models.tiny import SVD_SCHEDULER, write_tiny_model
from tests.full_disk import files_of_at_most


def digests(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_same_bytes_every_time(tiny_model, tmp_path):
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    write_tiny_model(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    first = digests(tmp_path)
    write_tiny_model(tmp_path)
    assert digests(tmp_path) == first == digests(tiny_model)


def test_small_and_without_pickles(tiny_model):
    files = [path for path in tiny_model.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 15_000_000
    assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}


def test_the_classes_and_settings_of_svd(tiny_model):
    index = json.loads((tiny_model / "model_index.json").read_text())
    assert index["_class_name"] == "StableVideoDiffusionPipeline"
    assert {name: value[1] for name, value in index.items() if not name.startswith("_")} == {
        "feature_extractor": "CLIPImageProcessor",
        "image_encoder": "CLIPVisionModelWithProjection",
        "scheduler": "EulerDiscreteScheduler",
        "unet": "UNetSpatioTemporalConditionModel",
        "vae": "AutoencoderKLTemporalDecoder",
    }
    scheduler = json.loads((tiny_model / "scheduler" / "scheduler_config.json").read_text())
    assert {name: scheduler[name] for name in SVD_SCHEDULER} == SVD_SCHEDULER
    unet = json.loads((tiny_model / "unet" / "config.json").read_text())
    assert (unet["block_out_channels"], unet["num_frames"]) == ([32, 64], 14)
    assert len(json.loads((tiny_model / "vae" / "config.json").read_text())["block_out_channels"]) == 4
    assert json.loads((tiny_model / "image_encoder" / "config.json").read_text())["image_size"] == 224


def test_only_its_own_folder_is_written_again(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(InputError, match="not empty"):
        write_tiny_model(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]
    with pytest.raises(InputError, match="cannot be written"):
        write_tiny_model(tmp_path / "holiday.jpg" / "below")
    with pytest.raises(InputError, match="cannot be written"):
        write_tiny_model(tmp_path / "holiday.jpg")


def test_a_full_disk_is_one_sentence(tmp_path):
    with files_of_at_most(1_000_000), pytest.raises(InputError, match=r"^The model cannot be written to .*File too"):
        write_tiny_model(tmp_path / "tiny")
    write_tiny_model(tmp_path / "tiny")  # over what is there
    assert is_untrained(tmp_path / "tiny")


def test_command(tmp_path):
    folder = tmp_path / "new" / "tiny"
    result = CliRunner().invoke(cli, ["model", "tiny", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    assert str(folder) in result.output
    assert "untrained: shows noise" in result.output
    assert is_untrained(folder)
    assert "noise" in (folder / UNTRAINED).read_text()
