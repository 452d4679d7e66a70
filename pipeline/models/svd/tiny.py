"""Writes an untrained model with Stable Video Diffusion's classes, small enough for tests. Its videos show noise.

Structure and settings are SVD's (8x downsampling, CLIP at 224 px, all numbers of the scheduler); only the widths are
small, and the weights are random.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from svdq.pipeline.models.components import be_quiet
from svdq.pipeline.models.folder_files import claim, name_classes, writing
from svdq.pipeline.models.svd.parameters import SvdParameters

#: Width of CLIP's projection, the input of the UNet's cross attention.
_EMBEDDING_DIM = 32

#: Fresh layers shrink their input; these empirical factors of last layers restore the spread of a trained model's
#: latents and pixels, so that frames vary and comparisons of their bits are meaningful.
_LIVELY = {"unet": 3.0, "quant_conv": 6.0, "decoder": 4.0}

#: The scheduler's settings as published with stable-video-diffusion-img2vid-xt.
SCHEDULER_CONFIG: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "interpolation_type": "linear",
    "use_karras_sigmas": True,
    "sigma_min": 0.002,
    "sigma_max": 700.0,
    "timestep_spacing": "leading",
    "timestep_type": "continuous",
    "steps_offset": 1,
}


def write_tiny_model(folder: Path) -> None:
    """Write the model into `folder`, a diffusers directory of less than 15 MB; the same bytes every time.

    A folder that this function has written before is overwritten.

    Raises:
        InputError: the folder has other content, or cannot be written.
    """
    write_model(folder, embedding_dim=_EMBEDDING_DIM, make_unet=_tiny_unet)


def write_model(folder: Path, *, embedding_dim: int, make_unet: Callable[[], Any]) -> None:
    """Write an untrained model with a UNet of any size; its other components are tiny.

    Args:
        folder: target; empty, new or written by this function before.
        embedding_dim: width of CLIP's projection, the UNet's cross_attention_dim.
        make_unet: creates the UNet, with random weights.

    Raises:
        InputError: the folder has other content, or cannot be written.
    """
    claim(folder, SvdParameters.title)
    be_quiet()
    from diffusers import AutoencoderKLTemporalDecoder, EulerDiscreteScheduler, StableVideoDiffusionPipeline
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        unet = make_unet()
        vae: Any = AutoencoderKLTemporalDecoder(
            sample_size=128,
            block_out_channels=(32, 32, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 4,
            layers_per_block=1,
            scaling_factor=0.18215,
        )
        image_encoder = CLIPVisionModelWithProjection(
            CLIPVisionConfig(
                image_size=224,
                patch_size=32,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                projection_dim=embedding_dim,
            )
        )
        with torch.no_grad():
            vae.quant_conv.weight.mul_(_LIVELY["quant_conv"])
            vae.decoder.conv_out.weight.mul_(_LIVELY["decoder"])
    pipeline: Any = StableVideoDiffusionPipeline(
        vae=vae.eval(),
        image_encoder=image_encoder.eval(),
        unet=unet.eval(),
        scheduler=EulerDiscreteScheduler(**SCHEDULER_CONFIG),
        feature_extractor=CLIPImageProcessor(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224}),
    )
    with writing(folder):
        pipeline.save_pretrained(folder)
        name_classes(folder, feature_extractor=["transformers", "CLIPImageProcessor"])


def _tiny_unet() -> Any:
    from diffusers import UNetSpatioTemporalConditionModel

    unet: Any = UNetSpatioTemporalConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        # Attention only at half the resolution, where it costs a quarter.
        down_block_types=("DownBlockSpatioTemporal", "CrossAttnDownBlockSpatioTemporal"),
        up_block_types=("CrossAttnUpBlockSpatioTemporal", "UpBlockSpatioTemporal"),
        layers_per_block=1,
        num_attention_heads=(2, 4),
        cross_attention_dim=_EMBEDDING_DIM,
        addition_time_embed_dim=32,
        projection_class_embeddings_input_dim=3 * 32,
        num_frames=14,
    )
    with torch.no_grad():
        unet.conv_out.weight.mul_(_LIVELY["unet"])
    return unet
