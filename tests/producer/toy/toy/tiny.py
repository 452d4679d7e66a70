"""Writes an untrained toy: a folder as diffusers' save_pretrained would write it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from svdq.pipeline.models.untrained import claim, enlarge
from svdq.pipeline.models.weights.model_folder import writing
from toy.family import COARSE, CODEC, FINE, LAYOUT, PUBLISHED, ToyParameters
from toy.model import ToyCodec, ToyExpert


def write_tiny_toy(folder: Path) -> None:
    """Write a model of a few kilobytes; raises InputError if the folder has content of others."""
    claim(folder, ToyParameters.title)
    index = {"_class_name": LAYOUT.pipeline, **{name: ["toy", kind] for name, (kind,) in LAYOUT.components.items()}}
    with writing(folder), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for component, kind in {COARSE: ToyExpert, FINE: ToyExpert, CODEC: ToyCodec}.items():
            (folder / component).mkdir(exist_ok=True)
            (folder / component / "config.json").write_text(json.dumps(PUBLISHED))
            made = kind.from_config(PUBLISHED)
            if component == CODEC:
                enlarge(made.decoder.weight, 5.0)
            save_file(made.state_dict(), folder / component / "model.safetensors")
        (folder / "model_index.json").write_text(json.dumps(index))
