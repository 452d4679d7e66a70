"""LoRAs and weights of a tiny Wan transformer in the formats in which people have them, with random numbers."""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.pipeline.models.comfy_files import save_quantized

TYPES = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "BF16",
    "F16",
    "F32",
)
#: Where blocks of types that the package gguf only reads have their factors, as float16.
FACTORS = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}

#: From diffusers' names to those of the original code, which ComfyUI, LightX2V and musubi-tuner use.
ORIGINAL = {
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
    "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "attn2.norm_added_k": "cross_attn.norm_k_img",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "attn2": "cross_attn",
    "attn1": "self_attn",
    ".to_out.0": ".o",
    ".to_q": ".q",
    ".to_k": ".k",
    ".to_v": ".v",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
    "proj_out": "head.head",
}


def original_name(name: str) -> str:
    """The original name of a weight of diffusers'."""
    if name == "scale_shift_table":
        return "head.modulation"
    for theirs, original in ORIGINAL.items():
        name = name.replace(theirs, original)
    name = name.replace("scale_shift_table", "modulation")
    return name.replace("norm2", "norm?").replace("norm3", "norm2").replace("norm?", "norm3")


def save_lora(path: Path, weights: Mapping[str, Tensor], kind: str, *, rank: int = 4, alpha: float = 2.0) -> None:
    """Write a LoRA of all linear layers of the blocks, in the format of `peft` or `comfyui`."""
    generator = torch.Generator().manual_seed(rank)
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.startswith("blocks.") or not name.endswith(".weight") or "norm" in name:
            continue
        down = torch.randn(rank, weight.shape[1], generator=generator) * 0.2
        up = torch.randn(weight.shape[0], rank, generator=generator) * 0.2
        module = name.removesuffix(".weight")
        if kind == "peft":
            tensors |= {f"transformer.{module}.lora_A.weight": down, f"transformer.{module}.lora_B.weight": up}
            continue
        place = f"diffusion_model.{original_name(module)}"
        tensors |= {
            f"{place}.lora_down.weight": down,
            f"{place}.lora_up.weight": up,
            f"{place}.alpha": torch.tensor(alpha),
            f"{place}.diff_b": torch.randn(weight.shape[0], generator=generator) * 0.1,
        }
    if kind == "comfyui":
        tensors["diffusion_model.blocks.0.norm3.diff"] = torch.ones(24)
    save_file(tensors, path)


def save_gguf(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write weights as GGUF, in Q8_0 where that can be; return what they are then."""
    import gguf

    writer = gguf.GGUFWriter(path, "wan")
    q8 = gguf.GGMLQuantizationType.Q8_0
    kept = {}
    for name, weight in weights.items():
        array = weight.float().numpy()
        if array.ndim == 2 and array.shape[1] % 32 == 0:
            packed = gguf.quants.quantize(array, q8)
            writer.add_tensor(original_name(name), packed, raw_dtype=q8)
            kept[name] = torch.from_numpy(gguf.quants.dequantize(packed, q8))
        else:  # at most four dimensions
            writer.add_tensor(original_name(name), array.reshape(*array.shape[:3], -1) if array.ndim > 4 else array)
            kept[name] = weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def save_fp8_scaled(path: Path, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write weights as ComfyUI's fp8_scaled files have them; return what they are then."""
    tensors, kept = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, {}
    for name, weight in weights.items():
        kept[name], original = weight, original_name(name)
        if name.startswith("blocks.") and weight.ndim == 2 and name.endswith(".weight"):
            scale = weight.abs().max() / 448
            tensors[original] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[original.replace(".weight", ".scale_weight")] = scale
            kept[name] = tensors[original].float() * scale
        else:
            tensors[original] = weight.contiguous()
    save_file(tensors, path)
    return kept


def pack(weight: NDArray[np.float32], kind: str) -> NDArray[Any]:
    """Numbers in a type of GGUF; of those that the package cannot write, any bytes, with small factors."""
    import gguf

    quantization = gguf.GGMLQuantizationType[kind]
    if kind not in FACTORS:
        packed: NDArray[Any] = gguf.quants.quantize(weight, quantization)
        return packed
    block, num_bytes = gguf.GGML_QUANT_SIZES[quantization]
    blocks = np.random.default_rng(weight.size).integers(0, 256, (weight.size // block, num_bytes), dtype=np.uint8)
    for place in FACTORS[kind]:
        blocks[:, place : place + 2] = np.array([0.001], np.float16).view(np.uint8)
    return blocks.reshape(len(weight), -1)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_gguf_as(kind: str, path: Path, weights: dict[str, Tensor]) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "wan")
    for name, weight in weights.items():
        array = weight.float().numpy()
        if name.startswith("blocks.") and array.ndim == 2 and name.endswith(".weight"):
            writer.add_tensor(original_name(name), pack(array, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:  # at most four dimensions
            writer.add_tensor(original_name(name), array.reshape(*array.shape[:3], -1) if array.ndim > 4 else array)
    finish(writer)


def save_fp8(path: Path, weights: dict[str, Tensor]) -> None:
    save_file({original_name(name): weight.to(torch.float8_e4m3fn) for name, weight in weights.items()}, path)


def save_fp8_in_blocks(path: Path, weights: dict[str, Tensor]) -> None:
    tensors = {}
    for name, weight in weights.items():
        tensors[original_name(name)] = weight.contiguous()
        if name.startswith("blocks.") and weight.ndim == 2 and name.endswith(".weight"):
            scale = torch.rand(2, 4, generator=torch.Generator().manual_seed(len(name))) + 0.5
            note = json.dumps({"format": "float8_e4m3fn"}).encode()
            tensors[original_name(name)] = weight.to(torch.float8_e4m3fn)
            tensors[original_name(name).replace(".weight", ".weight_scale")] = scale
            tensors[original_name(name).replace(".weight", ".comfy_quant")] = torch.tensor(
                list(note), dtype=torch.uint8
            )
    save_file(tensors, path)


SAVE: dict[str, Callable[..., object]] = {
    "fp8.safetensors": save_fp8,
    "scaled.safetensors": save_fp8_scaled,
    "blocks.safetensors": save_fp8_in_blocks,
    "convrot.safetensors": partial(save_quantized, kind="int8 ConvRot", rename=original_name),
    **{f"{kind}.gguf": partial(save_gguf_as, kind) for kind in TYPES if kind[0] == "Q"},
}


def write_model_file(folder: Path, base: Path, name: str, *, lora: bool) -> Path:
    """Write the weights of both experts, unless `name` is that of no format, and a model file with them."""
    text = f'base = "{base}"\n'
    for component in ("transformer", "transformer_2") if name in SAVE else ():
        weights = load_file(next((base / component).glob("*.safetensors")))
        SAVE[name](folder / f"{component}-{name}", weights)
        text += f'[weights]\n{component} = "{component}-{name}"\n'.removeprefix("[weights]\n" * ("[weights]" in text))
    for component in ("transformer", "transformer_2") if lora else ():
        weights = load_file(next((base / component).glob("*.safetensors")))
        save_lora(folder / f"{component}-lora.safetensors", weights, "comfyui")
        text += f'[[lora]]\nfile = "{component}-lora.safetensors"\ncomponent = "{component}"\nstrength = 0.7\n'
    (folder / "mine.toml").write_text(text)
    return folder / "mine.toml"


#: From diffusers' names of the layers of a residual block of Wan's VAE to the original ones.
RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}


def original_vae_name(name: str, *, residual: bool) -> str:
    """The original name of a weight of AutoencoderKLWan, which ComfyUI's wan_2.1_vae and wan2.2_vae have."""
    for theirs, original in {**RESIDUAL, "conv_shortcut": "shortcut"}.items():
        name = name.replace(f".{theirs}.", f".{original}.")
    name = name.replace("post_quant_conv", "conv2").replace("quant_conv", "conv1").replace("conv_in", "conv1")
    name = name.replace("norm_out", "head.0").replace("conv_out", "head.2")
    name = name.replace("mid_block.resnets.0", "middle.0").replace("mid_block.resnets.1", "middle.2")
    name = name.replace("mid_block.attentions.0", "middle.1")
    if residual:  # levels of layers, the last of which changes the size
        name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"downsamples.\1.downsamples.\2", name)
        name = re.sub(r"down_blocks\.(\d+)\.downsampler", r"downsamples.\1.downsamples.2", name)
        name = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", r"upsamples.\1.upsamples.\2", name)
        return re.sub(r"up_blocks\.(\d+)\.upsampler", r"upsamples.\1.upsamples.3", name)
    name = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", lambda at: f"upsamples.{4 * int(at[1]) + int(at[2])}", name)
    name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda at: f"upsamples.{4 * int(at[1]) + 3}", name)
    return name.replace("down_blocks", "downsamples")


def original_t5_name(name: str) -> str:
    """The name of a weight of UMT5EncoderModel in Wan's original code, as in umt5-xxl-enc-bf16."""
    name = name.replace("encoder.block.", "blocks.").replace("encoder.final_layer_norm", "norm")
    for theirs, original in {
        "shared": "token_embedding",
        "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding",
        "layer.0.SelfAttention": "attn",
        "layer.0.layer_norm": "norm1",
        "layer.1.layer_norm": "norm2",
        "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
        "layer.1.DenseReluDense.wi_1": "ffn.fc1",
        "layer.1.DenseReluDense.wo": "ffn.fc2",
    }.items():
        name = name.replace(theirs, original)
    return name
