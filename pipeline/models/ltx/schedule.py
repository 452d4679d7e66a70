"""The noise levels of a stage of LTX-2, and its steps: diffusers' own, or ancestral ones with noise that is given."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.ltx.family import Stage
from svdq.pipeline.models.ltx.layout import GIVEN_SIGMAS

_TINY = 1e-12  # as diffusers adds it to what it divides by


class Schedule:
    """The schedule of all stages with the same noise levels and, where these depend on it, the same size."""

    def __init__(self, stage: Stage, tokens: int, facts: Facts, device: torch.device) -> None:
        """Set the timesteps; `tokens` counts the video's and its last photo's."""
        from diffusers import FlowMatchEulerDiscreteScheduler
        from diffusers.pipelines.ltx2.pipeline_ltx2_condition import calculate_shift, retrieve_timesteps

        # (5) of diffusers' `__call__`.
        changed = GIVEN_SIGMAS if stage.sigmas is not None else {}
        self._scheduler: Any = FlowMatchEulerDiscreteScheduler.from_config(facts["scheduler"], **changed)
        config = self._scheduler.config
        mu = calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        levels = np.linspace(1.0, 1 / stage.num_steps, stage.num_steps) if stage.sigmas is None else [*stage.sigmas]
        self.timesteps: Tensor = retrieve_timesteps(self._scheduler, None, device, None, sigmas=levels, mu=mu)[0]

    def at(self, index: int) -> Any:
        """Return the scheduler before step `index` of the stage; it keeps nothing else between steps."""
        scheduler = copy.copy(self._scheduler)
        scheduler._step_index = index
        return scheduler

    def ancestral_step(self, velocity: Tensor, index: int, sample: Tensor, noise: Tensor) -> Tensor:
        """Do step `index`, which is not the last one: the `step` of diffusers' LTXEulerAncestralRFScheduler.

        A step of Euler's method goes below the next noise level, to sigma_down, and noise makes up for it; eta is 1.
        """
        sample = sample.to(torch.float32)
        sigma, sigma_next = self._scheduler.sigmas[index : index + 2]
        denoised = sample - sigma * velocity.to(torch.float32)
        sigma_down = sigma_next * (1.0 + (sigma_next / sigma - 1.0))
        alpha_next, alpha_down = 1.0 - sigma_next, 1.0 - sigma_down
        ratio = sigma_down / sigma
        moved = ratio * sample + (1.0 - ratio) * denoised
        variance = sigma_next**2 - sigma_down**2 * alpha_next**2 / (alpha_down**2 + _TINY)
        noisy: Tensor = (alpha_next / (alpha_down + _TINY)) * moved + noise * variance.clamp(min=0.0).sqrt()
        return noisy
