"""Deep features of a UNet used again in the steps that follow: approximate, and much less to compute.

After DeepCache (X. Ma, G. Fang, X. Wang, "DeepCache: Accelerating Diffusion Models for Free", 2023), in its shallowest
form: what changes most from step to step is computed in the last layer, from the first convolution of the latents and
from what all layers between gave when they were computed last. Knows no videos and no ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FeatureReuse:
    """Makes a UNetSpatioTemporalConditionModel leave out all but its last layer while it is given features."""

    def __init__(self, unet: Any, every: int) -> None:
        """Change a UNet, for good.

        Args:
            unet: with two layers or more in its last block, as all have.
            every: steps from one in which all is computed to the next.
        """
        self.every = every
        #: (B*F, C, H/8, W/8), what the last layer but one gave. Set before a step, it is used; else the step sets it.
        self.features: Tensor | None = None
        for block in unet.down_blocks:
            num_outputs = len(block.resnets) + len(block.downsamplers or ())
            block.forward = self._left_out(block.forward, num_outputs)
        for block in (unet.mid_block, *unet.up_blocks[:-1]):
            block.forward = self._left_out(block.forward)
        self._last = unet.up_blocks[-1]
        self._whole = self._last.forward
        self._last.forward = self._last_layer
        self._attentions: Any = getattr(self._last, "attentions", None)
        (self._attentions or self._last.resnets)[-2].register_forward_hook(self._keep)

    def _keep(self, _layer: object, _given: object, made: Any) -> None:
        self.features = made if isinstance(made, Tensor) else made[0]

    def _left_out(self, forward: Callable[..., Any], num_outputs: int = 0) -> Callable[..., Any]:
        """Make a block's forward that gives what it got where features are there; nobody will look at it."""

        def maybe(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.features is None:
                return forward(hidden_states, *args, **kwargs)
            return (hidden_states, (hidden_states,) * num_outputs) if num_outputs else hidden_states

        return maybe

    def _last_layer(
        self, hidden_states: Tensor, res_hidden_states_tuple: tuple[Tensor, ...], temb: Tensor, **kwargs: Any
    ) -> Tensor:
        """Compute the last block: all of it, or, as its own forward does, only what follows the features."""
        if self.features is None:
            whole: Tensor = self._whole(
                hidden_states=hidden_states, res_hidden_states_tuple=res_hidden_states_tuple, temb=temb, **kwargs
            )
            return whole
        indicator = kwargs["image_only_indicator"]
        # The residuals are taken from the end, so that the last layer gets what the first convolution gave.
        hidden_states = torch.cat([self.features, res_hidden_states_tuple[0]], dim=1)
        hidden_states = self._last.resnets[-1](hidden_states, temb, image_only_indicator=indicator)
        if self._attentions:
            hidden_states = self._attentions[-1](
                hidden_states,
                encoder_hidden_states=kwargs["encoder_hidden_states"],
                image_only_indicator=indicator,
                return_dict=False,
            )[0]
        return hidden_states
