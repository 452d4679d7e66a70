"""The denoising loop of StableVideoDiffusionPipeline for one sample, one step per call.

A step reads no values back from the device, so a GPU never waits for the host. For this, diffusers' scheduler keeps its
sigmas on the host, and counts steps itself after the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.models.base import State
from svdq.pipeline.models.family import Facts
from svdq.pipeline.parameters import VideoParameters
from svdq.pipeline.planning.binding import Segment


def segments(parameters: VideoParameters, facts: Facts) -> tuple[Segment, ...]:
    """Return one segment: the UNet does all steps."""
    return (Segment(component="unet", start=0, stop=parameters.steps),)


@dataclass(kw_only=True)
class SvdDenoiser:
    """The denoising of one sample: (9) of diffusers' `__call__`. B is 2 with guidance and 1 without."""

    #: UNetSpatioTemporalConditionModel, shared by all samples: it keeps no state between steps.
    unet: Any
    #: EulerDiscreteScheduler of this sample alone: it counts steps.
    scheduler: Any
    #: (B, 1, E)
    image_embedding: Tensor
    #: (B, F, 4, H/8, W/8)
    image_latents: Tensor
    #: (B, 3): fps - 1, motion_bucket_id, noise_aug_strength.
    added_time_ids: Tensor
    #: (1, F, 1, 1, 1)
    guidance_scale: Tensor
    #: Whether guidance is on.
    guided: bool
    #: Called at the end of a step, which ends the measurement of its memory.
    measured: Callable[[], None] = lambda: None

    @torch.inference_mode()
    def step(self, state: State, index: int) -> dict[str, Tensor]:
        """Do step `index`: return the next `latents` (1, F, 4, H/8, W/8)."""
        latents = state["latents"]
        scheduler = self.scheduler
        if scheduler.step_index != index:
            # The first step of this range: the scheduler continues counting from here.
            scheduler.set_begin_index(index)
            scheduler._step_index = None
        timestep = scheduler.timesteps[index]
        model_input = torch.cat([latents] * 2) if self.guided else latents
        model_input = scheduler.scale_model_input(model_input, timestep)
        # Concatenated over channels: (B, F, 8, H/8, W/8)
        model_input = torch.cat([model_input, self.image_latents], dim=2)
        noise_pred = self.unet(
            model_input,
            timestep,
            encoder_hidden_states=self.image_embedding,
            added_time_ids=self.added_time_ids,
            return_dict=False,
        )[0]
        if self.guided:
            unconditional, conditional = noise_pred.chunk(2)
            noise_pred = unconditional + self.guidance_scale * (conditional - unconditional)
        previous: Tensor = scheduler.step(noise_pred, timestep, latents, return_dict=False)[0]
        self.measured()
        return {"latents": previous}
