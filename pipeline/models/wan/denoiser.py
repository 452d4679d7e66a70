"""The denoising loop of WanImageToVideoPipeline for one sample, one step per call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.models.base import State
from svdq.pipeline.models.wan.scheduling import Schedule


@dataclass(kw_only=True)
class WanDenoiser:
    """The denoising of one sample: (6) of diffusers' `__call__`. Keeps nothing between steps."""

    #: The WanTransformer3DModels of this rank by component, shared by all samples.
    transformers: Mapping[str, Any]
    #: Shared by all samples with the same steps and shift.
    schedule: Schedule
    #: (1, 512, E), padded with zeros.
    prompt_embeds: Tensor
    #: The same of the negative prompt; None: guidance is off.
    negative_prompt_embeds: Tensor | None
    #: CLIP's (1, 257, C) of a 2.1 model.
    image_embeds: Tensor | None
    #: Mask and encoded photo (1, 4 + C, F', H', W'), or the photo as first latent frame (1, C, 1, H', W').
    condition: Tensor
    #: (1, 1, F', H', W') of a TI2V model: 0 in the first frame, which is the photo.
    first_frame_mask: Tensor | None
    #: The guidance scale of each component.
    guidance_scales: Mapping[str, float]
    #: Of the transformers' inputs.
    dtype: torch.dtype
    #: Called at the end of a step, which ends the measurement of its memory.
    measured: Callable[[], None] = lambda: None

    @torch.inference_mode()
    def step(self, state: State, index: int) -> dict[str, Tensor]:
        """Do step `index`: return the next `latents` (1, C, F', H', W') and what the scheduler keeps."""
        component = self.schedule.components[index]
        transformer = self.transformers[component]
        latents = state["latents"]
        t = self.schedule.timesteps[index]
        if self.first_frame_mask is None:
            model_input = torch.cat([latents, self.condition], dim=1).to(self.dtype)
            timestep = t.expand(1)
        else:
            model_input = (1 - self.first_frame_mask) * self.condition + self.first_frame_mask * latents
            model_input = model_input.to(self.dtype)
            # One for each token: 0 in the first frame. (1, F' * H'/2 * W'/2)
            timestep = (self.first_frame_mask[0][0][:, ::2, ::2] * t).flatten().unsqueeze(0)

        def predict(prompt_embeds: Tensor) -> Tensor:
            noise: Tensor = transformer(
                hidden_states=model_input,
                timestep=timestep,
                encoder_hidden_states=prompt_embeds,
                encoder_hidden_states_image=self.image_embeds,
                return_dict=False,
            )[0]
            return noise

        noise_pred = predict(self.prompt_embeds)
        if self.negative_prompt_embeds is not None:
            unconditional = predict(self.negative_prompt_embeds)
            noise_pred = unconditional + self.guidance_scales[component] * (noise_pred - unconditional)
        changed = self.schedule.step(noise_pred, index, state)
        self.measured()
        return changed
