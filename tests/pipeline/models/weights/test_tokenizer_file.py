"""Tokenizers inside text encoders' files, and models that need nothing of their base but its configs."""

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.model_file import CONFIGS
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import FAMILY, MODELS, WanParameters
from svdq.pipeline.models.weights.components import class_of
from svdq.pipeline.models.weights.formats import empty_component, shapes_of
from svdq.pipeline.models.weights.model_folder import has_tokenizer
from svdq.pipeline.models.weights.tokenizer_file import load_tokenizer, read_sentencepiece

A14B = "Wan-AI/Wan2.2-I2V-A14B-Diffusers"
PIECES = [
    ("<pad>", 0.0),
    ("</s>", 0.0),
    ("<unk>", 0.0),
    ("\u2581", -2.0),
    ("\u2581cat", -3.0),
    ("c", -8.0),
    ("s", -8.0),
]


def field(number: int, content: bytes) -> bytes:
    """A field of bytes of Protocol Buffers."""
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def sentencepiece(pieces: list[tuple[str, float]], *, byte_fallback: bool = False) -> bytes:
    """A ModelProto of SentencePiece without normalization, the third piece of which is for unknown text."""
    model = b""
    for place, (piece, score) in enumerate(pieces):
        kind = {0: 3, 1: 3, 2: 2}.get(place, 1)
        message = field(1, piece.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score)
        model += field(1, message + bytes([3 << 3]) + varint(kind))
    return model + field(2, varint(35 << 3) + varint(int(byte_fallback)))


def write(path: Path, pieces: list[tuple[str, float]], weights: Mapping[str, Any]) -> Path:
    if path.suffix == ".safetensors":
        model = torch.frombuffer(bytearray(sentencepiece(pieces)), dtype=torch.uint8)
        save_file({**weights, "spiece_model": model}, path)
        return path
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "t5")
    writer.add_tokenizer_model("t5")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([score for _, score in pieces])
    writer.add_unk_token_id(2)
    writer.add_tensor("a", np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", ["a.safetensors", "a.gguf"])
def test_the_ids_are_those_of_the_pieces(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, PIECES, {"a": torch.zeros(1)})
    assert has_tokenizer(file)
    tokenizer = load_tokenizer(file)
    assert tokenizer("cat").input_ids == [4, 1]
    assert tokenizer("cats  cat").input_ids == [4, 6, 4, 1]
    assert tokenizer("cx").input_ids == [3, 5, 2, 1]
    padded = tokenizer("cat", padding="max_length", max_length=4)
    assert (padded.input_ids, padded.attention_mask) == ([4, 1, 0, 0], [1, 1, 0, 0])


def test_settings_of_sentencepiece_are_read() -> None:
    found = read_sentencepiece(sentencepiece(PIECES, byte_fallback=True))
    assert (found.unknown, found.byte_fallback, found.charsmap) == (2, True, b"")
    assert found.scores == PIECES


def test_files_without_a_tokenizer(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "none.safetensors")
    (tmp_path / "broken.gguf").write_bytes(b"broken")
    for name in ("none.safetensors", "broken.gguf", "missing.safetensors"):
        assert not has_tokenizer(tmp_path / name)
    with pytest.raises(InputError, match="has no tokenizer inside; fetch the base's with"):
        load_tokenizer(tmp_path / "none.safetensors")


def write_files(folder: Path, tiny_wan: Path) -> Path:
    """All weights of a tiny Wan as files, the text encoder's with the tokenizer inside, and a model file."""
    text = f'base = "{A14B}"\n[weights]\n'
    for component in ("transformer", "transformer_2", "vae", "text_encoder"):
        weights = load_file(next((tiny_wan / component).glob("*.safetensors")))
        if component == "text_encoder":
            pieces = json.loads((tiny_wan / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
            write(folder / f"{component}.safetensors", [tuple(each) for each in pieces], weights)
        else:
            save_file(weights, folder / f"{component}.safetensors")
        text += f'{component} = "{component}.safetensors"\n'
    (folder / "mine.toml").write_text(text)
    return folder / "mine.toml"


def test_a_known_base_needs_no_download_where_all_weights_are_files(
    tiny_wan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    path = write_files(tmp_path, tiny_wan)
    model = resolve(str(path), dtype="fp32")
    assert model.folder == CONFIGS / A14B
    assert model.facts["boundary_ratio"] == 0.9
    assert model.fingerprint
    pull = rf"{A14B} is not on this machine, and the model file .* fetch that with `svdq model pull .*mine.toml`"
    whole = path.read_text()
    path.write_text(whole.replace('vae = "vae.safetensors"\n', ""))
    with pytest.raises(InputError, match=pull):
        resolve(str(path))
    path.write_text(whole.replace("text_encoder.safetensors", "vae.safetensors"))  # without a tokenizer
    with pytest.raises(InputError, match=pull):
        resolve(str(path))


@pytest.mark.slow
def test_prompts_are_embedded_as_with_the_tokenizer_of_the_base(tiny_wan: Path, tmp_path: Path) -> None:
    path = write_files(tmp_path, tiny_wan)
    path.write_text(path.read_text().replace(A14B, str(tiny_wan)))
    of_base = resolve(str(path), dtype="fp32")
    shutil.copytree(tiny_wan, tmp_path / "base", ignore=shutil.ignore_patterns("tokenizer.json", "*.safetensors"))
    of_file = of_base.model_copy(update={"folder": tmp_path / "base"})
    video = WanParameters(prompt="A dog runs, (twice)!", seed=1, guidance_scale=1.0)
    role = Role(embed=True, encode=True, components=frozenset())
    embedded = [
        open_model(model, role, torch.device("cpu"), torch.float32).embed(video)  # type: ignore[attr-defined]
        for model in (of_base, of_file)
    ]
    assert torch.equal(embedded[0]["prompt_embeds"], embedded[1]["prompt_embeds"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_configs_of_known_models_have_their_numbers_of_weights(name: str) -> None:
    published = MODELS[name]
    facts = FAMILY.read_facts(CONFIGS / name, name)
    for key in ("boundary_ratio", "expand_timesteps", "has_image_encoder"):
        assert facts[key] == published.facts[key]
    for part in ("transformer", "vae"):
        assert published.facts[part].items() <= facts[part].items()
    for component, number in published.num_weights.items():
        config = json.loads((CONFIGS / name / component / "config.json").read_text())
        if component == "text_encoder" and name != A14B:
            assert config == json.loads((CONFIGS / A14B / component / "config.json").read_text())
            continue
        made = empty_component(class_of(FAMILY.layouts[published.layout], component), config)
        # The hub's image encoder has a projection, which Wan does not use.
        unused = 1280 * 1024 if component == "image_encoder" else 0
        assert sum(shape.numel() for shape in shapes_of(made).values()) + unused == number
