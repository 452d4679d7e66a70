"""What a folder must hold to be a StableVideoDiffusionPipeline, by its model_index.json. Knows no torch, no weights."""

import json
import re
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError

#: The components of the pipeline and the classes that this package's arithmetic is written for.
COMPONENTS = {
    "unet": "UNetSpatioTemporalConditionModel",
    "vae": "AutoencoderKLTemporalDecoder",
    "image_encoder": "CLIPVisionModelWithProjection",
    "feature_extractor": "CLIPImageProcessor",
    "scheduler": "EulerDiscreteScheduler",
}

#: Other names of the feature extractor's class: old models', and that of transformers without torchvision.
_IMAGE_PROCESSORS = {"CLIPFeatureExtractor", "CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"}

#: The form of a hub id: organisation/model.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_index(path: Path, name: str) -> None:
    """Check that the index names the pipeline, and all its components by the right classes, and that they are there.

    Args:
        path: the folder.
        name: what it is called in messages.

    Raises:
        InputError: it is not a whole StableVideoDiffusionPipeline.
    """
    index = read_json(path / "model_index.json", name)
    pipeline_class = index.get("_class_name")
    if pipeline_class != "StableVideoDiffusionPipeline":
        raise InputError(
            f"The model {name} is a {pipeline_class}; svdq needs a StableVideoDiffusionPipeline such as "
            "stabilityai/stable-video-diffusion-img2vid-xt."
        )
    for component, expected in COMPONENTS.items():
        entry = index.get(component)  # [library, class], or null for what the pipeline does without
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        if found is None or not (path / component).is_dir():
            raise InputError(f"The model {name} has no {component}; it must be a whole StableVideoDiffusionPipeline.")
        accepted = _IMAGE_PROCESSORS if component == "feature_extractor" else {expected}
        if found not in accepted:
            raise InputError(f"The {component} of the model {name} is a {found}; svdq works with {expected} only.")


def read_json(path: Path, name: str) -> dict[str, Any]:
    """Read one JSON file of a model folder.

    Raises:
        InputError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"The model {name} has no readable {path.parent.name}/{path.name}; "
            "give a folder that diffusers' save_pretrained has written."
        ) from error
    if not isinstance(content, dict):
        raise InputError(f"The model {name} has a {path.name} that is not a JSON object.")
    return content
