"""Writes a model folder with Stable Video Diffusion XT's components in full size and random weights, for measuring.

Time and memory do not depend on weights, so machines without the published ones can measure them. Its videos show
noise. Components that are not requested are the tiny model's.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

from svdq.pipeline.models.svd.tiny import write_model
from svdq.pipeline.models.weights.components import be_quiet
from svdq.pipeline.models.weights.model_folder import writing

#: The components' settings as published with stable-video-diffusion-img2vid-xt.
UNET_CONFIG: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 4,
    "block_out_channels": [320, 640, 1280, 1280],
    "cross_attention_dim": 1024,
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 768,
    "num_frames": 25,
    "sample_size": 96,
    "layers_per_block": 2,
    "num_attention_heads": [5, 10, 20, 20],
}
VAE_CONFIG: dict[str, Any] = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "layers_per_block": 2,
    "sample_size": 768,
    "scaling_factor": 0.18215,
    "force_upcast": True,
}
#: CLIP's ViT-H/14.
IMAGE_ENCODER_CONFIG: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_size": 1280,
    "image_size": 224,
    "intermediate_size": 5120,
    "layer_norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 32,
    "patch_size": 14,
    "projection_dim": 1024,
}
#: The components with weights: 3.0, 0.2 and 1.3 GB in half precision.
COMPONENTS = ("unet", "vae", "image_encoder")
#: The small UNet that is written where only other components are measured.
_SMALL_UNET = {"block_out_channels": [32] * 4, "num_attention_heads": [1] * 4, "layers_per_block": 1}


def write_full_size_model(
    folder: Path, dtype: torch.dtype = torch.bfloat16, *, components: Collection[str] = ("unet",)
) -> None:
    """Write the model into `folder`; the same bits every time.

    Args:
        folder: target; empty, new or written by this function before.
        dtype: of the weights in the files.
        components: the components of `COMPONENTS` to write in full size.

    Raises:
        InputError: the folder has other content, or cannot be written.
    """
    be_quiet()
    from diffusers import AutoencoderKLTemporalDecoder, UNetSpatioTemporalConditionModel
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = UNET_CONFIG if "unet" in components else UNET_CONFIG | _SMALL_UNET
    write_model(
        folder,
        embedding_dim=IMAGE_ENCODER_CONFIG["projection_dim"],
        make_unet=lambda: with_random_weights(lambda: UNetSpatioTemporalConditionModel(**config), dtype),
    )
    clip = CLIPVisionConfig(**IMAGE_ENCODER_CONFIG)
    for component, make in {
        "vae": lambda: AutoencoderKLTemporalDecoder(**VAE_CONFIG),
        "image_encoder": lambda: CLIPVisionModelWithProjection(clip),
    }.items():
        if component in components:
            with writing(folder):
                with_random_weights(make, dtype).save_pretrained(folder / component)


def with_random_weights(make: Callable[[], Any], dtype: torch.dtype) -> Any:
    """Create a model with random weights that preserve the spread of activations, as in a trained model.

    It is created without weights. They are then drawn one by one in float32 and rounded, so that models of different
    dtypes have the same weights, and peak memory hardly exceeds the model's size.
    """
    import accelerate  # type: ignore[import-untyped]

    with accelerate.init_empty_weights():
        model = make()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=torch.float32)
        if name.endswith("mix_factor"):
            value.fill_(0.5)
        elif value.ndim < 2:
            # Biases, and scales of norms.
            value.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            value.normal_(std=value[0].numel() ** -0.5, generator=generator)
        accelerate.utils.set_module_tensor_to_device(model, name, "cpu", value=value, dtype=dtype)
    # Not `model.to(dtype)`: buffers may contain indices.
    return model.eval().requires_grad_(False)
