"""The families of models, by name and by the pipeline that a folder's model_index.json names. Does not import torch."""

from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.family_parameters import DEFAULT_FAMILY, PARAMETERS
from svdq.pipeline.models.folder_check import Layout, pipeline_of
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.svd.family import FAMILY as SVD
from svdq.pipeline.models.wan.family import FAMILY as WAN
from svdq.pipeline.parameters import VideoParameters

#: All families; `family_parameters.py` has those of each by its name.
FAMILIES: tuple[Family, ...] = (SVD, WAN)


def family_named(name: str) -> Family:
    """Return the family of a name."""
    return next(family for family in FAMILIES if family.name == name)


def family_for(parameters: VideoParameters) -> Family:
    """Return the family that parameters are of."""
    return next(family for family in FAMILIES if isinstance(parameters, family.parameters))


def family_of(folder: Path, name: str) -> Family:
    """Return the family of a model folder.

    Raises:
        InputError: the folder has no readable model_index.json, or it names no pipeline that svdq runs.
    """
    pipeline = pipeline_of(folder, name)
    for family in FAMILIES:
        if pipeline in family.layouts:
            return family
    raise InputError(f"The model {name} is a {pipeline}; {needed_pipelines()}.")


def layout_of(folder: Path, name: str) -> Layout:
    """Return the layout of a model folder.

    Raises:
        InputError: the folder has no readable model_index.json, or it names no pipeline that svdq runs.
    """
    return family_of(folder, name).layouts[pipeline_of(folder, name)]


def needed_pipelines() -> str:
    """Return a clause with the pipelines that svdq runs."""
    layouts = [layout for family in FAMILIES for layout in family.layouts.values()]
    return "svdq needs a " + " or ".join(f"{layout.pipeline} such as {layout.example}" for layout in layouts)


def parameters_of(model: ResolvedModel) -> type[VideoParameters]:
    """Return the parameters of a model's videos; SVD's for a model that makes those of all families."""
    return PARAMETERS[model.family or DEFAULT_FAMILY]
