"""Checks whether a model can be used, without torch and without the network."""

import math
from collections.abc import Iterator
from pathlib import Path

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.folder_check import WEIGHTS, find_problems, stored, variants
from svdq.pipeline.models.hub import find_folder
from svdq.pipeline.models.memory import WORKSPACE_BYTES, Activity, estimate, shape_for, size_text
from svdq.pipeline.models.names import has_weights, timings_of
from svdq.pipeline.models.svd.layout import UNET_DEFAULTS, is_untrained, read_json
from svdq.pipeline.parameters import VideoParameters
from svdq.producer.doctor import Finding, failure

SUBJECT = "model"


def check_model(name: str) -> Iterator[Finding]:
    """Check the model with a name as in SVDQ_MODEL; nothing is fetched.

    Args:
        name: `preview`, `simulated[:…]`, a folder or a hub id.
    """
    if name == "preview":
        yield Finding(subject=SUBJECT, level="ok", text="preview (no diffusion model); SVDQ_MODEL chooses another")
        return
    try:
        if has_weights(name):
            yield from _check_folder(find_folder(name), name)
        else:
            timings_of(name)
            yield Finding(subject=SUBJECT, level="ok", text=f"{name} (its compute is a sleep, it makes no pictures)")
    except InputError as error:
        yield failure(SUBJECT, error)


def _check_folder(folder: Path, name: str) -> Iterator[Finding]:
    problems = list(find_problems(folder, name))
    for problem in problems:
        yield Finding(subject=SUBJECT, level="fail", text=problem.text, advice=problem.advice)
    if problems:
        return
    found = {component: variants(folder, component) for component in WEIGHTS}
    if half_only := [component for component, kinds in found.items() if kinds == {True}]:
        yield Finding(
            subject=SUBJECT,
            level="warn",
            text=f"{name} has only half precision weights ({', '.join(half_only)})",
            advice="they suffice for GPUs; to render on a CPU, fetch the full ones, too",
        )
    size = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
    notice = ", untrained: shows noise" if is_untrained(folder) else ""
    yield Finding(
        subject=SUBJECT, level="ok", text=f"{name}, a whole StableVideoDiffusionPipeline, {size_text(size)}{notice}"
    )
    if not notice:
        yield Finding(subject="memory", level="ok", text=_memory(folder, name))


def _memory(folder: Path, name: str) -> str:
    """Describe how much GPU memory the default video needs, as a worker estimates it, on a rank with all components."""
    tensors = [
        tensor
        for component in WEIGHTS
        for tensor in stored(folder, component, half=True in variants(folder, component)).values()
    ]
    weights = 2 * sum(math.prod(tensor.shape) for tensor in tensors)
    frames = (UNET_DEFAULTS | read_json(folder / "unet" / "config.json", name))["num_frames"]
    video = VideoParameters(seed=0, frames=frames, decode_chunk_size=1)
    activities: tuple[Activity, ...] = ("encode", "step", "decode")
    peak = max(estimate(each, shape_for(each, video), "float16", has_decoder=True) for each in activities)
    need = size_text(weights + peak + WORKSPACE_BYTES)
    return f"{video.width}x{video.height} with {frames} frames needs at most about {need} of a GPU in float16"
