"""Writes an untrained SVD with the classes of diffusers, small enough for tests, as `untrained.py` says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.untrained import CLIP, claim, enlarge, image_processor, save
from svdq.pipeline.models.weights.components import be_quiet

_EMBEDDING_DIM = 32  # of CLIP
#: The scheduler's settings as published with stable-video-diffusion-img2vid-xt.
SVD_SCHEDULER: dict[str, Any] = {
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
    """Write a model of SVD of less than 15 MB; raises InputError if the folder has content of others."""
    write_model(folder, embedding_dim=_EMBEDDING_DIM, make_unet=_tiny_unet)


def write_model(folder: Path, *, embedding_dim: int, make_unet: Callable[[], Any]) -> None:
    """Write a model of SVD with any UNet; `embedding_dim` is its cross_attention_dim, CLIP's projection."""
    claim(folder, SvdParameters.title)
    be_quiet()
    from diffusers import AutoencoderKLTemporalDecoder, EulerDiscreteScheduler, StableVideoDiffusionPipeline
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

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
        clip = CLIPVisionConfig(hidden_size=32, projection_dim=embedding_dim, **CLIP)
        image_encoder = CLIPVisionModelWithProjection(clip)
    enlarge(vae.quant_conv.weight, 6.0)
    enlarge(vae.decoder.conv_out.weight, 4.0)
    pipeline: Any = StableVideoDiffusionPipeline(
        vae=vae.eval(),
        image_encoder=image_encoder.eval(),
        unet=unet.eval(),
        scheduler=EulerDiscreteScheduler(**SVD_SCHEDULER),
        feature_extractor=image_processor(),
    )
    save(pipeline, folder, feature_extractor=["transformers", "CLIPImageProcessor"])


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
    enlarge(unet.conv_out.weight, 3.0)
    return unet
