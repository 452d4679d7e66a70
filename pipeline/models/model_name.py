"""What the name of a model says, as in SVDQ_MODEL, without reading the model."""

import os
from pathlib import Path

SUFFIX = ".toml"  # of model files

#: Model files that come with svdq, by the names by which they are used.
PRESETS = {path.stem: str(path) for path in sorted(Path(__file__).with_name("presets").glob("*.toml"))}


def with_presets(name: str) -> str:
    """Return the path of a preset in place of its name, a path with the home for `~`, and any other name as it is."""
    return name if os.path.exists(name) else os.path.expanduser(PRESETS.get(name, name))


def is_model_file(name: str) -> bool:
    """Return whether a name is that of a model file."""
    return name.endswith(SUFFIX)


def has_weights(name: str) -> bool:
    """Return whether a name is that of a folder, a hub id or a model file, not of a model made in code."""
    return name != "preview" and name.partition(":")[0] != "simulated"


def model_stem(name: str) -> str:
    """Return the last part of a folder, hub id or model file: a model's name without a path of this machine."""
    return name.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX)
