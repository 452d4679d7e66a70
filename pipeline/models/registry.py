"""The families of models, by name and by the pipeline that a folder's model_index.json names. Does not import torch."""

from pathlib import Path

from svdq.pipeline.models.family import Family
from svdq.pipeline.models.folder_check import Layout, pipeline_of
from svdq.pipeline.models.svd.family import FAMILY as SVD
from svdq.pipeline.parameters import VideoParameters

#: All families; the first one is that of parameters which name none.
FAMILIES: tuple[Family, ...] = (SVD,)


def family_for(parameters: VideoParameters) -> Family:
    """Return the family that parameters are of."""
    return next(family for family in FAMILIES if isinstance(parameters, family.parameters))


def family_of(folder: Path, name: str) -> Family:
    """Return the family of a model folder, or SVD for a pipeline that svdq does not run: `check_folder` refuses it.

    Raises:
        InputError: the folder has no readable model_index.json, or it names no pipeline.
    """
    pipeline = pipeline_of(folder, name)
    return next((family for family in FAMILIES if pipeline in family.layouts), SVD)


def layout_of(folder: Path, name: str) -> Layout:
    """Return the layout of a model folder, or SVD's for a pipeline that svdq does not run: `check_folder` refuses it.

    Raises:
        InputError: the folder has no readable model_index.json, or it names no pipeline.
    """
    layouts = family_of(folder, name).layouts
    return layouts.get(pipeline_of(folder, name)) or next(iter(layouts.values()))
