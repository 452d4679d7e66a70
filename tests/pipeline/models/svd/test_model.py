"""SVD's bits: wherever its steps are cut, with any parameters and after failed steps, against diffusers."""

import json
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch

from svdq.pipeline.errors import SampleError
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.diffusers_model import to_uint8
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.video_model import Role
from tests.pipeline.rendering import diffusers_frames

CPU = torch.device("cpu")
GUIDANCE = {"on": (1.0, 3.0), "off": (1.0, 1.0), "high": (2.0, 4.5)}  # guidance on, off, and both scales high


def parameters(guidance="on", **changes):
    low, high = GUIDANCE[guidance]
    defaults = {"frames": 3, "steps": 4, "width": 128, "height": 64, "seed": 11, "noise_aug_strength": 0.1}
    return SvdParameters(**(defaults | {"min_guidance_scale": low, "max_guidance_scale": high} | changes))


@pytest.fixture(scope="module")
def ranks(tiny_model):
    """Three ranks' models, one instance for each."""
    return [open_model(resolve(str(tiny_model)), Role.of_rank(rank), CPU, torch.float32) for rank in range(3)]


@pytest.fixture(scope="module")
def reference(tiny_model):
    """The frames that diffusers itself makes of a photo with the arguments that users give."""
    return lambda photo, values, chunk: diffusers_frames(tiny_model, photo, values, decode_chunk_size=chunk)


@pytest.fixture(scope="module")
def photo(photo_bytes):
    return prepare_photo(photo_bytes, 128, 64)


def render(ranks, photo, values, boundaries, decode_chunk_size):
    """Carry one video through ranks that share nothing but its tensors."""
    tensors = ranks[0].encode(photo, values)
    for rank, (first, end) in zip(ranks, pairwise(boundaries), strict=True):
        denoiser = rank.denoiser(tensors, values)
        for index in range(first, end):
            tensors = {**tensors, **denoiser.step(tensors, index)}
    return ranks[-1].decode(tensors, values, decode_chunk_size).numpy()


@pytest.mark.parametrize(
    ("guidance", "steps", "boundaries"),
    [
        ("on", 1, (0, 1, 1, 1)),
        ("off", 4, (0, 1, 2, 4)),
        ("high", 4, (0, 0, 4, 4)),
        ("on", 7, (0, 2, 2, 7)),
    ],
)
def test_same_bits_as_diffusers_wherever_the_steps_are_split(ranks, reference, photo, guidance, steps, boundaries):
    values = parameters(guidance, steps=steps)
    ours = render(ranks, photo, values, boundaries, 3)
    assert np.array_equal(ours, reference(photo, values, 3))
    assert ours.std() > 20


def test_a_step_that_ran_out_of_memory_can_be_repeated_with_the_same_bits(ranks, reference, photo):
    values, model = parameters(), ranks[0]
    tensors = model.encode(photo, values)
    denoiser = model.denoiser(tensors, values)

    def runs_out(*_given):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for index in range(values.steps):
        hook = model.pipeline.unet.conv_out.register_forward_hook(runs_out)
        with pytest.raises(torch.OutOfMemoryError):
            denoiser.step(tensors, index)
        hook.remove()
        tensors = {**tensors, **denoiser.step(tensors, index)}
    assert np.array_equal(model.decode(tensors, values, 3).numpy(), reference(photo, values, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"frames": 1, "min_guidance_scale": 2.0},
        {"fps": 1, "motion_bucket_id": 5, "noise_aug_strength": 0.0, "seed": 2**63 - 1, "width": 64},
    ],
    ids=str,
)
def test_same_bits_as_diffusers_for_other_parameters(ranks, reference, photo_bytes, changes):
    values = parameters(steps=2, **changes)
    photo = prepare_photo(photo_bytes, values.width, values.height, "pad")
    assert np.array_equal(render(ranks, photo, values, (0, 1, 1, 2), 2), reference(photo, values, 2))


def test_one_frame_with_the_default_guidance_works(ranks, photo):
    # diffusers 0.42 stops here: its linspace has only the smallest scale, 1, and it takes guidance for off half way.
    frames = render(ranks, photo, parameters(frames=1), (0, 1, 2, 4), 1)
    assert frames.shape == (1, 64, 128, 3)
    assert frames.std() > 20


def test_nan_is_a_failure_with_a_reason(ranks):
    latents = torch.zeros(1, 3, 4, 8, 16)
    latents[0, 1, 0, 0, 0] = float("nan")
    with pytest.raises(SampleError, match="not numbers"):
        ranks[2].decode({"latents": latents}, parameters(), 3)


@pytest.mark.parametrize(
    ("settings", "steps"), [({"timestep_spacing": "trailing"}, 61), ({"interpolation_type": "log_linear"}, 3)]
)
def test_a_scheduler_that_makes_one_step_more_is_a_failure_with_a_reason(tiny_model, tmp_path, photo, settings, steps):
    """diffusers does that step as well, so without it the video would keep some noise."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_karras_sigmas": False} | settings))
    model = open_model(resolve(str(folder)), Role.of_rank(0), CPU, torch.float32)
    with pytest.raises(SampleError, match=f"makes {steps + 1} steps of {steps}; submit"):
        model.encode(photo, parameters(steps=steps))


@pytest.mark.parametrize("guidance", ["on", "off"])
def test_bfloat16_keeps_its_type_between_ranks(tiny_model, photo, guidance):
    model = SvdModel(resolve(str(tiny_model)), Role.of_rank(0), CPU, torch.bfloat16)
    values = parameters(guidance, steps=2)
    tensors = model.encode(photo, values)
    changed = model.denoiser(tensors, values).step(tensors, 0)
    assert {tensor.dtype for tensor in [*tensors.values(), *changed.values()]} == {torch.bfloat16}


def float_neighbors() -> torch.Tensor:
    """Values of pixels at and beside every boundary between two bytes, extremes, and random ones; (3, F, H, W)."""
    boundaries = (torch.arange(-1, 512, dtype=torch.float64) / 2 / 255 * 2 - 1).float()
    above, below = (torch.nextafter(boundaries, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    tiny = torch.finfo(torch.float32).tiny
    largest = torch.finfo(torch.float32).max
    extremes = torch.tensor([0.0, -0.0, 1.0, -1.0, tiny, -tiny, tiny / 4, largest, -largest, 1e-8, 0.5, -0.5])
    values = torch.cat(
        [boundaries, above, below, extremes, torch.randn(10**5, generator=torch.Generator().manual_seed(1))]
    )
    return values[: len(values) // 24 * 24].view(3, 2, 4, -1).clone()


@pytest.mark.slow
def test_frames_become_the_bytes_of_diffusers_own_conversion() -> None:
    from diffusers.video_processor import VideoProcessor

    video = float_neighbors()
    images = VideoProcessor(vae_scale_factor=8).postprocess_video(video[None], output_type="pil")[0]
    expected = np.stack([np.asarray(image) for image in images])
    assert set(np.unique(expected)) == set(range(256))
    frames = to_uint8(video)
    assert (frames.dtype, frames.is_contiguous()) == (torch.uint8, True)
    np.testing.assert_array_equal(frames.numpy(), expected)
