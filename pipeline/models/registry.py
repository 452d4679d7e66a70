"""The families of models, by the pipeline that a folder's model_index.json names. Does not import torch.

A family is a package beside this module, with its layout, its model and its memory.
"""

from pathlib import Path

from svdq.pipeline.models.folder_check import Layout, pipeline_of
from svdq.pipeline.models.svd import layout as svd

_LAYOUTS = {layout.pipeline: layout for layout in (svd.LAYOUT,)}


def layout_of(folder: Path, name: str) -> Layout:
    """Return the layout of a model's family, or SVD's for a pipeline that svdq does not run: `check_folder` refuses it.

    Raises:
        InputError: the folder has no readable model_index.json, or it names no pipeline.
    """
    return _LAYOUTS.get(pipeline_of(folder, name), svd.LAYOUT)
