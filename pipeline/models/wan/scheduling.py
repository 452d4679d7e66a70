"""diffusers' schedulers of Wan without a memory of their own: what they keep between steps is in a sample's state.

The counters of a scheduler follow from the index of the step, so that a step can be done anywhere, in any order.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.models.base import State

#: Prefix of the tensors in a state that are a scheduler's `model_outputs`; their positions in that list follow.
OUTPUT = "model_output_"


class Schedule:
    """The schedule of all videos with the same number of steps and the same shift."""

    def __init__(self, scheduler: Any, boundary_timestep: float | None, high_noise: str, low_noise: str) -> None:
        """Choose the expert of each step, as diffusers does.

        Args:
            scheduler: a scheduler of diffusers whose timesteps are set.
            boundary_timestep: at and above it the first expert works; None: it always does.
            high_noise: name of that expert.
            low_noise: name of the other one.
        """
        self._scheduler = scheduler
        # Compared on the host once, since a comparison on a GPU would wait for it in every step.
        self.components = [
            high_noise if boundary_timestep is None or t >= boundary_timestep else low_noise
            for t in scheduler.timesteps.cpu()
        ]

    @property
    def timesteps(self) -> Tensor:
        """The timestep of each step, (T,), on the device."""
        timesteps: Tensor = self._scheduler.timesteps
        return timesteps

    def step(self, noise_pred: Tensor, index: int, state: State) -> dict[str, Tensor]:
        """Do step `index` on `state["latents"]`; return all tensors of the scheduler's state that changed."""
        scheduler = copy.copy(self._scheduler)
        scheduler._step_index = index
        keeps = hasattr(scheduler, "model_outputs")
        if keeps:
            _restore(scheduler, index, state)
        latents = scheduler.step(noise_pred, self.timesteps[index], state["latents"], return_dict=False)[0]
        return {"latents": latents, **(_history(scheduler) if keeps else {})}


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


def history_names(scheduler: Any) -> list[str]:
    """Return the names of all tensors that a scheduler may keep."""
    if not hasattr(scheduler, "model_outputs"):
        return []
    return ["last_sample", *(f"{OUTPUT}{place}" for place in range(scheduler.config.solver_order))]


def first_frame_mask(latents: Tensor) -> Tensor:
    """Return what marks the latent frames to denoise in a TI2V model: all but the first; (1, 1, F', H', W')."""
    # (5) of diffusers' `__call__`, in `prepare_latents`.
    mask = torch.ones((1, 1, *latents.shape[2:]), dtype=torch.float32, device=latents.device)
    mask[:, :, 0] = 0
    return mask
