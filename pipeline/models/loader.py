"""Opens a model by name: preview, simulated, or the family of a diffusers folder."""

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.base import Role, VideoModel
from svdq.pipeline.models.diffusers_model import DiffusersModel
from svdq.pipeline.models.family import imported
from svdq.pipeline.models.family_parameters import DEFAULT_FAMILY
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.names import has_weights
from svdq.pipeline.models.options import DEFAULTS, ComputeOptions, dtype_of
from svdq.pipeline.models.registry import family_named, family_of, family_of_model


def dtype_for(name: str, device: torch.device, options: ComputeOptions = DEFAULTS) -> torch.dtype:
    """Return the dtype that a model computes in.

    By default that is float32 on CPUs, where results equal diffusers' bit by bit, and on GPUs the half precision of the
    model's family.
    """
    family = family_of_model(name) or DEFAULT_FAMILY
    return dtype_of(options, device, family_named(family).half)


def open_model(
    name: str, role: Role, device: torch.device, dtype: torch.dtype, options: ComputeOptions = DEFAULTS
) -> VideoModel:
    """Open a model: `preview`, `simulated[:key=value,…]`, or a diffusers folder or hub id.

    Only the components that the role needs are loaded; `dtype` overrides that of the options.

    Raises:
        InputError: the model does not exist, cannot be loaded, or has no weights for the options.
    """
    if not has_weights(name) and options != DEFAULTS:
        raise InputError(
            f"The model {name} has no weights, so it cannot be run with {', '.join(sorted(options.changed()))}; "
            "leave that out, or set SVDQ_MODEL to the folder or hub id of a model."
        )
    # Imported on demand: diffusers takes seconds, and a preview or simulated group does not need it.
    if name == "preview":
        from svdq.pipeline.models.preview import PreviewModel

        return PreviewModel(role, device, dtype)
    if not has_weights(name):
        from svdq.pipeline.models.simulated import SimulatedModel

        return SimulatedModel.from_name(name, role, device)
    return open_folder(name, role, device, dtype, options)


def open_folder(
    name: str, role: Role, device: torch.device, dtype: torch.dtype, options: ComputeOptions = DEFAULTS
) -> DiffusersModel:
    """Open a diffusers folder or hub id; see `open_model`."""
    from svdq.pipeline.models.load_errors import in_a_sentence

    with in_a_sentence(f"The model {name}", device):
        model: DiffusersModel = imported(family_of(find_folder(name), name).model)(name, role, device, dtype, options)
        return model
