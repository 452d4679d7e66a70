"""Folders of untrained models: claimed and marked, written whole, with weights whose frames vary.

Structure and settings are the published ones (compression of the VAEs, CLIP at 224 px, patches, schedulers, boundary);
only the widths are small, and the weights are random: the same bytes every time. Their videos show noise.
"""

import json
from pathlib import Path
from typing import Any

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.weights.model_folder import INDEX, UNTRAINED, is_untrained, writing

_README = """# An untrained model

`svdq model tiny` made this folder. It has the classes and settings of {title}, but its weights are random: what it
makes is noise. Use it to test a pipeline, and to compare one with diffusers.
"""

#: Sizes of an image encoder.
CLIP: dict[str, Any] = {
    "image_size": 224,
    "patch_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def claim(folder: Path, title: str) -> None:
    """Create and mark a folder for the model; one that svdq has written may be written again."""
    with writing(folder):
        if folder.exists() and any(folder.iterdir()) and not is_untrained(folder):
            raise InputError(f"The folder {folder} is not empty; give a new or empty one for the tiny model.")
        folder.mkdir(parents=True, exist_ok=True)
        # The marker is written first, so that a partial folder can be overwritten.
        (folder / UNTRAINED).write_text(_README.format(title=title), encoding="utf-8")


def save(pipeline: Any, folder: Path, **classes: object) -> None:
    """Write the model; its index names `classes` as published models do, whatever the libraries call them here."""
    with writing(folder):
        pipeline.save_pretrained(folder)
        path = folder / INDEX
        index = json.loads(path.read_text(encoding="utf-8"))
        index |= {name: named for name, named in classes.items() if index[name] != [None, None]}
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def enlarge(weight: torch.Tensor, factor: float) -> None:
    """Scale a last layer by an empirical factor: fresh layers shrink their input, and frames would hardly vary."""
    with torch.no_grad():
        weight.mul_(factor)


def image_processor() -> Any:
    """Return CLIP's, for 224x224 pixels."""
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
