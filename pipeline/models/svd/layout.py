"""Checks that a folder is a StableVideoDiffusionPipeline, by its model_index.json and configs, without torch."""

import json
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError

#: The components of the pipeline and their supported classes.
COMPONENTS = {
    "unet": "UNetSpatioTemporalConditionModel",
    "vae": "AutoencoderKLTemporalDecoder",
    "image_encoder": "CLIPVisionModelWithProjection",
    "feature_extractor": "CLIPImageProcessor",
    "scheduler": "EulerDiscreteScheduler",
}

#: The file that marks a folder as written by svdq with random weights.
UNTRAINED = "UNTRAINED.md"

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

#: Other names of the feature extractor's class: in old models, and in transformers without torchvision.
_IMAGE_PROCESSORS = {"CLIPFeatureExtractor", "CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"}


def check_index(path: Path, name: str) -> None:
    """Check that the index names the pipeline and all its components by the right classes, and that they exist.

    Args:
        path: the folder.
        name: name of the model in messages.

    Raises:
        InputError: the folder is not a complete StableVideoDiffusionPipeline.
    """
    index = read_json(path / "model_index.json", name)
    pipeline_class = index.get("_class_name")
    if not isinstance(pipeline_class, str):
        raise InputError(
            f"The model {name} has a model_index.json that names no pipeline (_class_name); "
            "give a folder that diffusers' save_pretrained has written."
        )
    if pipeline_class != "StableVideoDiffusionPipeline":
        raise InputError(
            f"The model {name} is a {pipeline_class}; svdq needs a StableVideoDiffusionPipeline such as "
            "stabilityai/stable-video-diffusion-img2vid-xt."
        )
    for component, expected in COMPONENTS.items():
        entry = index.get(component)  # [library, class], or null for an optional component
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if not isinstance(found, str) or not (path / component).is_dir():
            raise InputError(f"The model {name} has no {component}; it must be a whole StableVideoDiffusionPipeline.")
        accepted = _IMAGE_PROCESSORS if component == "feature_extractor" else {expected}
        if found not in accepted:
            raise InputError(f"The {component} of the model {name} is a {found}; svdq works with {expected} only.")


def check_configs(path: Path, name: str) -> None:
    """Check that the components are configured as in Stable Video Diffusion and fit each other.

    Args:
        path: the folder.
        name: name of the model in messages.

    Raises:
        InputError: a config cannot be read, or does not match SVD.
    """
    unet = UNET_DEFAULTS | read_json(path / "unet" / "config.json", name)
    vae = read_json(path / "vae" / "config.json", name)
    encoder = read_json(path / "image_encoder" / "config.json", name)
    read_json(path / "scheduler" / "scheduler_config.json", name)
    # The name that transformers writes, and the one that composite processors share.
    processors = [path / "feature_extractor" / f"{kind}_config.json" for kind in ("preprocessor", "processor")]
    read_json(next((config for config in processors if config.exists()), processors[0]), name)
    widths = vae.get("block_out_channels")
    # Component, setting, actual value, required value, reason.
    facts = [
        ("unet", "class", unet.get("_class_name", COMPONENTS["unet"]), COMPONENTS["unet"], ""),
        ("vae", "class", vae.get("_class_name", COMPONENTS["vae"]), COMPONENTS["vae"], ""),
        ("unet", "in_channels", unet["in_channels"], 8, "latents and the photo"),
        ("unet", "out_channels", unet["out_channels"], 4, "the latents"),
        (
            "unet",
            "projection_class_embeddings_input_dim",
            unet["projection_class_embeddings_input_dim"],
            3 * _number(unet["addition_time_embed_dim"]),
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
    for component, what, found, expected, why in facts:
        if found != expected:
            raise InputError(
                f"The {component} of the model {name} is not that of Stable Video Diffusion: its {what} is {found} "
                f"where it must be {expected}{why and f' ({why})'}; give a StableVideoDiffusionPipeline."
            )
    num_frames = unet["num_frames"]
    if type(num_frames) is not int or num_frames < 1:
        raise InputError(f"The unet of the model {name} has num_frames {num_frames!r}; it must be a number such as 25.")


def _number(value: Any) -> int:
    return value if isinstance(value, int) else 0


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read one JSON file of a model folder.

    Raises:
        InputError: the file cannot be read.
    """
    place = f"{path.parent.name}/{path.name}" if path.parent.name in COMPONENTS else path.name
    try:
        if path.exists() and not path.is_file():
            raise OSError(f"{path} is not a regular file")  # reading a pipe would block
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"The model {name} has no readable {place}; give a folder that diffusers' save_pretrained has written."
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"The {place} of the model {name} is not a JSON object.")
    return content


def is_untrained(folder: Path) -> bool:
    """Return whether a folder is marked as having random weights."""
    return (folder / UNTRAINED).is_file()
