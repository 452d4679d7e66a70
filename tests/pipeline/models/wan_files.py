"""LoRAs and weights of a tiny Wan transformer in the formats in which people have them, with random numbers."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

#: From diffusers' names to those of the original code, which ComfyUI, LightX2V and musubi-tuner use.
ORIGINAL = {
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
    """Write a LoRA of all linear layers of the blocks, in the format of `peft`, `comfyui` or `musubi`."""
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
        module = original_name(module)
        place = f"diffusion_model.{module}" if kind == "comfyui" else f"lora_unet_{module.replace('.', '_')}"
        tensors |= {
            f"{place}.lora_down.weight": down,
            f"{place}.lora_up.weight": up,
            f"{place}.alpha": torch.tensor(alpha),
        }
        if kind == "comfyui":
            tensors[f"{place}.diff_b"] = torch.randn(weight.shape[0], generator=generator) * 0.1
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
