"""The untrained models: small, the same bytes every time, and with the real classes and settings."""

import hashlib
import json

import pytest
import torch
from click.testing import CliRunner

from svdq.cli.main import cli
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.svd.tiny import SVD_SCHEDULER, write_tiny_model
from svdq.pipeline.models.wan.tiny import VARIANTS, write_tiny_wan
from svdq.pipeline.models.weights.model_folder import UNTRAINED, is_untrained
from tests.full_disk import files_of_at_most


def digests(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def config(folder, component):
    return json.loads((folder / component / "config.json").read_text())


def classes(folder):
    index = json.loads((folder / "model_index.json").read_text())
    return {name: each[1] for name, each in index.items() if isinstance(each, list) and each[1]}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_small_without_pickles_and_the_same_bytes_every_time(tmp_path, variant):
    def write():
        write_tiny_model(tmp_path) if variant is None else write_tiny_wan(tmp_path, variant)

    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    write()
    assert torch.equal(torch.random.get_rng_state(), state)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < (15_000_000 if variant is None else 1_000_000)
    assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}
    first = digests(tmp_path)
    write()
    assert digests(tmp_path) == first


def test_the_classes_and_settings_of_svd(tiny_model):
    assert classes(tiny_model) == {
        "feature_extractor": "CLIPImageProcessor",
        "image_encoder": "CLIPVisionModelWithProjection",
        "scheduler": "EulerDiscreteScheduler",
        "unet": "UNetSpatioTemporalConditionModel",
        "vae": "AutoencoderKLTemporalDecoder",
    }
    scheduler = json.loads((tiny_model / "scheduler" / "scheduler_config.json").read_text())
    assert {name: scheduler[name] for name in SVD_SCHEDULER} == SVD_SCHEDULER
    assert config(tiny_model, "unet")["num_frames"] == 14
    assert len(config(tiny_model, "vae")["block_out_channels"]) == 4
    assert config(tiny_model, "image_encoder")["image_size"] == 224


def test_the_classes_and_sizes_of_wan(tiny_wan, tmp_path):
    assert classes(tiny_wan) == {
        "scheduler": "UniPCMultistepScheduler",
        "text_encoder": "UMT5EncoderModel",
        "tokenizer": "T5TokenizerFast",
        "transformer": "WanTransformer3DModel",
        "transformer_2": "WanTransformer3DModel",
        "vae": "AutoencoderKLWan",
    }
    write_tiny_wan(tmp_path, "ti2v-5b")
    for folder, channels, (inputs, outputs), compression in ((tiny_wan, 16, (36, 16), 8), (tmp_path, 48, (48, 48), 16)):
        vae, transformer = config(folder, "vae"), config(folder, "transformer")
        assert (vae["z_dim"], vae["scale_factor_temporal"], vae["scale_factor_spatial"]) == (channels, 4, compression)
        assert (transformer["in_channels"], transformer["out_channels"]) == (inputs, outputs)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "WanPipeline"


def test_the_tokenizer_reads_printable_characters_and_marks_others(tiny_wan):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_wan / "tokenizer")
    words = tokenizer("A dog!").input_ids
    assert len(words) == 1 + 1 + 1 + 4 + 1, "a mark for each word, its characters, and the end"
    assert tokenizer.decode(words, skip_special_tokens=True) == "A dog!"
    assert tokenizer.unk_token_id in tokenizer("犬").input_ids
    assert tokenizer("", padding="max_length", max_length=4).input_ids == [1, 0, 0, 0]


@pytest.mark.parametrize("write", [write_tiny_model, write_tiny_wan])
def test_only_its_own_folder_is_written_again(tmp_path, write):
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(InputError, match="not empty"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]
    with pytest.raises(InputError, match="cannot be written"):
        write(tmp_path / "holiday.jpg")


@pytest.mark.slow
def test_a_full_disk_is_one_sentence(tmp_path):
    with files_of_at_most(1_000_000), pytest.raises(InputError, match=r"^The model cannot be written to .*File too"):
        write_tiny_model(tmp_path / "tiny")
    write_tiny_model(tmp_path / "tiny")  # over what is there
    assert is_untrained(tmp_path / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "title"), [("svd", "Stable Video Diffusion"), ("wan", "Wan")])
def test_command(tmp_path, family, title):
    folder = tmp_path / "new" / "tiny"
    result = CliRunner().invoke(cli, ["model", "tiny", "--family", family, str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"{folder}: tiny (untrained: shows noise)" in result.output
    assert is_untrained(folder)
    assert f"classes and settings of {title}" in (folder / UNTRAINED).read_text()
