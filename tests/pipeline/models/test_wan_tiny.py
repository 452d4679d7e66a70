"""The untrained Wan models: small, the same bytes every time, and with the real classes and sizes."""

import hashlib
import json

import pytest
import torch
from click.testing import CliRunner

from svdq.cli.main import cli
from svdq.pipeline.errors import InputError
from svdq.pipeline.models.model_folder import UNTRAINED, is_untrained
from svdq.pipeline.models.tiny import VARIANTS, write_tiny_wan
from tests.full_disk import files_of_at_most


def digests(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def config(folder, component):
    return json.loads((folder / component / "config.json").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_small_without_pickles_and_the_same_bytes_every_time(tmp_path, variant):
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    write_tiny_wan(tmp_path, variant)
    assert torch.equal(torch.random.get_rng_state(), state)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_000_000
    assert {path.suffix for path in files} == {".json", ".safetensors", ".md"}
    first = digests(tmp_path)
    write_tiny_wan(tmp_path, variant)
    assert digests(tmp_path) == first


def test_the_classes_and_sizes_of_wan(tiny_wan, tmp_path):
    index = json.loads((tiny_wan / "model_index.json").read_text())
    assert (index["_class_name"], index["boundary_ratio"]) == ("WanImageToVideoPipeline", 0.9)
    assert {name: each[1] for name, each in index.items() if isinstance(each, list) and each[1]} == {
        "scheduler": "UniPCMultistepScheduler",
        "text_encoder": "UMT5EncoderModel",
        "tokenizer": "T5TokenizerFast",
        "transformer": "WanTransformer3DModel",
        "transformer_2": "WanTransformer3DModel",
        "vae": "AutoencoderKLWan",
    }
    vae, transformer = config(tiny_wan, "vae"), config(tiny_wan, "transformer")
    assert (vae["z_dim"], vae["scale_factor_temporal"], vae["scale_factor_spatial"]) == (16, 4, 8)
    assert (transformer["in_channels"], transformer["out_channels"], transformer["patch_size"]) == (36, 16, [1, 2, 2])
    write_tiny_wan(tmp_path, "ti2v-5b")
    vae, transformer = config(tmp_path, "vae"), config(tmp_path, "transformer")
    assert (vae["z_dim"], vae["scale_factor_temporal"], vae["scale_factor_spatial"]) == (48, 4, 16)
    assert (transformer["in_channels"], transformer["out_channels"]) == (48, 48)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "WanPipeline"


def test_the_tokenizer_reads_printable_characters_and_marks_others(tiny_wan):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_wan / "tokenizer")
    words = tokenizer("A dog!").input_ids
    assert len(words) == 1 + 1 + 1 + 4 + 1, "a mark for each word, its characters, and the end"
    assert tokenizer.decode(words, skip_special_tokens=True) == "A dog!"
    assert tokenizer.unk_token_id in tokenizer("犬").input_ids
    assert tokenizer("", padding="max_length", max_length=4).input_ids == [1, 0, 0, 0]


def test_only_its_own_folder_is_written_again(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"precious")
    with pytest.raises(InputError, match="not empty"):
        write_tiny_wan(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


def test_a_full_disk_is_one_sentence(tmp_path):
    with files_of_at_most(10_000), pytest.raises(InputError, match=r"^The model cannot be written to .*too large"):
        write_tiny_wan(tmp_path / "tiny")


def test_command(tmp_path):
    folder = tmp_path / "new" / "tiny"
    result = CliRunner().invoke(cli, ["model", "tiny", "--family", "wan", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "untrained: shows noise" in result.output
    assert is_untrained(folder)
    assert "classes and settings of Wan" in (folder / UNTRAINED).read_text()
