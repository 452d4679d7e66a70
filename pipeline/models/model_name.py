"""What the name of a model says, as in SVDQ_MODEL, without reading the model."""

import os
from pathlib import Path

SUFFIX = ".toml"  # of model files

#: Model files that come with svdq, by the names by which they are used.
PRESETS = dict(sorted((path.stem, str(path)) for path in Path(__file__).with_name("presets").glob("*.toml")))

#: By the name of a preset the one that has what it was before; stored jobs name the former.
FORMERLY = {"wan2.2-4step": "wan2.2-4step-bf16"}


def with_presets(name: str) -> str:
    """Return the path of a preset in place of its name, a path with the home for `~`, and any other name as it is."""
    return name if os.path.exists(name) else os.path.expanduser(PRESETS.get(name, name))


def preset_or_path(model_file: Path) -> str:
    """Return how a model file is named in commands: a preset by its name, any other by its path."""
    is_preset = PRESETS.get(model_file.stem) == str(model_file)
    return model_file.stem if is_preset else str(model_file)


def is_model_file(name: str) -> bool:
    """Return whether a name is that of a model file."""
    return name.endswith(SUFFIX)


def has_weights(name: str) -> bool:
    """Return whether a name is that of a folder, a hub id or a model file, not of a model made in code."""
    return name != "preview" and name.partition(":")[0] != "simulated"


def model_stem(name: str) -> str:
    """Return the last part of a folder, hub id or model file: a model's name without a path of this machine."""
    return name.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX)
