"""Makes the states that steps and decodes are measured with, and keeps what a denoising component predicts.

It depends on the tensors of each family, unlike the rest of the bench.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from svdq.pipeline.models.base import VideoModel
from svdq.pipeline.models.svd.layout import UNET_DEFAULTS
from svdq.pipeline.models.svd.tiny import SCHEDULER_CONFIG
from svdq.pipeline.models.wan.family import FAMILY as WAN
from svdq.pipeline.models.wan.state import zeros
from svdq.pipeline.parameters import VideoParameters

#: Tokens of the prompts of a measured step. The transformer gets 512 in any case.
PROMPT_TOKENS = 32


def random_state(
    model: VideoModel, video: VideoParameters, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Draw the state of a sample before its first step, equal for all dtypes."""
    generator = torch.Generator().manual_seed(1)

    def drawn(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * scale

    if model.info.family is WAN:
        like = zeros(video, model.info.facts, dtype, (), torch.device("cpu"))
        state = {}
        for name, tensor in like.items():
            is_prompt = name.endswith("prompt_embeds")
            shape = (1, PROMPT_TOKENS, tensor.shape[-1]) if is_prompt else tuple(tensor.shape)
            state[name] = drawn(shape).to(device, tensor.dtype)
        return state
    # (1, 1, E), (1, 4, H/8, W/8) and (1, F, 4, H/8, W/8)
    unet: Any = getattr(model, "pipeline").unet  # noqa: B009 - models with weights have a pipeline
    width = (UNET_DEFAULTS if unet is None else unet.config)["cross_attention_dim"]
    picture = (video.height // 8, video.width // 8)
    sigma = (SCHEDULER_CONFIG["sigma_max"] ** 2 + 1) ** 0.5
    state = {
        "image_embedding": drawn((1, 1, width)),
        "image_latents": drawn((1, 4, *picture)),
        "latents": drawn((1, video.num_frames, 4, *picture), sigma if unet is not None else 1.0),
    }
    return {name: tensor.to(device, dtype) for name, tensor in state.items()}


@contextlib.contextmanager
def keep_predictions(denoiser: Any, component: str, keep: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with what a denoiser's UNet or transformer predicts, while in the context."""
    experts = getattr(denoiser, "transformers", None)
    module = denoiser.unet if experts is None else experts[component]

    def predict(*arguments: Any, **named: Any) -> Any:
        predicted = module(*arguments, **named)
        keep(predicted[0])
        return predicted

    try:
        if experts is None:
            denoiser.unet = predict
        else:
            denoiser.transformers = {**experts, component: predict}
        yield
    finally:
        if experts is None:
            denoiser.unet = module
        else:
            denoiser.transformers = experts
