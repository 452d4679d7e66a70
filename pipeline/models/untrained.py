"""Marks model folders that svdq has written with random weights. Does not import torch."""

import json
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.files import writing

#: The file that marks them.
UNTRAINED = "UNTRAINED.md"
_TEXT = """# An untrained model

`svdq model tiny` made this folder. It has the classes and settings of {title}, but its weights are random: what it
makes is noise. Use it to test a pipeline, and to compare one with diffusers.
"""


def is_untrained(folder: Path) -> bool:
    """Return whether a folder is marked as having random weights."""
    return (folder / UNTRAINED).is_file()


def claim(folder: Path, title: str) -> None:
    """Create and mark a folder for an untrained model of a family; one that svdq has written may be written again.

    Raises:
        InputError: the folder has other content, or cannot be written.
    """
    with writing(folder):
        if folder.exists() and any(folder.iterdir()) and not is_untrained(folder):
            raise InputError(f"The folder {folder} is not empty; give a new or empty one for the tiny model.")
        folder.mkdir(parents=True, exist_ok=True)
        # The marker is written first, so that a partial folder can be overwritten.
        (folder / UNTRAINED).write_text(_TEXT.format(title=title), encoding="utf-8")


def name_classes(folder: Path, **classes: object) -> None:
    """Name classes in the index of a model as published models do, whatever the libraries call them here.

    Components that the model lacks keep no class.
    """
    path = folder / "model_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index |= {name: named for name, named in classes.items() if index[name] != [None, None]}
    path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
