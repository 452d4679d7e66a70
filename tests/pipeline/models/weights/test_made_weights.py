"""Weights that stay as their files store them have the bits of weights that are made once, when they are loaded."""

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from svdq.pipeline.models.compute.options import ComputeOptions, weight_bytes
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.needs import SizedModel
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import FAMILY, WanParameters
from svdq.pipeline.models.weights.formats import open_file
from svdq.pipeline.models.weights.made_weights import MadeWeight
from tests.pipeline import ranks
from tests.pipeline.models.wan_files import SAVE, TYPES, finish, original_name, pack, write_model_file
from tests.pipeline.rendering import denoise

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_of_gguf_is_dequantized_as_the_package_gguf_does(tmp_path: Path, kind: str) -> None:
    import gguf

    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(1)).numpy()
    packed = pack(weight, kind)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "wan")
    writer.add_tensor("a.weight", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)
    stored = open_file(tmp_path / "a.gguf", ["a.weight"], str)["a.weight"]
    made = stored.dequantize(stored.read()).reshape(weight.shape).float().numpy()
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(made.view(np.int32), expected.view(np.int32))
    assert 0.01 < made.std() < 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "lora", "dtype"),
    [("scaled.safetensors", False, torch.float32), *((name, True, torch.bfloat16) for name in SAVE)],
)
def test_stored_weights_make_the_same_video(wide_wan: Path, tmp_path: Path, photo, name, lora, dtype) -> None:
    model = resolve(str(write_model_file(tmp_path, wide_wan, name, lora=lora)))
    states, sizes = [], []
    for weights in ("made", "stored"):
        role = Role(embed=True, encode=True, decode=True)
        opened = open_model(model, role, CPU, dtype, ComputeOptions(weights=weights))
        video = opened.complete(WanParameters(prompt="A dog.", seed=3, frames=5, steps=4, width=64, height=64))
        states.append(denoise(opened, opened.encode(photo, video), video)["latents"])
        sizes.append(weight_bytes(opened.pipeline.transformer))
        layers = [each for each in opened.pipeline.transformer.modules() if isinstance(each, MadeWeight)]
        assert bool(layers) == (weights == "stored")
    assert torch.equal(*states)
    assert states[0].std() > 0.1
    assert sizes[1] < sizes[0]


USUAL = WanParameters(prompt="A dog runs.", seed=1, steps=5, frames=5, width=64, height=64)
HIGH, LOW = frozenset({"transformer"}), frozenset({"transformer_2"})
GROUPS: list[dict[str, Any]] = [
    {"num_ranks": 3, "components": (HIGH, None, LOW)},
    {"num_ranks": 1, "in_rounds": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convrot.safetensors", "Q4_K.gguf"])
def test_stored_weights_have_the_same_bits_on_any_number_of_ranks(wide_wan, tmp_path, image, name) -> None:
    model = str(write_model_file(tmp_path, wide_wan, name, lora=True))
    facts = resolve(model).facts
    videos = [FAMILY.complete(USUAL.model_copy(update={"seed": seed}), facts) for seed in range(3)]
    expected = ranks.render(model, image, videos, num_ranks=1, options=ComputeOptions(weights="made"))
    assert expected[0].std() > 20
    for group in GROUPS:
        ours = ranks.render(model, image, videos, options=ComputeOptions(weights="stored"), **group)
        np.testing.assert_array_equal(ours, expected)


def write_holes(path: Path, shapes: Mapping[str, torch.Size], kind: str) -> None:
    """Zeros as weights of a kind, those of norms and the like in float32."""
    import gguf

    def is_packed(name: str) -> bool:
        return name.startswith("blocks.") and name.endswith(".weight") and len(shapes[name]) == 2

    if kind == "fp8":
        meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        sizes = {name: each.numel() * (1 if is_packed(name) else 4) for name, each in meta.items()}
        stops = dict(zip(sizes, itertools.accumulate(sizes.values()), strict=True))
        header = {
            original_name(name): {
                "dtype": "F8_E4M3" if is_packed(name) else "F32",
                "shape": list(shape),
                "data_offsets": [stops[name] - sizes[name], stops[name]],
            }
            for name, shape in shapes.items()
        }
        text = json.dumps(header).encode()
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + max(stops.values()))
        return
    writer = gguf.GGUFWriter(path, "wan")
    quantization = gguf.GGMLQuantizationType.Q4_K
    block, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
    for name, shape in shapes.items():
        if is_packed(name):
            packed = np.zeros((shape[0], shape[1] // block * num_bytes), np.uint8)
            writer.add_tensor(original_name(name), packed, raw_dtype=quantization)
        else:
            flat = (*shape[:3], -1) if len(shape) > 4 else tuple(shape)
            writer.add_tensor(original_name(name), np.zeros(shape, np.float32).reshape(flat))
    finish(writer)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fp8", "Q4_K"])
def test_layers_of_the_published_width_take_what_is_estimated(tiny_wan: Path, tmp_path: Path, kind: str) -> None:
    """Two blocks, each with two layers of 5120 x 13824, in holes of files that take no disk."""
    from diffusers import WanTransformer3DModel

    from_config = WanTransformer3DModel.from_config
    shutil.copytree(tiny_wan, tmp_path / "wan")
    config = tmp_path / "wan" / "transformer" / "config.json"
    wide = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 2}
    config.write_text(json.dumps(json.loads(config.read_text()) | wide))
    with torch.device("meta"):
        shapes = {n: w.shape for n, w in from_config(json.loads(config.read_text())).state_dict().items()}
    write_holes(tmp_path / f"a.{'gguf' if kind == 'Q4_K' else 'safetensors'}", shapes, kind)
    file = next(tmp_path.glob("a.*"))
    (tmp_path / "wide.toml").write_text(f'base = "{tmp_path / "wan"}"\n[weights]\ntransformer = "{file.name}"\n')
    model = resolve(str(tmp_path / "wide.toml"))
    ways = [{"weights": "stored"}, {"weights": "made"}]
    for way in [*ways, {"weights": "stored", "native": ("fp8",)}] if kind == "fp8" else ways:
        compute = ComputeOptions(**way)
        opened = open_model(model, Role(components=HIGH), CPU, torch.bfloat16, compute)
        estimated = SizedModel.of(model, "bfloat16", compute).weights("transformer")
        assert weight_bytes(opened.pipeline.transformer) == pytest.approx(estimated, rel=0.03)


def save_t5_fp8(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors, kept = {"scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, dict(weights)
    for name, weight in weights.items():
        tensors[name] = weight.contiguous()
        if ".layer." in name and name.endswith((".q.weight", ".wo.weight", ".wi_0.weight")):
            scale = weight.abs().max() / 448
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".scale_weight")] = scale
            kept[name] = tensors[name].float() * scale
    save_file(tensors, path)
    return kept


def save_t5_gguf(path: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With llama.cpp's names, in Q8_0 where the width allows it."""
    import gguf

    writer, kept = gguf.GGUFWriter(path, "t5encoder"), {}
    quantization = gguf.GGMLQuantizationType.Q8_0
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, 2)
    for name, weight in weights.items():
        original, array = f"{names.get_name(name.removesuffix('.weight'))}.weight", weight.float().numpy()
        kept[name] = weight
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            array = gguf.quants.quantize(array, quantization)
            writer.add_tensor(original, array, raw_dtype=quantization)
            kept[name] = torch.from_numpy(gguf.quants.dequantize(array, quantization))
        else:
            writer.add_tensor(original, array)
    finish(writer)
    return kept


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "save"), [("safetensors", save_t5_fp8), ("gguf", save_t5_gguf)])
def test_a_text_encoder_of_comfyui_embeds_as_its_dequantized_weights(tiny_wan, tmp_path, suffix, save) -> None:
    weights = load_file(next((tiny_wan / "text_encoder").glob("*.safetensors")))
    kept = save(tmp_path / f"text.{suffix}", weights)
    file = tmp_path / "mine.toml"
    file.write_text(f'base = "{tiny_wan}"\n[weights]\ntext_encoder = "text.{suffix}"\n')
    role, video = Role(embed=True, components=frozenset()), USUAL.model_copy(update={"guidance_scale": 1.0})
    made, stored = (
        open_model(resolve(str(file)), role, CPU, torch.float32, ComputeOptions(weights=weights))
        for weights in ("made", "stored")
    )
    for name, weight in made.pipeline.text_encoder.state_dict().items():
        assert torch.equal(weight, kept[name.replace("encoder.embed_tokens", "shared")]), name
    layers = [each for each in stored.pipeline.text_encoder.modules() if isinstance(each, MadeWeight)]
    assert layers
    embedded = [model.embed(video)["prompt_embeds"] for model in (made, stored)]
    assert torch.equal(*embedded)
    assert embedded[0].std() > 0.01
    assert SizedModel.of(resolve(str(file)), "float32", ComputeOptions(weights="stored")).stored["text_encoder"] > 0


def test_a_folder_of_diffusers_in_fp8(tiny_wan: Path, tmp_path: Path, photo) -> None:
    folder = tmp_path / "wan"
    shutil.copytree(tiny_wan, folder)
    for component in ("transformer", "transformer_2"):
        [file] = (folder / component).glob("*.safetensors")
        weights = load_file(file)
        rounded = {n: w.to(torch.float8_e4m3fn) if "attn" in n and w.ndim == 2 else w for n, w in weights.items()}
        save_file(rounded, file)
    states = []
    for weights in ("made", "stored"):
        role = Role(embed=True, encode=True, decode=True)
        opened = open_model(resolve(str(folder)), role, CPU, torch.float32, ComputeOptions(weights=weights))
        video = opened.complete(WanParameters(prompt="A dog.", seed=3, frames=5, steps=4, width=64, height=64))
        states.append(denoise(opened, opened.encode(photo, video), video)["latents"])
        layers = [each for each in opened.pipeline.transformer.modules() if isinstance(each, MadeWeight)]
        assert bool(layers) == (weights == "stored")
    assert torch.equal(*states)


def test_a_stored_weight_that_is_not_finite_is_named(tiny_wan: Path, tmp_path: Path) -> None:
    model = resolve(str(write_model_file(tmp_path, tiny_wan, "scaled.safetensors", lora=False)))
    opened = open_model(model, Role(components=HIGH), CPU, torch.float32, ComputeOptions(weights="stored"))
    assert opened.broken_weights() == ""
    opened.pipeline.transformer.blocks[1].attn2.to_k.stored_1.fill_(255)  # the scale, as bytes
    assert opened.broken_weights() == "transformer (blocks.1.attn2.to_k.weight)"


def test_the_unet_of_svd_keeps_stored_weights_and_loras(tiny_model: Path, tmp_path: Path, photo) -> None:
    weights = load_file(next((tiny_model / "unet").glob("*.safetensors")))
    rounded = {n: w.to(torch.float8_e4m3fn) if w.ndim > 1 and "block" in n else w for n, w in weights.items()}
    save_file(rounded, tmp_path / "fp8.safetensors")
    name = next(n for n in weights if n.endswith("attn1.to_q.weight"))
    rows, columns = weights[name].shape
    module = f"unet.{name.removesuffix('.weight')}"
    factors = {f"{module}.lora_A.weight": torch.randn(2, columns), f"{module}.lora_B.weight": torch.randn(rows, 2)}
    save_file(factors, tmp_path / "lora.safetensors")
    lora = '[[lora]]\nfile = "lora.safetensors"\ncomponent = "unet"\n'
    (tmp_path / "mine.toml").write_text(f'base = "{tiny_model}"\n[weights]\nunet = "fp8.safetensors"\n{lora}')
    states = []
    for kept in ("made", "stored"):
        role = Role(embed=True, encode=True, decode=True)
        opened = open_model(
            resolve(str(tmp_path / "mine.toml")), role, CPU, torch.float32, ComputeOptions(weights=kept)
        )
        video = opened.complete(SvdParameters(seed=3, frames=3, steps=3, width=64, height=64))
        states.append(denoise(opened, opened.encode(photo, video), video)["latents"])
        kinds = {type(each).__name__ for each in opened.pipeline.unet.modules() if isinstance(each, MadeWeight)}
        assert kinds == ({"MadeLinear", "MadeConv2d", "MadeConv3d"} if kept == "stored" else set())
    assert torch.equal(*states)
