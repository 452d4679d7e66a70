"""The tensors of a Wan sample at a step boundary: their names, shapes and dtypes.

`latents` (1, C, F', H', W'), with F' frames after the VAE's compression: float32, or the dtype computed in after the
first step of a scheduler that rounds them. `condition` (1, 4 + C, F', H', W'), mask and encoded photo, or
(1, C, 1, H', W') of a TI2V model: float32. `prompt_embeds` (1, N, E), with guidance `negative_prompt_embeds`, and
`image_embeds` (1, 257, I) of a 2.1 model: the dtype computed in. What the scheduler keeps: `scheduling.history_names`.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from svdq.pipeline.models.base import State, check_tensor
from svdq.pipeline.models.family import Facts
from svdq.pipeline.parameters import VideoParameters

#: Tokens of a prompt: longer ones are cut off, shorter ones padded with zeros. The padding does not travel.
MAX_TOKENS = 512
#: Tokens of a photo, for the warm-up: CLIP's patches of ViT-H/14 and one for the whole.
IMAGE_TOKENS = 257


def shapes(parameters: VideoParameters, facts: Facts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of latents and condition."""
    config, vae = facts["transformer"], facts["vae"]
    factor = vae["scale_factor_spatial"]
    frames = (parameters.num_frames - 1) // vae["scale_factor_temporal"] + 1
    picture = (parameters.height // factor, parameters.width // factor)
    latents = (1, vae["z_dim"], frames, *picture)
    if facts["expand_timesteps"]:
        return latents, (1, vae["z_dim"], 1, *picture)
    return latents, (1, config["in_channels"] - vae["z_dim"], frames, *picture)


def check(state: State, parameters: VideoParameters, facts: Facts, dtype: str, history: Collection[str]) -> None:
    """Check the names, shapes and dtypes of a state.

    Args:
        state: of a sample at any step boundary.
        parameters: of the video.
        facts: of the model.
        dtype: torch's name of the dtype computed in.
        history: names of the tensors that the scheduler may keep.

    Raises:
        ValueError: it is not a state of such a video.
    """
    config = facts["transformer"]
    latents, condition = shapes(parameters, facts)
    # A scheduler that keeps nothing may round them to the dtype computed in.
    check_tensor(state, "latents", latents, "float32" if history else None)
    check_tensor(state, "condition", condition, "float32")
    for name in ("prompt_embeds", *("negative_prompt_embeds",) * parameters.guided):
        check_tensor(state, name, (1, None, config["text_dim"]), dtype)
        if not 1 <= state[name].shape[1] <= MAX_TOKENS:
            raise ValueError(f"its {name} are of {state[name].shape[1]} tokens")
    if facts["has_image_encoder"]:
        check_tensor(state, "image_embeds", (1, None, config["image_dim"]), dtype)
    for name in set(history) & set(state):
        check_tensor(state, name, latents, "float32")


def zeros(
    parameters: VideoParameters, facts: Facts, dtype: torch.dtype, history: Collection[str], device: torch.device
) -> dict[str, Tensor]:
    """Return a state of zeros, with all that a scheduler may keep."""
    config = facts["transformer"]
    latents, condition = shapes(parameters, facts)
    state = {name: torch.zeros(latents) for name in ("latents", *history)}
    state["condition"] = torch.zeros(condition)
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        state[name] = torch.zeros((1, 1, config["text_dim"]), dtype=dtype)
    if facts["has_image_encoder"]:
        state["image_embeds"] = torch.zeros((1, IMAGE_TOKENS, config["image_dim"]), dtype=dtype)
    return {name: tensor.to(device) for name, tensor in state.items()}


def padded(embedding: Tensor) -> Tensor:
    """Append zeros to (1, N, E) up to 512 tokens, as diffusers does."""
    return torch.nn.functional.pad(embedding, (0, 0, 0, MAX_TOKENS - embedding.shape[1]))
