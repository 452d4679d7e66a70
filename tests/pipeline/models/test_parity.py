"""Everything that goes into the UNet, for all that diffusers' `__call__` can be asked of SVD: equal bit by bit.

The UNet itself is stood in for by a cheap function that depends on all its inputs, so that many options can be tried;
the real arithmetic is compared in `svd/test_model.py`, and here for whole videos by the long tests.
"""

import numpy as np
import pytest
import torch

from svdq.pipeline.media.image import prepare_photo
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.pipeline.models.svd.model import SvdModel
from svdq.pipeline.models.video_model import Role
from tests.pipeline.references import call_diffusers
from tests.pipeline.rendering import pipeline_of

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
#: Divisors of 1000 and not, powers of 3 (where a rounding once went wrong), fewer and more than ranks.
STEP_COUNTS = [1, 2, 3, 4, 5, 7, 9, 10, 14, 20, 25, 27, 28, 30, 50, 81, 100, 243, 333, 500, 999, 1000]


class CheapUnet:
    """A function of everything that the UNet is given, which it writes down."""

    def __init__(self) -> None:
        self.calls: list[list[torch.Tensor]] = []

    def __call__(self, sample, timestep, encoder_hidden_states, added_time_ids, return_dict):
        self.calls.append([tensor.clone() for tensor in (sample, timestep, encoder_hidden_states, added_time_ids)])
        scale = torch.cos(timestep + added_time_ids.sum(dim=1) / 100 + encoder_hidden_states.sum(dim=(1, 2)))
        return ((sample[:, :, :4] * 0.3 + sample[:, :, 4:]) * scale[:, None, None, None, None],)


class Both:
    """diffusers' pipeline and our model of one folder, whose UNets can be stood in for."""

    def __init__(self, folder, photo) -> None:
        self.photo = photo
        self.ours = SvdModel(resolve(str(folder)), Role.of_rank(0), CPU, torch.float32)
        self.theirs = pipeline_of(folder)

    def call(self, values: SvdParameters, output_type: str, decode_chunk_size: int | None = None):
        """The frames of diffusers, called as its users do."""
        return call_diffusers(
            self.theirs, self.photo, values, decode_chunk_size=decode_chunk_size, output_type=output_type
        )

    def render(self, values: SvdParameters):
        """The tensors with our final latents. Every other step is done by another rank's denoiser."""
        tensors = self.ours.encode(self.photo, values)
        denoisers = [self.ours.denoiser(tensors, values) for _ in range(2)]
        for index in range(values.steps):
            tensors = {**tensors, **denoisers[index % 2].step(tensors, index)}
        return tensors

    def same_with_a_cheap_unet(self, monkeypatch: pytest.MonkeyPatch, values: SvdParameters) -> CheapUnet:
        """Compare all inputs of the UNet, and the final latents."""
        with monkeypatch.context() as patch:
            calls = []
            for unet in (self.theirs.unet, self.ours.pipeline.unet):
                calls.append(CheapUnet())
                patch.setattr(unet, "forward", calls[-1])
            expected = self.call(values, "latent")
            ours = self.render(values)["latents"]
        assert len(calls[0].calls) == values.steps
        for theirs_in, ours_in in zip(calls[0].calls, calls[1].calls, strict=True):
            assert all(map(torch.equal, theirs_in, ours_in))
        assert torch.equal(ours, expected)
        assert ours.std() > 0.001  # how large depends on the image encoder, which differs between transformers
        return calls[1]


@pytest.fixture(scope="module")
def both(tiny_model, photo_bytes) -> Both:
    return Both(tiny_model, prepare_photo(photo_bytes, 64, 64))


def video(**changes) -> SvdParameters:
    return SvdParameters(**({"frames": 2, "steps": 2, "width": 64, "height": 64, "seed": 3} | changes))


def test_sigmas_and_timesteps_for_any_number_of_steps(both: Both, tiny_model) -> None:
    from diffusers import EulerDiscreteScheduler

    tensors = {"image_embedding": torch.zeros(1, 1, 32), "image_latents": torch.zeros(1, 4, 8, 8)}
    for steps in STEP_COUNTS:
        expected = EulerDiscreteScheduler.from_pretrained(tiny_model / "scheduler")
        expected.set_timesteps(steps, device=CPU)
        ours = both.ours.denoiser(tensors, video(steps=steps)).scheduler
        assert torch.equal(ours.sigmas, expected.sigmas)
        assert torch.equal(ours.timesteps, expected.timesteps)
        # Karras et al. (2022), equation 5, with SVD's range and rho = 7; timesteps are ln(sigma) / 4.
        assert (len(ours.sigmas), float(ours.sigmas[-1])) == (steps + 1, 0.0)
        first, last = 700.0 ** (1 / 7), 0.002 ** (1 / 7)
        sigmas = (first + torch.arange(steps).double() / max(1, steps - 1) * (last - first)) ** 7
        torch.testing.assert_close(ours.sigmas[:-1].double(), sigmas, rtol=1e-5, atol=0)
        torch.testing.assert_close(ours.timesteps.double(), sigmas.log() / 4, rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 25])
def test_steps(both: Both, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    both.same_with_a_cheap_unet(monkeypatch, video(steps=steps))


def test_fps_1_to_30(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for fps in range(1, 31):
        unet = both.same_with_a_cheap_unet(monkeypatch, video(steps=1, fps=fps))
        seen.add(tuple(unet.calls[0][3].flatten().tolist()))
    assert {ids[0] for ids in seen} == set(range(30)), "Stable Video Diffusion was conditioned on fps - 1"


@pytest.mark.parametrize("frames", [14, 25])
@pytest.mark.parametrize(
    ("low", "high"), [(1.0, 3.0), (1.0, 1.0), (0.0, 1.0), (0.5, 1.5), (2.5, 2.5), (1.0, 8.0)], ids=str
)
def test_guidance_of_14_and_25_frames(
    both: Both, monkeypatch: pytest.MonkeyPatch, frames: int, low: float, high: float
) -> None:
    values = video(frames=frames, min_guidance_scale=low, max_guidance_scale=high)
    unet = both.same_with_a_cheap_unet(monkeypatch, values)
    assert unet.calls[0][0].shape == (2 if high > 1 else 1, frames, 8, 8, 8)
    if high > 1:
        tensors = {"image_embedding": torch.zeros(1, 1, 32), "image_latents": torch.zeros(1, 4, 8, 8)}
        scale = both.ours.denoiser(tensors, values).guidance_scale.flatten()
        expected = [low + index * (high - low) / (frames - 1) for index in range(frames)]
        assert scale.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [{"motion_bucket_id": 1}, {"motion_bucket_id": 255}, {"noise_aug_strength": 0.0}, {"noise_aug_strength": 1.0}],
    ids=str,
)
def test_motion_and_noise(both: Both, monkeypatch: pytest.MonkeyPatch, changes) -> None:
    both.same_with_a_cheap_unet(monkeypatch, video(**changes))


@pytest.mark.parametrize(
    ("frames", "decode_chunk_size"),
    [(14, 8), (25, None), *(pytest.param(14, size, marks=pytest.mark.long) for size in (1, 25))],
)
def test_decode_chunks(both: Both, frames: int, decode_chunk_size: int | None) -> None:
    latents = torch.randn(1, frames, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        decoded = both.theirs.decode_latents(latents, frames, decode_chunk_size or frames)
        expected = both.theirs.video_processor.postprocess_video(decoded, output_type="np")[0]
    ours = both.ours.decode({"latents": latents}, video(frames=frames), decode_chunk_size or frames).numpy()
    assert np.array_equal(ours, (expected * 255).round().astype(np.uint8))


@pytest.mark.long
@pytest.mark.parametrize(
    ("frames", "decode_chunk_size", "changes"),
    [
        (14, 4, {"steps": 30, "fps": 30, "motion_bucket_id": 255, "noise_aug_strength": 0.5}),
        (25, None, {"steps": 10, "fps": 1, "min_guidance_scale": 0.0, "max_guidance_scale": 8.0}),
    ],
    ids=str,
)
def test_whole_videos(both: Both, frames: int, changes, decode_chunk_size: int | None) -> None:
    values = video(frames=frames, **changes)
    expected = both.call(values, "pil", decode_chunk_size)[0]
    ours = both.ours.decode(both.render(values), values, decode_chunk_size or frames).numpy()
    assert np.array_equal(ours, np.stack([np.asarray(frame) for frame in expected]))
    assert ours.std() > 5
