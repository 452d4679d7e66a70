"""The folder of a Stable Video Diffusion model: its components, and what their configs must say. Without torch."""

from pathlib import Path
from typing import Any

from svdq.pipeline.models.folder_check import Layout, Setting, check_counts, check_processor, check_settings
from svdq.pipeline.models.folder_files import read_json

UNET_CLASS, VAE_CLASS = "UNetSpatioTemporalConditionModel", "AutoencoderKLTemporalDecoder"
#: Defaults of a UNet's config: diffusers' defaults, which are SVD-XT's.
UNET_DEFAULTS: dict[str, Any] = {
    "in_channels": 8,
    "out_channels": 4,
    "block_out_channels": [320, 640, 1280, 1280],
    "cross_attention_dim": 1024,
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 768,
    "num_frames": 25,
}


def check_configs(folder: Path, name: str) -> None:
    """Check that the components are configured as in Stable Video Diffusion and fit each other.

    Raises:
        InputError: a config cannot be read, or does not match SVD.
    """
    unet = UNET_DEFAULTS | read_json(folder, "unet/config.json", name)
    vae = read_json(folder, "vae/config.json", name)
    encoder = read_json(folder, "image_encoder/config.json", name)
    read_json(folder, "scheduler/scheduler_config.json", name)
    check_processor(folder, "feature_extractor", name)
    time_embed_dim, widths = unet["addition_time_embed_dim"], vae.get("block_out_channels")
    settings: list[Setting] = [
        ("unet", "class", unet.get("_class_name", UNET_CLASS), UNET_CLASS, ""),
        ("vae", "class", vae.get("_class_name", VAE_CLASS), VAE_CLASS, ""),
        ("unet", "in_channels", unet["in_channels"], 8, "latents and the photo"),
        ("unet", "out_channels", unet["out_channels"], 4, "the latents"),
        (
            "unet",
            "projection_class_embeddings_input_dim",
            unet["projection_class_embeddings_input_dim"],
            3 * time_embed_dim if isinstance(time_embed_dim, int) else 0,
            "fps, motion and noise",
        ),
        (
            "unet",
            "cross_attention_dim",
            unet["cross_attention_dim"],
            encoder.get("projection_dim", 512),
            "the image encoder's projection_dim",
        ),
        ("vae", "latent_channels", vae.get("latent_channels", 4), 4, "what the unet makes"),
        ("vae", "number of blocks", len(widths) if isinstance(widths, list) else widths, 4, "one pixel in 8"),
    ]
    check_settings(name, "Stable Video Diffusion", settings, LAYOUT.pipeline)
    check_counts(name, "unet", unet, ["num_frames"])


LAYOUT = Layout(
    pipeline="StableVideoDiffusionPipeline",
    example="stabilityai/stable-video-diffusion-img2vid-xt",
    components={
        "unet": (UNET_CLASS,),
        "vae": (VAE_CLASS,),
        "image_encoder": ("CLIPVisionModelWithProjection",),
        # The other names are those of old models, and of transformers without torchvision.
        "feature_extractor": (
            "CLIPImageProcessor",
            "CLIPFeatureExtractor",
            "CLIPImageProcessorFast",
            "CLIPImageProcessorPil",
        ),
        "scheduler": ("EulerDiscreteScheduler",),
    },
    denoisers=frozenset({"unet"}),
    weighted=("unet", "vae", "image_encoder"),
    check_configs=check_configs,
)
