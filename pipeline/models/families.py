"""The families of models, by name, by parameters and by model folder. Does not import torch."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import PlainValidator, SerializeAsAny

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Family, FolderLayout
from svdq.pipeline.models.known_model import KnownModel
from svdq.pipeline.models.ltx.family import FAMILY as LTX
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.svd.family import FAMILY as SVD
from svdq.pipeline.models.wan.family import FAMILY as WAN
from svdq.pipeline.models.weights.model_folder import pipeline_of
from svdq.pipeline.video_parameters import VideoParameters

_Class = TypeVar("_Class")

FAMILIES: tuple[Family, ...] = (SVD, WAN, LTX)
DEFAULT_FAMILY = SVD.name  # the family of parameters that name none
PARAMETERS: Mapping[str, type[VideoParameters]] = {family.name: family.parameters for family in FAMILIES}


def family_named(name: str) -> Family:
    """Return the family of a name."""
    return next(family for family in FAMILIES if family.name == name)


def titles_of(having: Callable[[Family], object]) -> str:
    """Return the names of the families that have something, for a sentence."""
    return " and ".join(family.parameters.title for family in FAMILIES if having(family))


@cache
def published_model(family: str) -> KnownModel:
    """Return the published model of a family, which stands for one whose facts are not known."""
    found = family_named(family)
    return KnownModel(name="", family=found, facts=found.published, is_assumed=True)


def family_for(parameters: VideoParameters) -> Family:
    """Return the family that parameters are of."""
    return next(family for family in FAMILIES if isinstance(parameters, family.parameters))


def family_of(folder: Path, name: str) -> tuple[Family, FolderLayout]:
    """Return the family of a model folder, and its kind of folder; raises InputError if svdq cannot run it."""
    pipeline = pipeline_of(folder, name)
    for family in FAMILIES:
        if pipeline in family.layouts:
            return family, family.layouts[pipeline]
    layouts = {layout.pipeline: layout for family in FAMILIES for layout in family.layouts.values()}
    needed = " or ".join(f"{pipeline} such as {layout.example}" for pipeline, layout in layouts.items())
    raise InputError(f"The model {name} is a {pipeline}; svdq needs a {needed}.")


def layout_of(model: ResolvedModel) -> FolderLayout:
    """Return the layout of a model that has a folder."""
    assert model.family is not None
    assert model.layout is not None
    return family_named(model.family).layouts[model.layout]


def parameters_of(model: ResolvedModel) -> type[VideoParameters]:
    """Return the parameters of a model's videos; the default family's for a model that renders all families."""
    return PARAMETERS[model.family or DEFAULT_FAMILY]


def class_for(document: object, classes: Mapping[str, type[_Class]]) -> type[_Class]:
    """Choose from classes by family the one of a document's `family`, or the default; ValueError if there is none."""
    family = document.get("family", DEFAULT_FAMILY) if isinstance(document, Mapping) else None
    if not isinstance(family, str) or family not in classes:
        raise ValueError(f"there is no family of models {family!r}; the families are {', '.join(classes)}")
    return classes[family]


def parse_parameters(document: object) -> VideoParameters:
    """Make parameters from their JSON, which anyone may have written; raises ValueError if they are not valid."""
    return class_for(document, PARAMETERS).model_validate(document)


#: The parameters of any family, as a field of a pydantic model.
AnyParameters = Annotated[SerializeAsAny[VideoParameters], PlainValidator(parse_parameters)]
