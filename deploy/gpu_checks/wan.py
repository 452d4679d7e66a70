"""Writes a model of Wan 2.2 I2V-A14B at its published width with few layers and random weights, for measuring."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gpu_checks.full_size import with_random_weights
from svdq.pipeline.models.wan.family import PUBLISHED
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.wan.tiny import write_tiny_wan

#: Numbers of layers to measure: two, from which the time of one layer follows.
LAYERS = (2, 4)
#: Widths to try this on a processor.
NARROW = {"num_attention_heads": 2, "ffn_dim": 512}


def write_wide_wan(folder: Path, layers: int, *, narrow: bool = False) -> None:
    """Write the model; its text encoder is the tiny one, and both experts have the same weights.

    Args:
        folder: new, or written by this function before.
        layers: of each expert.
        narrow: whether to write narrow layers and the tiny VAE, which are measured in seconds on a processor.
    """
    import diffusers

    write_tiny_wan(folder)
    text_dim = diffusers.WanTransformer3DModel.load_config(folder / HIGH_NOISE)["text_dim"]
    config: dict[str, Any] = PUBLISHED["transformer"] | {"num_layers": layers, "text_dim": text_dim}
    config |= NARROW if narrow else {}
    expert = with_random_weights(lambda: diffusers.WanTransformer3DModel(**config), torch.bfloat16)
    shutil.rmtree(folder / HIGH_NOISE)
    expert.save_pretrained(folder / HIGH_NOISE)
    shutil.rmtree(folder / LOW_NOISE)
    shutil.copytree(folder / HIGH_NOISE, folder / LOW_NOISE, copy_function=os.link)
    if not narrow:
        shutil.rmtree(folder / "vae")
        vae = with_random_weights(lambda: diffusers.AutoencoderKLWan(**PUBLISHED["vae"]), torch.float32)
        vae.save_pretrained(folder / "vae")


def write_model_with_lora(folder: Path) -> Path:
    """Write a LoRA of rank 64 for the attention of the first expert of a model, and a model file; return that."""
    lora = {}
    for file in sorted((folder / HIGH_NOISE).glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                if ".attn" in name and name.endswith(".weight") and "norm" not in name:
                    rows, columns = weights.get_slice(name).get_shape()
                    module = f"{HIGH_NOISE}.{name.removesuffix('.weight')}"
                    lora[f"{module}.lora_A.weight"] = torch.randn(64, columns) / columns
                    lora[f"{module}.lora_B.weight"] = torch.randn(rows, 64)
    save_file(lora, folder / "lora.safetensors")
    path = folder / "lora.toml"
    path.write_text(f'base = "."\n[[lora]]\nfile = "lora.safetensors"\ncomponent = "{HIGH_NOISE}"\n')
    return path


def write_model_in_fp8(folder: Path) -> Path:
    """Write the first expert of a model as ComfyUI's fp8_scaled files have it, and a model file; return that."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted((folder / HIGH_NOISE).glob("*.safetensors")):
        for name, weight in load_file(file).items():
            tensors[name] = weight
            if name.startswith("blocks.") and name.endswith(".weight") and weight.ndim == 2:
                scale = weight.abs().max().float() / 448
                tensors[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
                tensors[name.replace(".weight", ".scale_weight")] = scale
    save_file(tensors, folder / "fp8.safetensors")
    path = folder / "fp8.toml"
    path.write_text(f'base = "."\n[weights]\n{HIGH_NOISE} = "fp8.safetensors"\n')
    return path
