"""Opens a resolved model: preview, simulated, or a folder through its family."""

from dataclasses import replace

import torch

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.compute.options import DEFAULTS, ComputeOptions
from svdq.pipeline.models.families import DEFAULT_FAMILY, family_named
from svdq.pipeline.models.family import imported
from svdq.pipeline.models.lora_folder import NO_LORAS, LoraFolder
from svdq.pipeline.models.resolved_model import ResolvedModel
from svdq.pipeline.models.video_model import Role, VideoModel
from svdq.pipeline.models.weights.model_folder import DTYPES


def dtype_for(model: ResolvedModel, device: torch.device, options: ComputeOptions = DEFAULTS) -> torch.dtype:
    """Return the dtype that a model computes in; auto is float32 on CPUs, as in diffusers, else its family's half."""
    auto = "fp32" if device.type == "cpu" else family_named(model.family or DEFAULT_FAMILY).half
    dtype: torch.dtype = getattr(torch, DTYPES[auto if options.dtype == "auto" else options.dtype])
    return dtype


def open_model(
    model: ResolvedModel,
    role: Role,
    device: torch.device,
    dtype: torch.dtype,
    options: ComputeOptions = DEFAULTS,
    loras: LoraFolder = NO_LORAS,
) -> VideoModel:
    """Open a model for a role, with only the components that it needs; raises InputError if it cannot be loaded.

    `loras` are those that jobs may choose.
    """
    # Imported on demand: diffusers takes seconds, and a preview or simulated group does not need it.
    if model.family is not None:
        from svdq.pipeline.models.compute.failures import in_a_sentence

        with in_a_sentence(f"The model {model.name}", device):
            opened: VideoModel = imported(family_named(model.family).model)(model, role, device, dtype, options, loras)
            return opened
    if replace(options, weights=DEFAULTS.weights) != DEFAULTS:
        raise InputError(
            f"The model {model.name} has no weights, so it cannot be run with {', '.join(sorted(options.changed()))}; "
            "leave that out, or set SVDQ_MODEL to the folder or hub id of a model."
        )
    if model.timings is not None:
        from svdq.pipeline.models.simulated import SimulatedModel

        return SimulatedModel(model.timings, role, device, model.name)
    from svdq.pipeline.models.preview import PreviewModel

    return PreviewModel(device, dtype)
