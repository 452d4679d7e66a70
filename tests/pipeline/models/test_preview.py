import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.pipeline.errors import InputError, SampleError
from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models import preview
from svdq.pipeline.models.compute.options import ComputeOptions
from svdq.pipeline.models.loader import open_model
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.svd.tiny import SVD_SCHEDULER
from svdq.pipeline.models.video_model import Role
from svdq.pipeline.models.wan.family import WanParameters
from tests.pipeline.rendering import render

ALL = Role.of_rank(0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return open_model(resolve("preview"), ALL, CPU, torch.float32)


@pytest.fixture(scope="module")
def photo(photo_bytes):
    return prepare_photo(photo_bytes, 192, 128)


def parameters(**changes):
    return SvdParameters(**({"frames": 5, "steps": 6, "width": 192, "height": 128, "seed": 4} | changes))


def test_says_what_it_is(model):
    assert model.info.notice == "preview (no diffusion model)"
    assert model.complete(parameters(frames=None)).frames == 25


def test_it_ends_on_the_last_photo_and_a_loop_where_it_begins(model, photo):
    last_photo = photo.transpose(preview.Image.Transpose.ROTATE_180)
    values = model.complete(WanParameters(seed=4, frames=5, steps=3, width=192, height=128, last_image="b"))
    frames = render(model, photo, values, last_photo)
    assert np.array_equal(frames[[0, -1]], [np.asarray(photo), np.asarray(last_photo)])
    frames = render(model, photo, values.model_copy(update={"last_image": None, "loop": True}))
    assert np.array_equal(frames[0], frames[-1])
    assert not np.array_equal(frames[0], frames[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2, 25])
def test_frames_are_clean_and_begin_with_the_photo(photo, dtype, steps):
    model = open_model(resolve("preview"), ALL, CPU, dtype)
    values = parameters(steps=steps)
    frames = render(model, photo, values)
    assert frames.shape == (5, 128, 192, 3)
    assert frames.dtype == np.uint8
    assert np.array_equal(frames[0], np.asarray(photo))
    for frame, box in zip(frames, preview.camera_move(values), strict=True):
        assert np.array_equal(frame, np.asarray(photo.resize(photo.size, preview.Image.Resampling.BICUBIC, box=box)))


def test_it_moves_evenly_and_more_in_a_larger_bucket(model, photo):
    def differences(**changes):
        frames = render(model, photo, parameters(frames=8, **changes)).astype(int)
        return np.abs(np.diff(frames, axis=0)).mean(axis=(1, 2, 3)), np.abs(frames[-1] - frames[0]).mean()

    between, total = differences(motion_bucket_id=127)
    assert between.min() > 0
    assert between.max() < total
    assert differences(motion_bucket_id=10)[1] < total < differences(motion_bucket_id=255)[1]
    assert differences(motion_bucket_id=0)[1] == 0


@given(st.integers(0, 2**63 - 1), st.integers(1, 200), st.integers(0, 1023), st.sampled_from([64, 576, 4096]))
def test_the_camera_stays_within_the_photo(seed, frames, motion_bucket_id, width):
    values = parameters(seed=seed, frames=frames, motion_bucket_id=motion_bucket_id, width=width)
    boxes = preview.camera_move(values)
    assert len(boxes) == frames
    assert boxes[0] == (0, 0, width, 128)
    for left, upper, right, lower in boxes:
        assert 0 <= left < right <= width
        assert 0 <= upper < lower <= 128
        assert (right - left) / (lower - upper) == pytest.approx(width / 128)


def test_direction_comes_from_the_seed():
    ends = {tuple(round(side, 3) for side in preview.camera_move(parameters(seed=seed))[-1]) for seed in range(20)}
    assert len(ends) == 20


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2, 7, 25])
def test_sigmas_are_those_of_diffusers(steps):
    from diffusers import EulerDiscreteScheduler

    scheduler = EulerDiscreteScheduler(**SVD_SCHEDULER)
    scheduler.set_timesteps(steps)
    assert preview.sigmas(steps) == scheduler.sigmas.tolist()


def in_blocks(pixels: np.ndarray) -> torch.Tensor:
    """Rearrange (H, W, 3) of uint8 to values in [-1, 1], (192, H/8, W/8)."""
    blocks = torch.nn.functional.pixel_unshuffle(torch.from_numpy(pixels).permute(2, 0, 1), 8)
    return blocks.to(torch.float32) * (2 / 255) - 1


def answer_of(photo, values):
    """Return the latents of a finished preview, (F, 192, H/8, W/8)."""
    boxes = preview.camera_move(values)
    frames = (photo.resize(photo.size, preview.Image.Resampling.BICUBIC, box=box) for box in boxes)
    return torch.stack([in_blocks(np.array(frame)) for frame in frames])


@pytest.mark.slow
def test_steps_are_those_of_diffusers_scheduler_with_a_perfect_v(model, photo):
    from diffusers import EulerDiscreteScheduler

    values = parameters(steps=9)
    scheduler = EulerDiscreteScheduler(**SVD_SCHEDULER)
    scheduler.set_timesteps(values.steps)
    tensors = model.encode(photo, values)
    denoiser = model.denoiser(tensors, values)
    ours = theirs = tensors["latents"]
    assert ours.std().item() == pytest.approx(float(scheduler.init_noise_sigma), rel=0.01)
    answer = answer_of(photo, values)
    for index, timestep in enumerate(scheduler.timesteps):
        sigma = scheduler.sigmas[index].double()
        scheduler.scale_model_input(theirs, timestep)
        # In double precision: at the largest sigma v hides x0 behind the seventh digit of float32.
        x = theirs.double()
        v = (x / (sigma**2 + 1) - answer) * (sigma**2 + 1).sqrt() / sigma
        theirs = scheduler.step(v, timestep, theirs).prev_sample
        ours = denoiser.step({"latents": ours}, index)["latents"]
        scale = float(scheduler.sigmas[index + 1]) + 1
        assert (ours - theirs).abs().max() < 5e-6 * scale + 1e-6 * float(sigma)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 2**40), st.integers(0, 6), st.integers(1, 2))
def test_bits_depend_neither_on_who_does_a_step_nor_on_threads(photo, model, seed, cut, threads):
    values = parameters(seed=seed, frames=3, steps=6)
    expected = render(model, photo, values)
    tensors = model.encode(photo, values)
    first, second = model.denoiser(tensors, values), model.denoiser(tensors, values)
    torch.set_num_threads(threads)
    for index in range(values.steps):
        tensors |= (first if index < cut else second).step(tensors, index)
    assert np.array_equal(model.decode(tensors, values, 1).numpy(), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_are_checked(model, bad):
    latents = torch.zeros(1, 5, 192, 16, 24)
    latents[0, 3, 7, 2, 2] = bad
    with pytest.raises(SampleError, match="not numbers"):
        model.decode({"latents": latents}, parameters(), 5)


@pytest.mark.parametrize("name", ["preview", "simulated:step_ms=0"])
def test_preview_and_simulated_make_videos_of_any_family(name, image):
    model = open_model(resolve(name), ALL, CPU, torch.float32)
    asked = WanParameters(seed=3, prompt="Ein Hund läuft.", width=64, height=64, frames=5)
    values = model.complete(asked)
    assert (values.prompt, values.steps, values.frames) == (asked.prompt, 40, 5)
    assert render(model, image, values).shape == (5, 64, 64, 3)


def test_a_model_of_one_family_refuses_videos_of_another_with_a_sentence(tiny_model):
    model = open_model(resolve(str(tiny_model)), Role(), CPU, torch.float32)
    with pytest.raises(InputError, match="makes videos of Stable Video Diffusion, and this one is for Wan: start a"):
        model.complete(WanParameters(seed=3))


@pytest.mark.parametrize("weights", ["auto", "stored", "made"])
def test_a_model_without_weights_ignores_how_they_are_held(weights: str) -> None:
    """The setting may be that of other workers, too."""
    for name in ("preview", "simulated"):
        model = open_model(resolve(name), Role(), torch.device("cpu"), torch.float32, ComputeOptions(weights=weights))
        assert model.info.weight_bytes == 0
