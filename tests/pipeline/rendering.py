"""Videos as diffusers makes them, and as a model makes them step by step, without ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from svdq.pipeline.models.families import family_of
from svdq.pipeline.models.video_model import Denoiser, State, VideoModel
from svdq.pipeline.models.wan.family import FAMILY, WanParameters, curve_of
from svdq.pipeline.models.weights.components import be_quiet
from svdq.pipeline.planning.binding import step_costs
from svdq.pipeline.video_parameters import VideoParameters
from tests.pipeline.references import call_diffusers, open_diffusers


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute with one thread, as a rank does: float32 bits depend on the number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def pipeline_of(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Open diffusers' pipeline of a folder, once; no test may change it for good."""
    be_quiet()  # before the import, since transformers warns while it is imported
    pipeline = open_diffusers(family_of(folder, str(folder))[0].name, str(folder), dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def diffusers_frames(folder: Path, photo: Image, parameters: VideoParameters, **more: Any) -> NDArray[np.uint8]:
    """Render a video with diffusers, called as its users do; return frames (F, H, W, 3); see `call_diffusers`."""
    with one_thread(), mag_cache(folder, parameters):
        frames = call_diffusers(pipeline_of(folder), photo, parameters, **more)[0]
    return np.stack([np.asarray(frame) for frame in frames])


@contextmanager
def mag_cache(folder: Path, parameters: VideoParameters) -> Iterator[None]:
    """Turn on diffusers' cache as a video asks, for each transformer: its part of the curve, its number of steps."""
    if not isinstance(parameters, WanParameters) or not parameters.step_cache:
        yield
        return
    from diffusers.hooks import MagCacheConfig

    facts = FAMILY.read_facts(folder, "reference")
    curve = curve_of(parameters, facts)
    transformers = []
    for segment in FAMILY.unit_costs(parameters, facts).segments:
        transformers.append(getattr(pipeline_of(folder), segment.component))
        config = MagCacheConfig(
            threshold=parameters.step_cache,
            max_skip_steps=curve.max_skip,
            retention_ratio=curve.retention,
            num_inference_steps=segment.stop - segment.start,
            mag_ratios=list(curve.ratios[segment.component]),
        )
        transformers[-1].enable_cache(config)
    yield
    for transformer in transformers:
        transformer.disable_cache()


def denoise(
    model: VideoModel, state: State, parameters: VideoParameters, each: Callable[[Denoiser], None] = lambda _: None
) -> State:
    """Do all steps of a video, and call `each` with its denoiser after each of them."""
    denoiser = model.denoiser(state, parameters, step_costs(model.segments(parameters)))
    for index in range(parameters.steps):
        state = {**state, **denoiser.step(state, index)}
        each(denoiser)
    return state


def render(
    model: VideoModel, photo: Image, parameters: VideoParameters, last_photo: Image | None = None, chunk: int = 0
) -> NDArray[np.uint8]:
    """Make a video with one model; return frames (F, H, W, 3)."""
    state = denoise(model, model.encode(photo, parameters, last_photo), parameters)
    return model.decode(state, parameters, chunk or parameters.num_frames).numpy()
