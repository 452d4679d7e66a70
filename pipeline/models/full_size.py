"""A model folder with Stable Video Diffusion XT's UNet in full size and random weights: memory and speed, no pictures.

The other components are the tiny model's, with CLIP's projection as wide as the UNet's cross attention. Made for
measuring what the published weights would cost, on machines that have none. Knows nothing of the pipeline that uses it.
"""

from pathlib import Path
from typing import Any

import torch

from svdq.pipeline.models.svd_folder import be_quiet
from svdq.pipeline.models.tiny import write_model

#: The UNet's settings as published with stable-video-diffusion-img2vid-xt.
UNET_CONFIG: dict[str, Any] = {
    "sample_size": 96,
    "in_channels": 8,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 1024,
    "num_attention_heads": (5, 10, 20, 20),
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 768,
    "num_frames": 25,
}


def write_full_size_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model into `folder`, about 3 GB in half precision; the same bits every time.

    Raises:
        InputError: the folder holds something else, or cannot be written.
    """
    be_quiet()
    write_model(folder, embedding_dim=UNET_CONFIG["cross_attention_dim"], make_unet=lambda: full_size_unet(dtype))


def full_size_unet(dtype: torch.dtype, device: torch.device | str = "cpu") -> Any:
    """Make the UNet with weights that keep what passes through them at the spread of a trained model's.

    Made without weights first, so that it never takes more memory than what is returned.
    """
    from diffusers import UNetSpatioTemporalConditionModel

    with torch.device("meta"):
        unet: Any = UNetSpatioTemporalConditionModel(**UNET_CONFIG)
    unet = unet.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in unet.named_parameters():
        if name.endswith("mix_factor"):
            parameter.fill_(0.5)
        elif parameter.ndim < 2:
            # Biases, and what norms multiply by.
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
    return unet
