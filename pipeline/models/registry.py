"""The families of models, by name and by the pipeline that a folder's model_index.json names. Does not import torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import PlainValidator

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Family
from svdq.pipeline.models.folder_check import Layout, pipeline_of
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.names import has_weights
from svdq.pipeline.models.svd.family import FAMILY as SVD
from svdq.pipeline.models.wan.family import FAMILY as WAN
from svdq.pipeline.parameters import VideoParameters

_Class = TypeVar("_Class")

#: All families; the first one is that of parameters which name none.
FAMILIES: tuple[Family, ...] = (SVD, WAN)
DEFAULT_FAMILY = SVD.name
#: The parameters of each family, by its name.
PARAMETERS: Mapping[str, type[VideoParameters]] = {family.name: family.parameters for family in FAMILIES}


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


def family_of_model(name: str) -> str | None:
    """Return the family of a model by its name; None if that is not known on this machine.

    Reads only the model_index.json of a folder, or of a hub id in the cache. `preview` and `simulated` render videos of
    all families.
    """
    if not has_weights(name):
        return None
    try:
        pipeline = pipeline_of(find_folder(name), name)
    except InputError:
        return None
    return next((family.name for family in FAMILIES if pipeline in family.layouts), None)


def parameters_of(model: str) -> type[VideoParameters]:
    """Return the parameters of a model's videos; SVD's if its family is not known."""
    return PARAMETERS[family_of_model(model) or DEFAULT_FAMILY]


def class_for(document: object, classes: Mapping[str, type[_Class]]) -> type[_Class]:
    """Choose from classes by family the one that a document's `family` names; without one, it is SVD's.

    Raises:
        ValueError: there is no such family.
    """
    family = document.get("family", DEFAULT_FAMILY) if isinstance(document, Mapping) else None
    if not isinstance(family, str) or family not in classes:
        raise ValueError(f"there is no family of models {family!r}; the families are {', '.join(classes)}")
    return classes[family]


def parse_parameters(document: object) -> VideoParameters:
    """Make parameters from their JSON, which anyone may have written.

    Raises:
        ValueError: they are not valid (pydantic's ValidationError is one).
    """
    return class_for(document, PARAMETERS).model_validate(document)


#: The parameters of any family, as a field of a pydantic model.
AnyParameters = Annotated[VideoParameters, PlainValidator(parse_parameters)]
