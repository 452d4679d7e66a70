"""Writes a model of Wan 2.2 I2V-A14B at its published width with few layers and random weights, for measuring."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from gpu_checks.full_size import with_random_weights
from svdq.pipeline.models.tiny import write_tiny_wan
from svdq.pipeline.models.wan.family import PUBLISHED
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE

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
