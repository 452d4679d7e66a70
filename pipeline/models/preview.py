"""The preview model: no diffusion model, but real noise, real steps and a clean moving picture at the end.

Its latents are pixels in [-1, 1], rearranged 8x8 to 192 channels (space to depth). Its denoiser has the exact answer, a
slow camera move over the photo, to which Euler's steps with Karras's sigmas converge, as they would with a perfect
model. It needs neither weights nor diffusers, whose import would double a rank's start.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from svdq.pipeline.errors import SampleError
from svdq.pipeline.models.families import family_for
from svdq.pipeline.models.latent_rgb import some_frames, to_bytes
from svdq.pipeline.models.video_model import Denoiser, ModelInfo, State, VideoModel
from svdq.pipeline.planning.binding import Segment
from svdq.pipeline.planning.costs import CostPrior
from svdq.pipeline.video_parameters import VideoParameters

BLOCK = 8  # side of the square of pixels that becomes the channels of one latent position, as the VAE's 8x downsampling
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 700.0, 7.0  # of Karras's schedule
_LARGEST_ZOOM = 0.35  # the zoom of the camera move at the end, for very large motion buckets


class PreviewModel(VideoModel):
    """A closed-form model with the interface of the real ones; every role has all of it."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        # The costs were measured on one core at 576x320x25.
        prior = CostPrior(encode_steps=2.0, decode_steps=1.5)
        self.info = ModelInfo(name="preview", notice="preview (no diffusion model)", prior=prior)

    def complete(self, parameters: VideoParameters) -> VideoParameters:
        family = family_for(parameters)
        return family.complete(parameters, family.published)

    def segments(self, parameters: VideoParameters) -> tuple[Segment, ...]:
        """Return one segment: this model does the steps of any family."""
        return (Segment(component="preview", start=0, stop=parameters.steps),)

    @torch.inference_mode()
    def encode(
        self, photo: Image.Image | None, parameters: VideoParameters, last_photo: Image.Image | None = None
    ) -> dict[str, Tensor]:
        """Rearrange photos, of which a second is the last frame, to image and noise latents (…, 192, H/8, W/8)."""
        assert photo is not None
        assert photo.size == (parameters.width, parameters.height)
        generator = torch.Generator("cpu").manual_seed(parameters.seed)
        # In diffusers' order, the noise of `noise_aug_strength` comes first; a preview shows the photo unchanged.
        torch.randn((1, 3, parameters.height, parameters.width), generator=generator)
        photos = [photo] if last_photo is None else [photo, last_photo]
        blocks = torch.from_numpy(np.stack([_space_to_depth(np.asarray(each)) for each in photos]))
        shape = (1, parameters.num_frames, *blocks.shape[1:])
        latents = torch.randn(shape, generator=generator, dtype=self._dtype)
        # The initial standard deviation of the scheduler (diffusers: init_noise_sigma).
        latents *= math.sqrt(SIGMA_MAX**2 + 1)
        return {"image_latents": _to_values(blocks, self._dtype).to(self._device), "latents": latents.to(self._device)}

    def denoiser(
        self, state: State, parameters: VideoParameters, step_costs: Sequence[float] = ()
    ) -> "PreviewDenoiser":
        return PreviewDenoiser(state["image_latents"], parameters)

    @torch.inference_mode()
    def picture(self, denoiser: Denoiser) -> Tensor | None:
        """Draw the latents with their noise: what this model expects is right from the first step on."""
        assert isinstance(denoiser, PreviewDenoiser)
        if denoiser.last is None:
            return None
        latents, sigma = denoiser.last
        frames = some_frames(latents[0]).float()  # (F, 192, h, w)
        colors = frames.unflatten(1, (3, BLOCK * BLOCK)).mean(2).permute(0, 2, 3, 1)
        return to_bytes(colors / math.sqrt(sigma**2 + 1))

    @torch.inference_mode()
    def decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Rearrange final latents to frames, one at a time; `decode_chunk_size` is ignored."""
        latents = state["latents"][0]  # (F, 192, H/8, W/8)
        frames = torch.empty((latents.shape[0], parameters.height, parameters.width, 3), dtype=torch.uint8)
        for frame, values in zip(frames, latents, strict=True):
            # A sum of finite values far below float32's range is finite, and propagates NaN and infinity.
            if not math.isfinite(values.sum(dtype=torch.float32).item()):
                raise SampleError("The latents of the preview are not numbers (NaN or infinity); try another seed.")
            frame.numpy()[:] = _depth_to_space(_to_bytes(values).cpu().numpy())
        return frames


class PreviewDenoiser:
    """The denoising of one sample: Euler's method towards a known answer, which the first step computes."""

    def __init__(self, image_latents: Tensor, parameters: VideoParameters) -> None:
        self._image_latents = image_latents
        self._parameters = parameters
        self._sigmas = sigmas(parameters.steps)
        self._answer: Tensor | None = None
        self.last: tuple[Tensor, float] | None = None  # the latents after the last step, and their noise level

    @torch.inference_mode()
    def step(self, state: State, index: int) -> dict[str, Tensor]:
        """Do step `index`: return the next `latents` (1, F, 192, H/8, W/8).

        With the answer x0 known, v = (x / (sigma^2 + 1) - x0) * sqrt(sigma^2 + 1) / sigma is what a perfect model
        would predict, and EulerDiscreteScheduler's step reduces to x0 + (x - x0) * sigma_next / sigma.
        """
        latents = state["latents"]
        if self._answer is None:
            self._answer = self._render_move().to(latents.device)
        shrink = self._sigmas[index + 1] / self._sigmas[index]
        result = torch.empty_like(latents)
        # Frame by frame, so that a frame's numbers stay in the cache over the passes. Each pass is one operation with
        # one rounding: fused ones (lerp, addcmul) may round differently where a vector or a thread's share ends.
        for frame, answer, out in zip(latents[0], self._answer, result[0], strict=True):
            x0 = _to_values(answer, torch.float32)
            difference = frame.to(torch.float32) - x0
            torch.add(difference.mul_(shrink), x0, out=x0)
            out.copy_(x0)
        self.last = (result, self._sigmas[index + 1])
        return {"latents": result}

    def _render_move(self) -> Tensor:
        """Render the camera move as bytes: (F, 192, H/8, W/8), uint8."""
        blocks = _to_bytes(self._image_latents).cpu().numpy()
        photo, last_photo = (Image.fromarray(_depth_to_space(blocks[place])) for place in (0, -1))
        boxes = camera_move(self._parameters)
        # Pillow filters in integers, so the result is the same everywhere and with any number of threads.
        frames = [photo.resize(photo.size, Image.Resampling.BICUBIC, box=box) for box in boxes]
        if len(blocks) > 1:
            frames = [Image.blend(frame, last_photo, place / (len(frames) - 1)) for place, frame in enumerate(frames)]
        return torch.from_numpy(np.stack([_space_to_depth(np.asarray(frame)) for frame in frames]))


def sigmas(steps: int) -> list[float]:
    """Compute the noise levels before each step and, last, after all of them: zero.

    Karras et al., Elucidating the Design Space of Diffusion-Based Generative Models, equation (5); to float32, the same
    numbers as EulerDiscreteScheduler with `use_karras_sigmas`.
    """
    ramp = np.linspace(0, 1, steps)
    largest, smallest = SIGMA_MAX ** (1 / RHO), SIGMA_MIN ** (1 / RHO)
    levels = (largest + ramp * (smallest - largest)) ** RHO
    return [*levels.astype(np.float32).tolist(), 0.0]


def camera_move(parameters: VideoParameters) -> list[tuple[float, float, float, float]]:
    """Return for each frame the part of the photo that it shows: (left, upper, right, lower) in pixels.

    The move begins with the whole photo and is eased at both ends; how far it goes depends on `motion_bucket_id`, and
    where to on the seed. In a loop it comes back. The part has the shape of the photo.
    """
    # Fibonacci hashing: neighboring seeds look in quite different directions.
    angle = 2 * math.pi * ((parameters.seed * 0x9E3779B97F4A7C15) % 2**64) / 2**64
    # Families without this parameter move as its default does.
    motion: int = getattr(parameters, "motion_bucket_id", 127)
    zoom = _LARGEST_ZOOM * (1 - math.exp(-motion / 150))
    boxes = []
    for frame in range(parameters.num_frames):
        time = frame / max(1, parameters.num_frames - 1)
        if getattr(parameters, "loop", False):
            time = 1 - abs(2 * time - 1)
        moved = zoom * time * time * (3 - 2 * time)
        width, height = parameters.width * (1 - moved), parameters.height * (1 - moved)
        left = (parameters.width - width) * (0.5 + 0.5 * math.cos(angle))
        upper = (parameters.height - height) * (0.5 + 0.5 * math.sin(angle))
        boxes.append((left, upper, min(left + width, parameters.width), min(upper + height, parameters.height)))
    return boxes


def _to_values(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    return blocks.to(torch.float32).mul_(2 / 255).sub_(1).to(dtype)


def _to_bytes(values: Tensor) -> Tensor:
    """Invert `_to_values`, in any dtype; values outside of [-1, 1] are clamped."""
    return values.to(torch.float32).add(1).mul_(255 / 2).round_().clamp_(0, 255).to(torch.uint8)


def _space_to_depth(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rearrange (H, W, 3) to (192, H/8, W/8): torch's pixel_unshuffle by 8, on bytes."""
    height, width, _ = pixels.shape
    split = pixels.reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK, 3)
    return np.ascontiguousarray(split.transpose(4, 1, 3, 0, 2)).reshape(-1, height // BLOCK, width // BLOCK)


def _depth_to_space(blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Invert `_space_to_depth`: (192, H/8, W/8) to (H, W, 3)."""
    _, rows, columns = blocks.shape
    split = blocks.reshape(3, BLOCK, BLOCK, rows, columns)
    return np.ascontiguousarray(split.transpose(3, 1, 4, 2, 0)).reshape(rows * BLOCK, columns * BLOCK, 3)
