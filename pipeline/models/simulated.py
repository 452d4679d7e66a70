"""A model whose compute is a sleep, like a GPU's compute as seen by the host. For `svdq bench` and tests.

Each step transforms the latents by a function that neither commutes nor repeats, and the decode checks the result: a
sample fails if it missed a step, repeated one, did them out of order, or got another sample's latents.
"""

import ctypes
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from svdq.pipeline.errors import SampleError
from svdq.pipeline.models.families import family_for
from svdq.pipeline.models.resolved_model import Timings
from svdq.pipeline.models.video_model import ModelInfo, Role, State, VideoModel
from svdq.pipeline.planning.binding import Segment
from svdq.pipeline.planning.rounds import DECODER, ENCODERS
from svdq.pipeline.video_parameters import VideoParameters

DEFAULT_FRAMES = 14
NOTICE = "simulated (no pictures: its compute is a sleep)"
_MODULUS = 2039  # integers up to 2048 are exact in float16, and so is arithmetic modulo this prime
_PR_SET_TIMERSLACK = 29  # from <linux/prctl.h>; in nanoseconds


class SimulatedModel(VideoModel):
    """Sleeps in encode, steps and decode."""

    def __init__(self, timings: Timings, role: Role, device: torch.device, name: str = "simulated") -> None:
        self._timings = timings
        self._device = device
        self._role = role
        self.info = ModelInfo(name=name, notice=NOTICE, prior=timings.prior, facts={"num_frames": DEFAULT_FRAMES})
        if role.in_rounds:
            experts = ("simulated",) if timings.segments is None else ("simulated", "simulated_2")
            self.sets = (ENCODERS, *experts, DECODER)
        self._held = ""  # the set that is loaded, in rounds
        self._plain: dict[tuple[int, ...], Tensor] = {}
        self._clock_s = 0.0
        self._missing: list[Segment] = []  # the segments of the present sample that this rank does not have
        self._costs_of_steps: Sequence[float] = ()
        self._last = -1  # the last step of the present sample here
        #: The latents of the present sample, flat on the host, and their first element.
        self._latents = torch.zeros(1)
        self._flat = np.zeros(1, np.float16)
        self._number = 0
        if sys.platform == "linux":
            # By default Linux delays wake-ups of a thread by 50 microseconds to save power.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def _sleep(self, milliseconds: float) -> None:
        # A GPU starts the next kernel when the previous one ends, however late the host wakes up: sleep to deadlines.
        self._clock_s += milliseconds / 1000
        remaining_s = self._clock_s - time.perf_counter()
        if remaining_s > 0:
            time.sleep(remaining_s)

    def complete(self, parameters: VideoParameters) -> VideoParameters:
        family = family_for(parameters)
        return family.complete(parameters, {**family.published, **self.info.facts})

    def segments(self, parameters: VideoParameters) -> tuple[Segment, ...]:
        """Return the segments of the simulated experts, which do the steps of any family."""
        return self._timings.segments_of(parameters.steps)

    def hold(self, components: str) -> None:
        """Sleep for `load_ms`; the decoder, a small model, has come with the encoders."""
        if components != DECODER:
            time.sleep(self._timings.load_ms / 1000)
        self._held = components

    def encode(
        self, photo: Image | None, parameters: VideoParameters, last_photo: Image | None = None
    ) -> dict[str, Tensor]:
        """Sleep, and number the latents by the seed; (1, F, 4, H/8, W/8), float16. Photos are ignored."""
        self._clock_s = time.perf_counter()
        latents = self._plain_latents(parameters).clone()
        latents.view(-1)[0] = parameters.seed % _MODULUS
        self._sleep(self._timings.encode_ms * self._timings.slowdown)
        return {"latents": latents.to(self._device)}

    def denoiser(self, state: State, parameters: VideoParameters, step_costs: Sequence[float] = ()) -> "SimulatedModel":
        """Return this model: it keeps the present sample only."""
        self._clock_s = time.perf_counter()
        here = self._role.has if not self.sets else self._held.__eq__
        self._missing = [each for each in self.segments(parameters) if not here(each.component)]
        self._costs_of_steps, self._last = step_costs or [1.0] * parameters.steps, -1
        self._latents = state["latents"].clone()  # a checkpoint of the state may still wait to be written
        # numpy sets one element ten times faster than torch, which keeps the host's share of a simulated step small.
        self._flat = self._latents.cpu().numpy().reshape(-1)
        self._number = int(self._flat[0])
        return self

    def step(self, state: State, index: int) -> dict[str, Tensor]:
        """Sleep, and move the first latent in place; raises SampleError without the expert of this step.

        Or, if it is a skipped step, without the step before.
        """
        if any(each.start <= index < each.stop for each in self._missing):
            raise SampleError(f"Step {index} came to a rank that does not have its simulated expert.")
        cost = self._costs_of_steps[index]
        if not cost and self._last != index - 1:
            raise SampleError(f"Step {index}, which is skipped, came to a rank that has not done the step before.")
        self._last = index
        self._number = _moved(self._number, index)
        self._flat[0] = self._number
        if not self._latents.is_cpu:
            self._latents.view(-1)[0] = float(self._number)  # otherwise both are the same memory
        self._sleep(self._timings.step_ms * self._timings.slowdown * cost)
        return {"latents": self._latents}

    def decode(self, state: State, parameters: VideoParameters, decode_chunk_size: int) -> Tensor:
        """Sleep, and check that every step was done once and in order; return gray frames (F, H, W, 3)."""
        self._clock_s = time.perf_counter()
        first = parameters.seed % _MODULUS
        for index in range(parameters.steps):
            first = _moved(first, index)
        latents = state["latents"].cpu().numpy().reshape(-1)
        plain = self._plain_latents(parameters).numpy().reshape(-1)
        plain[0] = first
        # Compared as integers of 64 bits (they have 4 channels), which is many times faster than as float16.
        if not np.array_equal(latents.view(np.int64), plain.view(np.int64)):
            raise SampleError("The simulated latents are not what every step, once and in order, makes of them.")
        self._sleep(self._timings.decode_ms * self._timings.slowdown)
        shape = (parameters.num_frames, parameters.height, parameters.width, 3)
        return torch.tensor(parameters.seed % 256, dtype=torch.uint8).expand(shape)

    def _plain_latents(self, parameters: VideoParameters) -> Tensor:
        shape = (1, parameters.num_frames, 4, parameters.height // 8, parameters.width // 8)
        if shape not in self._plain:
            numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int32) % _MODULUS
            self._plain = {shape: numbers.view(shape).to(torch.float16)}
        return self._plain[shape]


def _moved(number: int, index: int) -> int:
    """Apply step `index` to a number below the modulus: neither commutes with other steps nor repeats."""
    return (number * 3 + index + 1) % _MODULUS
