import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.weights import empty_component, load_weights, num_weights, read_file, renaming
from tests.pipeline.models.wan_files import original_name, save_fp8_scaled, save_gguf


def save_bf16(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file({f"model.diffusion_model.{original_name(name)}": weight for name, weight in kept.items()}, path)
    return kept


@pytest.mark.parametrize(
    ("name", "save"), [("bf16.safetensors", save_bf16), ("fp8.safetensors", save_fp8_scaled), ("q8.gguf", save_gguf)]
)
def test_a_file_of_comfyui_loads_to_its_dequantized_weights(
    tiny_wan: Path, tmp_path: Path, name: str, save: Callable[..., dict[str, Tensor]]
) -> None:
    import diffusers

    folder = tiny_wan / "transformer"
    weights = load_file(next(folder.glob("*.safetensors")))
    kept = save(tmp_path / name, weights)
    kind = diffusers.WanTransformer3DModel
    read = read_file(tmp_path / name, weights, renaming(kind))
    ours = empty_component(kind, json.loads((folder / "config.json").read_text()))
    load_weights(ours, read, [], dtype=torch.float32, device=torch.device("cpu"))
    for weight, tensor in ours.state_dict().items():
        assert torch.equal(tensor, kept[weight].float()), weight
    assert sum(weight.numel() for weight in weights.values()) <= num_weights(tmp_path / name)


def test_diffusers_alone_reads_fp8_scaled_files_wrongly(tiny_wan: Path, tmp_path: Path) -> None:
    """Why `read_file` exists: the day this fails, diffusers does it."""
    import diffusers

    weights = load_file(next((tiny_wan / "transformer").glob("*.safetensors")))
    kept = save_fp8_scaled(tmp_path / "fp8.safetensors", weights)
    theirs = diffusers.WanTransformer3DModel.from_single_file(
        str(tmp_path / "fp8.safetensors"), config=str(tiny_wan), subfolder="transformer", dtype=torch.float32
    ).state_dict()
    assert not torch.allclose(theirs["blocks.0.attn1.to_q.weight"], kept["blocks.0.attn1.to_q.weight"], atol=0.1)


@pytest.mark.parametrize("name", ["pickle.pt", "broken.gguf", "broken.safetensors"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no weights" * 10)
    with pytest.raises(InputError, match=r"^The weights file .* (cannot be read|is no safetensors file)"):
        read_file(tmp_path / name, [], str)
