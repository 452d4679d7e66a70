"""What encode and decode cost on one device, against a denoising step.

Without a model, the published sizes of Stable Video Diffusion XT get random weights: time and memory do not depend on
them. Knows no jobs, no ranks and no terminal.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from svdq.pipeline.bench.ends_parts import NAMES, PartFigures, measure_parts
from svdq.pipeline.models.full_size import COMPONENTS, write_full_size_model
from svdq.pipeline.models.model import Part
from svdq.pipeline.parameters import VideoParameters


@contextlib.contextmanager
def folder_of(model: str | None, *, with_unet: bool = True) -> Iterator[str]:
    """Give the model that is to be measured, or a folder of the published sizes while it is needed.

    The random weights are in half precision, so that all types begin with the same ones.

    Args:
        model: a folder or hub id; None for the published sizes.
        with_unet: whether the UNet has its published size, which takes 3 GB of disk.
    """
    if model is not None:
        yield model
        return
    components = [name for name in COMPONENTS if with_unet or name != "unet"]
    with tempfile.TemporaryDirectory(prefix="svdq-bench-") as folder:
        write_full_size_model(Path(folder), torch.float16, components=components)
        yield folder


def measure_ends(
    model: str | None,
    video: VideoParameters,
    *,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    chunk_sizes: Sequence[int],
    repeats: int,
    with_step: bool = True,
) -> Iterator[PartFigures]:
    """Measure encode and decode, and before them a step, which says what they are worth.

    Args:
        model: a folder or hub id; None for the published sizes with random weights.
        video: whose shape is measured.
        device: where to compute.
        dtypes: of weights and activations, one after the other.
        chunk_sizes: frames decoded at a time, one after the other.
        repeats: how often each is measured.
        with_step: whether a step is measured, too.

    Raises:
        InputError: there is no such model.
    """
    parts = [part for part in NAMES if with_step or part is not Part.DENOISER]
    with folder_of(model, with_unet=with_step) as folder:
        for dtype in dtypes:
            step_s = None
            for figures, _ in measure_parts(
                folder, parts, [video], device=device, dtype=dtype, chunk_sizes=chunk_sizes, repeats=repeats
            ):
                if figures.part == "step" and not figures.failure:
                    step_s = figures.seconds
                worth = figures.seconds / step_s if step_s and not figures.failure else None
                yield replace(figures, worth_steps=worth)
