"""Writes models of Wan 2.2 I2V-A14B at their published width with random weights, also in fp8 and as GGUF.

Time and memory do not depend on weights. All blocks of a model have the same, so that 14 billion are drawn in seconds.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpu_checks.full_size import with_random_weights
from svdq.pipeline.models.wan.family import PUBLISHED
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.wan.tiny import write_tiny_wan

NUM_LAYERS: int = PUBLISHED["transformer"]["num_layers"]
#: UMT5 XXL, as published with Wan2.2-I2V-A14B-Diffusers.
TEXT_ENCODER: dict[str, Any] = {"vocab_size": 256384, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64}
NUM_TEXT_LAYERS = 24
#: Widths to try this on a processor.
NARROW = {"num_attention_heads": 2, "ffn_dim": 512}
#: The 4-step model, `wan2.2-4step`, but for its LoRAs, which are fused at load.
FOUR_STEPS = """
[defaults]
steps = 4
guidance_scale = 1.0
{video}
[scheduler]
class = "FlowMatchEulerDiscreteScheduler"
shift = 5.0
sigmas = [1.0, 0.75, 0.5, 0.25]
"""


def write_wide_wan(folder: Path, num_layers: int, *, narrow: bool = False, tiny_vae: bool = False) -> None:
    """Write the model; both experts have the same weights, and its text encoder is tiny unless all layers are there.

    Args:
        folder: new, or written by this function before.
        num_layers: of each expert.
        narrow: whether to write narrow layers and the tiny VAE, which are measured in seconds on a processor.
        tiny_vae: whether to keep the tiny VAE beside wide layers, where only these are measured.
    """
    import diffusers
    import transformers

    write_tiny_wan(folder)
    is_whole = num_layers == NUM_LAYERS and not narrow
    text_dim = diffusers.WanTransformer3DModel.load_config(folder / HIGH_NOISE)["text_dim"]
    config: dict[str, Any] = PUBLISHED["transformer"] | {"num_layers": 1} | (NARROW if narrow else {})
    config["text_dim"] = TEXT_ENCODER["d_model"] if is_whole else text_dim
    expert = with_random_weights(lambda: diffusers.WanTransformer3DModel(**config), torch.bfloat16)
    for component in (HIGH_NOISE, LOW_NOISE):
        shutil.rmtree(folder / component)
    expert.register_to_config(num_layers=num_layers)
    expert.save_config(folder / HIGH_NOISE)
    _write_blocks(folder / HIGH_NOISE, expert, "blocks", num_layers, "diffusion_pytorch_model")
    shutil.copytree(folder / HIGH_NOISE, folder / LOW_NOISE, copy_function=os.link)
    if is_whole:
        shutil.rmtree(folder / "text_encoder")
        texts = transformers.UMT5Config(num_layers=1, feed_forward_proj="gated-gelu", **TEXT_ENCODER)
        encoder = with_random_weights(lambda: transformers.UMT5EncoderModel(texts), torch.bfloat16)
        encoder.config.update({"num_layers": NUM_TEXT_LAYERS, "architectures": ["UMT5EncoderModel"]})
        encoder.config.save_pretrained(folder / "text_encoder")
        _write_blocks(folder / "text_encoder", encoder, "encoder.block", NUM_TEXT_LAYERS, "model")
    if not (narrow or tiny_vae):
        shutil.rmtree(folder / "vae")
        vae = with_random_weights(lambda: diffusers.AutoencoderKLWan(**PUBLISHED["vae"]), torch.float32)
        vae.save_pretrained(folder / "vae")


def _write_blocks(folder: Path, model: Any, blocks: str, number: int, name: str) -> None:
    """Write the weights of a model of one block as those of many equal ones, a file for each."""
    # The embedding of UMT5's encoder is the shared one.
    weights = {each: weight for each, weight in model.state_dict().items() if "embed_tokens" not in each}
    others, index = {each: weight for each, weight in weights.items() if not each.startswith(f"{blocks}.0.")}, {}
    for block in range(number):
        shard = {each.replace(f"{blocks}.0.", f"{blocks}.{block}."): weights[each] for each in weights.keys() - others}
        shard |= others if block == 0 else {}
        file = f"{name}-{block + 1:05}-of-{number:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / f"{name}.safetensors.index.json").write_text(text, encoding="utf-8")


def write_model_file(folder: Path, stored: str, video: str = "") -> Path:
    """Write a model file of the 4-step model, with both experts in bf16, fp8 or Q4_K_M, beside the model; return it."""
    text = 'base = "."\n' + FOUR_STEPS.format(video=video)
    if stored != "bf16":
        weights = {"fp8": _write_fp8, "Q4_K_M": _write_gguf}[stored](folder)
        text += f'[weights]\n{HIGH_NOISE} = "{weights.name}"\n{LOW_NOISE} = "{weights.name}"\n'
    path = folder / f"{stored}.toml"
    path.write_text(text, encoding="utf-8")
    return path


def _stored(folder: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Return the weights of an expert's first file, which has the first block and all else, and the number of files."""
    files = sorted((folder / HIGH_NOISE).glob("*.safetensors"))
    return load_file(files[0]), len(files)


def _copies(name: str, number: int) -> list[str]:
    """Return the names of a weight of the first block in all blocks; of another, its own."""
    if not name.startswith("blocks.0."):
        return [name]
    return [name.replace("blocks.0.", f"blocks.{block}.") for block in range(number)]


def _write_fp8(folder: Path) -> Path:
    """Write an expert as ComfyUI's fp8_scaled files have it."""
    weights, number = _stored(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        parts = {name: weight}
        if name.startswith("blocks.") and name.endswith(".weight") and weight.ndim == 2:
            scale = weight.abs().max().float() / 448
            parts = {name: (weight.float() / scale).to(torch.float8_e4m3fn)}
            parts[name.replace(".weight", ".scale_weight")] = scale
        for each, part in parts.items():
            tensors |= {copy: part.clone() for copy in _copies(each, number)}
    save_file(tensors, folder / "fp8.safetensors")
    return folder / "fp8.safetensors"


def _write_gguf(folder: Path) -> Path:
    """Write an expert as GGUF in Q4_K, with values and second layers in Q6_K, as files called Q4_K_M are."""
    import gguf
    import numpy as np

    weights, number = _stored(folder)
    writer = gguf.GGUFWriter(folder / "Q4_K_M.gguf", "wan")
    for name, weight in weights.items():
        array, kind = weight.float().numpy(), None
        if name.startswith("blocks.") and name.endswith(".weight") and weight.ndim == 2:
            is_larger = name.endswith(("to_v.weight", "ffn.net.2.weight"))
            kind, places = (gguf.GGMLQuantizationType.Q6_K, (208,)) if is_larger else (
                gguf.GGMLQuantizationType.Q4_K, (0, 2)
            )  # fmt: skip
            block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
            blocks = np.random.default_rng(0).integers(0, 256, (array.size // block, num_bytes), dtype=np.uint8)
            for place in places:  # the factors of each block, in float16
                blocks[:, place : place + 2] = np.array([0.0001], np.float16).view(np.uint8)
            array = blocks.reshape(len(array), -1)
        elif array.ndim > 4:
            array = array.reshape(*array.shape[:3], -1)
        for copy in _copies(name, number):
            writer.add_tensor(copy, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "Q4_K_M.gguf"
