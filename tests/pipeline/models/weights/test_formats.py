import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.families import layout_of
from svdq.pipeline.models.family import FileNames
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.wan.layout import LAYOUTS
from svdq.pipeline.models.wan.tiny import VARIANTS, Variant, write_tiny_wan
from svdq.pipeline.models.weights.components import check_model_file
from svdq.pipeline.models.weights.formats import empty_component, open_file, renaming
from svdq.pipeline.models.weights.made_weights import load_weights
from svdq.pipeline.models.weights.model_folder import weights_in
from tests.pipeline.models.wan_files import (
    finish,
    original_name,
    original_t5_name,
    original_vae_name,
    save_fp8_scaled,
    save_gguf,
)

NAMES = LAYOUTS["WanImageToVideoPipeline"].file_names


def save_bf16(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {name: weight.to(torch.bfloat16) for name, weight in weights.items()}
    save_file({f"model.diffusion_model.{original_name(name)}": weight for name, weight in kept.items()}, path)
    return kept


def save_fp8_with_newer_names(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As newer files of ComfyUI have them: scales of one element under another name, a note of the format."""
    kept = save_fp8_scaled(path, weights)
    scales = {name: tensor.reshape(1) for name, tensor in load_file(path).items() if name.endswith("scale_weight")}
    others = {name: tensor for name, tensor in load_file(path).items() if name not in scales and name != "scaled_fp8"}
    renamed = {name.replace("scale_weight", "weight_scale"): tensor for name, tensor in scales.items()}
    note = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    notes = {name.replace("scale_weight", "comfy_quant"): note.clone() for name in scales}
    save_file(others | renamed | notes, path)
    return kept


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("bf16.safetensors", save_bf16),
        ("fp8.safetensors", save_fp8_scaled),
        ("newer.safetensors", save_fp8_with_newer_names),
        ("q8.gguf", save_gguf),
    ],
)
def test_a_file_of_comfyui_loads_to_its_dequantized_weights(
    tiny_wan: Path, tmp_path: Path, name: str, save: Callable[..., dict[str, Tensor]]
) -> None:
    import diffusers

    folder = tiny_wan / "transformer"
    weights = load_file(next(folder.glob("*.safetensors")))
    kept = save(tmp_path / name, weights)
    kind = diffusers.WanTransformer3DModel
    read = open_file(tmp_path / name, weights, renaming(kind, NAMES["transformer"]))
    ours = empty_component(kind, json.loads((folder / "config.json").read_text()))
    load_weights(ours, read, [], dtype=torch.float32, device=torch.device("cpu"))
    for weight, tensor in ours.state_dict().items():
        assert torch.equal(tensor, kept[weight].float()), weight
    assert sum(each.number for each in weights_in(tmp_path / name)) == sum(
        weight.numel() for weight in weights.values()
    )


def test_diffusers_alone_reads_fp8_scaled_files_wrongly(tiny_wan: Path, tmp_path: Path) -> None:
    """Why `open_file` exists: the day this fails, diffusers does it."""
    import diffusers

    weights = load_file(next((tiny_wan / "transformer").glob("*.safetensors")))
    kept = save_fp8_scaled(tmp_path / "fp8.safetensors", weights)
    theirs = diffusers.WanTransformer3DModel.from_single_file(
        str(tmp_path / "fp8.safetensors"), config=str(tiny_wan), subfolder="transformer", dtype=torch.float32
    ).state_dict()
    assert not torch.allclose(theirs["blocks.0.attn1.to_q.weight"], kept["blocks.0.attn1.to_q.weight"], atol=0.1)


def test_weights_of_another_model_are_refused_by_their_sizes(tiny_wan: Path, tmp_path: Path) -> None:
    weights = load_file(next((tiny_wan / "transformer").glob("*.safetensors")))
    weights["patch_embedding.weight"] = weights["patch_embedding.weight"][:, :16].contiguous()  # of text to video
    save_bf16(tmp_path / "t2v.safetensors", weights)
    (tmp_path / "t2v.toml").write_text(f'base = "{tiny_wan}"\n[weights]\ntransformer = "t2v.safetensors"\n')
    model = resolve(str(tmp_path / "t2v.toml"))
    said = (
        "transformer of the model t2v does not fit its config in .*: patch_embedding.weight has 1,536 numbers in place"
    )
    with pytest.raises(InputError, match=said):
        list(check_model_file(model, layout_of(model)))


def test_a_unet_with_the_names_of_its_authors_is_refused_by_these(tiny_model: Path, tmp_path: Path) -> None:
    """As svd_xt_1_1.safetensors, which is a whole checkpoint."""
    names = ("model.diffusion_model.input_blocks.0.0.weight", "conditioner.embedders.0.open_clip.model.ln.weight")
    save_file({name: torch.ones(1) for name in names}, tmp_path / "svd_xt_1_1.safetensors")
    (tmp_path / "mine.toml").write_text(f'base = "{tiny_model}"\nweights.unet = "svd_xt_1_1.safetensors"\n')
    model = resolve(str(tmp_path / "mine.toml"))
    said = (
        "has no weight of the unet of the model mine by a name that svdq knows, but conditioner.*; give one with diff"
    )
    with pytest.raises(InputError, match=said):
        list(check_model_file(model, layout_of(model)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_transformer_with_original_names_has_all_weights(tmp_path: Path, variant: Variant) -> None:
    write_tiny_wan(tmp_path / "wan", variant)
    file = next((tmp_path / "wan" / "transformer").glob("*.safetensors"))
    save_bf16(tmp_path / "mine.safetensors", load_file(file))
    file.unlink()
    (tmp_path / "mine.toml").write_text('base = "wan"\nweights.transformer = "mine.safetensors"\n')
    model = resolve(str(tmp_path / "mine.toml"))
    (sentence,) = check_model_file(model, layout_of(model))
    assert sentence == f"transformer: all weights are in {tmp_path / 'mine.safetensors'}."


def test_weights_of_wan_2_1_are_refused_for_wan_2_2(tiny_wan: Path, tmp_path: Path) -> None:
    # Its transformer has all weights of 2.2's, and others for the photo.
    write_tiny_wan(tmp_path / "wan2.1", "i2v-14b")
    file = next((tmp_path / "wan2.1" / "transformer").glob("*.safetensors"))
    (tmp_path / "mine.toml").write_text(f'base = "{tiny_wan}"\n[weights]\ntransformer = "{file}"\n')
    model = resolve(str(tmp_path / "mine.toml"))
    said = "is of another model: the transformer of .* has no blocks.0.attn2.add_k_proj.bias; give another file"
    with pytest.raises(InputError, match=said):
        list(check_model_file(model, layout_of(model)))


def test_a_gguf_type_that_diffusers_cannot_read_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "iq2.gguf", "wan")
    kind = gguf.GGMLQuantizationType.IQ2_S
    writer.add_tensor("a.weight", np.zeros((2, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), raw_dtype=kind)
    finish(writer)
    with pytest.raises(InputError, match=r"has a.weight as IQ2_S, which diffusers cannot read; give another quant"):
        open_file(tmp_path / "iq2.gguf", [], str)


@pytest.mark.parametrize("name", ["pointer.gguf", "pointer.safetensors"])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(InputError, match="is a Git LFS pointer, not the weights; run `git lfs pull` there"):
        open_file(tmp_path / name, [], str)


@pytest.mark.parametrize(
    ("beside", "dtype", "says"),
    [
        ({"weight_scale_inv": (1,)}, torch.float8_e4m3fn, "has a.weight_scale_inv beside a.weight"),
        ({"weight.scale": (1,)}, torch.float8_e4m3fn, "has a.weight.scale beside a.weight"),
        ({"scale_weight": (3, 3)}, torch.float8_e4m3fn, "has a.scale_weight of shape .* for a weight of"),
        ({}, torch.int8, "has a.weight of I8 without a scale"),
        ({}, torch.bool, "has a.weight of BOOL without a scale"),
        ({"weight_scale": (1,), "zero_point": (4,)}, torch.int8, "has a.zero_point beside a.weight"),
        ({"scale_weight": (4, 1), "scale_input": (1,), "bias": (4,)}, torch.float8_e4m3fn, ""),
        ({}, torch.float8_e5m2, ""),  # rounded, without scales
    ],
)
def test_weights_that_would_be_read_wrongly_are_refused(
    tmp_path: Path, beside: dict[str, tuple[int, ...]], dtype: torch.dtype, says: str
) -> None:
    tensors = {f"a.{name}": torch.ones(shape) for name, shape in beside.items()}
    save_file(tensors | {"a.weight": torch.ones(4, 4).to(dtype)}, tmp_path / "a.safetensors")
    if says:
        with pytest.raises(InputError, match=says):
            open_file(tmp_path / "a.safetensors", [], str)
    else:
        stored = open_file(tmp_path / "a.safetensors", [], str)["a.weight"]
        assert stored.dequantize(stored.read()).unique().tolist() == [1.0]


@pytest.mark.parametrize("name", ["pickle.pt", "broken.gguf", "broken.safetensors", "gone.safetensors", "gone.gguf"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    if not name.startswith("gone"):
        (tmp_path / name).write_bytes(b"no weights" * 10)
    with pytest.raises(InputError, match=r"^The weights file .* (cannot be read|is no safetensors file)"):
        open_file(tmp_path / name, [], str)


@pytest.mark.parametrize("residual", [False, True])
def test_a_vae_of_comfyui_loads_to_the_weights_of_diffusers(tmp_path: Path, residual: bool) -> None:
    import diffusers

    channels = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "is_residual": True} if residual else {}
    # As many blocks and levels as the published ones.
    made = diffusers.AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=2, **channels)
    weights = made.state_dict()
    renamed = {original_vae_name(name, residual=residual): weight.bfloat16() for name, weight in weights.items()}
    assert len(renamed) == len(weights)
    save_file(renamed, tmp_path / "vae.safetensors")
    kind = diffusers.AutoencoderKLWan
    read = open_file(tmp_path / "vae.safetensors", weights, renaming(kind, NAMES["vae"]))
    ours = empty_component(kind, made.config)
    load_weights(ours, read, [], dtype=torch.float32, device=torch.device("cpu"))
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, weights[name].bfloat16().float()), name


def test_encoders_have_the_names_of_wan_and_of_older_transformers(tmp_path: Path) -> None:
    import transformers

    write_tiny_wan(tmp_path / "wan", "i2v-14b")

    for component, kind, rename in (
        ("text_encoder", transformers.UMT5EncoderModel, original_t5_name),
        ("image_encoder", transformers.CLIPVisionModel, lambda name: f"vision_model.{name}"),
    ):
        folder = tmp_path / "wan" / component
        weights = load_file(next(folder.glob("*.safetensors")))
        save_file({rename(name): weight for name, weight in weights.items()}, tmp_path / "file.safetensors")
        ours = empty_component(kind, json.loads((folder / "config.json").read_text()))
        renamed = renaming(kind, NAMES.get(component, FileNames()))
        read = open_file(tmp_path / "file.safetensors", weights, renamed)
        load_weights(ours, read, [], dtype=torch.float32, device=torch.device("cpu"))
        assert weights.keys() <= ours.state_dict().keys()
        for name, weight in weights.items():
            assert torch.equal(ours.state_dict()[name], weight), name
