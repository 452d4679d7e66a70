"""The denoising loop of WanImageToVideoPipeline for one sample, one step per call, with MagCache where it is on.

diffusers' schedulers keep nothing between steps here: what they remember is in the state of a sample, and their
counters follow from the index of the step, so that a step can be done anywhere, in any order.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdq.pipeline.models.family import Facts
from svdq.pipeline.models.sigmas import sigmas_of
from svdq.pipeline.models.video_model import State
from svdq.pipeline.models.wan.experts import experts_of
from svdq.pipeline.models.wan.layout import SHIFT_SETTINGS

#: Prefix of the tensors in a state that are a scheduler's `model_outputs`; their positions in that list follow.
OUTPUT = "model_output_"


class Schedule:
    """The schedule of all videos with the same number of steps and the same shift."""

    def __init__(self, steps: int, shift: float, facts: Facts, device: torch.device | str = "cpu") -> None:
        import diffusers

        self.components = experts_of(steps, shift, facts)  # the expert of each step
        config = facts["scheduler"]
        kind = config["_class_name"]
        sigmas = facts.get("sigmas")
        if isinstance(sigmas, str):
            sigmas, shift = sigmas_of(sigmas, steps, shift), 1.0  # which are shifted
        self._scheduler: Any = getattr(diffusers, kind).from_config(config, **{SHIFT_SETTINGS[kind]: shift})
        # (4) of diffusers' `__call__`.
        if sigmas is not None:
            self._scheduler.set_timesteps(sigmas=np.array(sigmas), device=device)
        else:
            self._scheduler.set_timesteps(steps, device=device)
        self.timesteps: Tensor = self._scheduler.timesteps  # the timestep of each step, (T,), on the device

    def step(self, noise_pred: Tensor, index: int, state: State) -> dict[str, Tensor]:
        """Do step `index` on `state["latents"]`; return all tensors of the scheduler's state that changed."""
        scheduler = copy.copy(self._scheduler)
        scheduler._step_index = index
        keeps = hasattr(scheduler, "model_outputs")
        if keeps:
            _restore(scheduler, index, state)
        latents = scheduler.step(noise_pred, self.timesteps[index], state["latents"], return_dict=False)[0]
        return {"latents": latents, **(_history(scheduler) if keeps else {})}

    def expected(self, latents: Tensor, noise_pred: Tensor, index: int) -> Tensor:
        """Return x0 = x - sigma v, the clean latents of a flow, before step `index`."""
        expected: Tensor = latents - self._scheduler.sigmas[index].to(latents.device) * noise_pred
        return expected


def _restore(scheduler: Any, index: int, state: State) -> None:
    """Set what a UniPCMultistepScheduler has kept from the steps before `index`: all outputs up to its order."""
    order = scheduler.config.solver_order
    scheduler.model_outputs = [state[f"{OUTPUT}{place}"] if place >= order - index else None for place in range(order)]
    scheduler.last_sample = state["last_sample"] if index else None
    # Only a scheduler inside this one (solver_p) would read it.
    scheduler.timestep_list = [None] * order
    scheduler.lower_order_nums = min(index, order)
    # The order of the last step: lower in the first steps, and in the last ones if configured.
    left = len(scheduler.timesteps) - (index - 1) if scheduler.config.lower_order_final else order
    scheduler.this_order = min(order, left, index)


def _history(scheduler: Any) -> dict[str, Tensor]:
    outputs = {f"{OUTPUT}{place}": output for place, output in enumerate(scheduler.model_outputs) if output is not None}
    return {"last_sample": scheduler.last_sample, **outputs}


def history_names(facts: Facts) -> list[str]:
    """Return the names of all tensors that the scheduler of a model may keep."""
    scheduler = Schedule(1, 1.0, facts)._scheduler
    if not hasattr(scheduler, "model_outputs"):
        return []
    return ["last_sample", *(f"{OUTPUT}{place}" for place in range(scheduler.config.solver_order))]


@dataclass(kw_only=True)
class WanDenoiser:
    """The denoising of one sample: (6) of diffusers' `__call__`. Between steps it keeps what a skipped one needs."""

    #: Returns a WanTransformer3DModel of this rank by its component, with the LoRAs of this sample; all share it.
    transformer_of: Callable[[str], Any]
    schedule: Schedule  # shared by all samples with the same steps and shift
    prompt_embeds: Tensor  # (1, 512, E), padded with zeros
    negative_prompt_embeds: Tensor | None  # the same of the negative prompt; None: guidance is off
    image_embeds: Tensor | None  # CLIP's (1, 257, C) of a 2.1 model; (2, 257, C) of first and last frame
    condition: Tensor  # mask and photos (1, 4 + C, F', H', W'), or the first latent frame (1, C, 1, H', W')
    first_frame_mask: Tensor | None  # (1, 1, F', H', W') of a TI2V model: 0 in the first frame, which is the photo
    guidance_scales: Mapping[str, float]  # the guidance scale of each component
    dtype: torch.dtype  # of the transformers' inputs
    is_skipped: Sequence[bool]  # whether each step adds the residuals of the one before, and computes no blocks
    residuals: dict[str, Tensor] = field(default_factory=dict)  # of the last computed step: (1, tokens, width), by pass
    last: tuple[Tensor, Tensor, int] | None = None  # of the last step: latents before it, prediction, index
    measured: Callable[[], None] = lambda: None  # called at the end of a step, which ends the measurement of its memory

    @torch.inference_mode()
    def step(self, state: State, index: int) -> dict[str, Tensor]:
        """Do step `index`: return the next `latents` (1, C, F', H', W') and what the scheduler keeps."""
        component = self.schedule.components[index]
        transformer = self.transformer_of(component)
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

        def predict(prompt_embeds: Tensor, which: str = "cond") -> Tensor:
            with self.cached(transformer, index, which):
                noise: Tensor = transformer(
                    hidden_states=model_input,
                    timestep=timestep,
                    encoder_hidden_states=prompt_embeds,
                    encoder_hidden_states_image=self.image_embeds,
                    return_dict=False,
                )[0]
            return noise

        noise_pred = predict(self.prompt_embeds)
        # At a scale of 1 the prediction without the prompt would cancel out, but for rounding; diffusers computes it.
        if self.negative_prompt_embeds is not None and self.guidance_scales[component] != 1:
            unconditional = predict(self.negative_prompt_embeds, "uncond")
            noise_pred = unconditional + self.guidance_scales[component] * (noise_pred - unconditional)
        self.last = (latents, noise_pred, index)
        changed = self.schedule.step(noise_pred, index, state)
        self.measured()
        return changed

    @contextmanager
    def cached(self, transformer: Any, index: int, which: str) -> Iterator[None]:
        """Let the blocks add the residual of the step before where a step is skipped, or keep it for the next one."""
        if self.is_skipped[index]:
            with instead_of_blocks(transformer, [_Add(self.residuals[which])]):
                yield
            return
        self.residuals.pop(which, None)  # before the blocks need memory
        if not any(self.is_skipped[index + 1 : index + 2]):
            yield
            return
        first, last = Keep(), Keep()
        with instead_of_blocks(transformer, [first, *transformer.blocks, last]):
            yield
        self.residuals[which] = last.kept - first.kept

    def expected(self, choose: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Return frames (F, C, H', W') of the latents of the whole video by the last prediction, as `choose` picks."""
        if self.last is None:
            return None
        *both, index = self.last
        latents, noise_pred = (choose(each[0].transpose(0, 1)) for each in both)
        if self.first_frame_mask is not None:  # the first frame is the photo
            latents, noise_pred = latents.clone(), noise_pred.clone()
            latents[0], noise_pred[0] = self.condition[0, :, 0], 0
        return self.schedule.expected(latents, noise_pred, index)


class Keep(torch.nn.Module):
    """Stands among the blocks of a transformer and keeps what passes."""

    kept: Tensor

    def forward(self, hidden_states: Tensor, *_: Any) -> Tensor:
        """Return its input."""
        self.kept = hidden_states
        return hidden_states


class _Add(torch.nn.Module):
    """Replaces the blocks of a transformer: adds what they added in an earlier step."""

    def __init__(self, residual: Tensor) -> None:
        super().__init__()
        self._residual = residual

    def forward(self, hidden_states: Tensor, *_: Any) -> Tensor:
        return hidden_states + self._residual


@contextmanager
def instead_of_blocks(transformer: Any, blocks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Have a transformer run other blocks; where all of it is compiled, as if it were not."""
    own, forward = transformer.blocks, transformer.forward
    transformer.blocks = torch.nn.ModuleList(blocks)
    is_compiled = hasattr(forward, "_torchdynamo_orig_callable")
    if is_compiled:
        transformer.forward = forward._torchdynamo_orig_callable
    try:
        yield
    finally:
        transformer.blocks = own
        if is_compiled:
            transformer.forward = forward


def first_frame_mask(latents: Tensor) -> Tensor:
    """Return what marks the latent frames to denoise in a TI2V model: all but the first; (1, 1, F', H', W')."""
    # (5) of diffusers' `__call__`, in `prepare_latents`.
    mask = torch.ones((1, 1, *latents.shape[2:]), dtype=torch.float32, device=latents.device)
    mask[:, :, 0] = 0
    return mask
