"""Headers and tensors are read as the library safetensors reads them, also of a file that is larger than memory."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from svdq.pipeline.models.families import layout_of
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.weights.components import check_model_file
from svdq.pipeline.models.weights.loras import tensor_of
from svdq.pipeline.models.weights.safetensors_file import SafetensorsFile

DTYPES = ["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "float16", "bfloat16", "int32", "float32"]
DTYPES += ["int64", "float64", "uint16", "uint32", "uint64"]


def write(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_tensors_and_metadata_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {each: torch.arange(6).reshape(2, 3).to(getattr(torch, each)) for each in DTYPES}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"a": "b"})
    read = SafetensorsFile.open(tmp_path / "a.safetensors")
    assert (read.metadata, read.entries.keys()) == ({"a": "b"}, tensors.keys())
    for name, expected in load_file(tmp_path / "a.safetensors").items():
        assert (tensor_of(read, name).dtype, tensor_of(read, name).shape) == (expected.dtype, expected.shape)
        assert tensor_of(read, name).tolist() == expected.tolist()


def test_a_tensor_at_an_odd_place_is_read(tmp_path: Path) -> None:
    """Some writers put notes of a few bytes before the weights."""
    header = {
        "note": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "weight": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    write(tmp_path / "a.safetensors", header, b"abc" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert tensor_of(SafetensorsFile.open(tmp_path / "a.safetensors"), "weight").tolist() == [1.5, -2.0]


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b'{"a"', "is no JSON"),
        (b"[1]", "is no JSON object"),
        (b"[" * 100_000, "is no JSON"),
        ({"a": 1}, "has a as 1"),
        (entry(dtype="F4"), "has a as"),
        (entry(shape=[3]), "has a as"),
        (entry(shape=[-1, -2]), "has a as"),
        (entry(shape=2), "has a as"),
        (entry(data_offsets=[8, 0]), "has a as"),
        (entry(data_offsets=[4, 12]), "ends before a"),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(tmp_path: Path, header: Any, says: str) -> None:
    write(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=says):
        SafetensorsFile.open(tmp_path / "a.safetensors")


@pytest.mark.parametrize("size", [0, 7, 8, 9, 60])
def test_a_file_that_is_cut_in_its_header_is_refused(tmp_path: Path, size: int) -> None:
    write(tmp_path / "a.safetensors", entry(), bytes(8))
    os.truncate(tmp_path / "a.safetensors", size)
    with pytest.raises(ValueError, match="and its header would have"):
        SafetensorsFile.open(tmp_path / "a.safetensors")


def test_a_file_larger_than_memory_is_checked_and_read(tiny_wan: Path, tmp_path: Path) -> None:
    """Linux refuses to map it as the library safetensors does: "unable to mmap"."""
    import psutil

    file, large = next((tiny_wan / "transformer").glob("*.safetensors")), tmp_path / "large.safetensors"
    num_bytes = psutil.virtual_memory().total + psutil.swap_memory().total + 2**30
    data = file.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    header, end = json.loads(data[8:length]), len(data) - length
    header["vae.hole"] = {"dtype": "U8", "shape": [num_bytes], "data_offsets": [end, end + num_bytes]}
    write(large, header, data[length:])
    os.truncate(large, large.stat().st_size + num_bytes)
    (tmp_path / "mine.toml").write_text(f'base = "{tiny_wan}"\n[weights]\ntransformer = "large.safetensors"\n')
    model = resolve(str(tmp_path / "mine.toml"), on_gpus=False)
    assert list(check_model_file(model, layout_of(model))) == [f"transformer: all weights are in {large}."]
    name = "blocks.0.attn1.to_q.weight"
    assert torch.equal(tensor_of(SafetensorsFile.open(large), name), load_file(file)[name])
