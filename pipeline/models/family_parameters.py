"""The parameters of each family of models by its name, and how they are made from JSON."""

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import PlainValidator, SerializeAsAny

from svdq.pipeline.models.svd.parameters import SvdParameters
from svdq.pipeline.models.wan.parameters import WanParameters
from svdq.pipeline.parameters import VideoParameters

_Class = TypeVar("_Class")

#: The family of parameters that name none.
DEFAULT_FAMILY = "svd"
#: The parameters of each family, by its name.
PARAMETERS: Mapping[str, type[VideoParameters]] = {DEFAULT_FAMILY: SvdParameters, "wan": WanParameters}


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
AnyParameters = Annotated[SerializeAsAny[VideoParameters], PlainValidator(parse_parameters)]
