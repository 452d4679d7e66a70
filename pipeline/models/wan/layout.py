"""The folders of Wan's image-to-video models: their components, and what their configs must say. Without torch."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.folder_check import Layout, Setting, check_counts, check_processor, check_settings, class_in
from svdq.pipeline.models.folder_files import read_json

#: The schedulers whose state svdq knows, and the name of the shift in the config of each.
SHIFT_SETTINGS = {"UniPCMultistepScheduler": "flow_shift", "FlowMatchEulerDiscreteScheduler": "shift"}
#: The experts: of the noisy steps and of the others.
HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"
TRANSFORMER_CLASS, VAE_CLASS = "WanTransformer3DModel", "AutoencoderKLWan"
#: Defaults of the configs: diffusers' defaults. Those of a transformer are the published 14B models'.
TRANSFORMER_DEFAULTS: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "ffn_dim": 13824,
    "num_layers": 40,
    "image_dim": None,
}
VAE_DEFAULTS: dict[str, Any] = {
    "base_dim": 96,
    "z_dim": 16,
    "in_channels": 3,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 8,
}
#: Settings of a scheduler that must be off, because they change its timesteps or draw random numbers.
_OFF = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_dynamic_shifting",
    "shift_terminal",
    "solver_p",
    "invert_sigmas",
    "stochastic_sampling",
)


def check_configs(folder: Path, name: str) -> None:
    """Check that the components make an image-to-video model of Wan and fit each other.

    Raises:
        InputError: a config cannot be read, an expert is missing, or the model makes videos from text only.
    """
    index = read_json(folder, "model_index.json", name)
    transformer = TRANSFORMER_DEFAULTS | read_json(folder, f"{HIGH_NOISE}/config.json", name)
    vae = VAE_DEFAULTS | read_json(folder, "vae/config.json", name)
    counts = ("num_attention_heads", "attention_head_dim", "in_channels", "num_layers", "ffn_dim")
    check_counts(name, HIGH_NOISE, transformer, counts)
    check_counts(name, "vae", vae, ("z_dim", "base_dim", "scale_factor_temporal", "scale_factor_spatial"))
    expanded = index.get("expand_timesteps") is True
    channels = vae["z_dim"]
    # Latents, photo and mask; with expanded timesteps the photo takes the place of the first latents.
    needed = channels if expanded else 2 * channels + vae["scale_factor_temporal"]
    _check_experts(folder, name, index, transformer)
    text_encoder = read_json(folder, "text_encoder/config.json", name)
    settings: list[Setting] = [
        (HIGH_NOISE, "class", transformer.get("_class_name", TRANSFORMER_CLASS), TRANSFORMER_CLASS, ""),
        ("vae", "class", vae.get("_class_name", VAE_CLASS), VAE_CLASS, ""),
        (HIGH_NOISE, "in_channels", transformer["in_channels"], needed, "latents, photo and mask"),
        (HIGH_NOISE, "out_channels", transformer["out_channels"], channels, "the latents of the vae"),
        (HIGH_NOISE, "text_dim", transformer["text_dim"], text_encoder.get("d_model", 512), "text_encoder's d_model"),
        (HIGH_NOISE, "patch_size", transformer["patch_size"], [1, 2, 2], "as in all of Wan's models"),
        ("vae", "scale_factor_temporal", vae["scale_factor_temporal"], 4, "as in all of Wan's models"),
        ("vae", "scale_factor_spatial", vae["scale_factor_spatial"], 16 if expanded else 8, "as in such models"),
    ]
    check_settings(name, "Wan", settings, LAYOUT.pipeline)
    _check_scheduler(folder, name)
    _check_texts_and_photos(folder, name, index)


def _check_texts_and_photos(folder: Path, name: str, index: Mapping[str, Any]) -> None:
    """Check the files without weights that encode prompts and photos.

    transformers makes a tokenizer that reads every prompt as unknown words if its vocabulary is missing.

    Raises:
        InputError: one is missing or cannot be read.
    """
    vocabulary = read_json(folder, "tokenizer/tokenizer.json", name).get("model")
    if not isinstance(vocabulary, dict) or not vocabulary.get("vocab"):
        raise InputError(f"The tokenizer/tokenizer.json of the model {name} has no vocabulary; get the model again.")
    read_json(folder, "tokenizer/tokenizer_config.json", name)
    if class_in(index, "image_encoder") is not None:
        if class_in(index, "image_processor") is None:
            raise InputError(f"The model {name} has an image_encoder and no image_processor; get the model again.")
        check_processor(folder, "image_processor", name)


def _check_experts(folder: Path, name: str, index: Mapping[str, Any], transformer: Mapping[str, Any]) -> None:
    """Check that the folder has the second expert or the image encoder if, and only if, the model needs it.

    Raises:
        InputError: it does not.
    """
    boundary = index.get("boundary_ratio")
    if (boundary is not None) != (class_in(index, LOW_NOISE) is not None):
        missing = "no transformer_2 for the steps after it" if boundary is not None else "no boundary_ratio"
        given = f"boundary_ratio {boundary}" if boundary is not None else "a transformer_2"
        raise InputError(
            f"The model {name} has {given} and {missing}; get the whole model again, with both of its experts."
        )
    if boundary is not None:
        if isinstance(boundary, bool) or not isinstance(boundary, int | float) or not 0 <= boundary <= 1:
            raise InputError(f"The model {name} has boundary_ratio {boundary!r}; it must be a number such as 0.9.")
        second = TRANSFORMER_DEFAULTS | read_json(folder, f"{LOW_NOISE}/config.json", name)
        for key in ("_class_name", *TRANSFORMER_DEFAULTS):
            if second.get(key) != transformer.get(key):
                raise InputError(
                    f"The experts of the model {name} do not belong together: {key} is {transformer.get(key)} in the "
                    f"transformer and {second.get(key)} in transformer_2; get the model again."
                )
    if (transformer["image_dim"] is not None) != (class_in(index, "image_encoder") is not None):
        has, lacks = ("an image_encoder", "uses none") if transformer["image_dim"] is None else ("none", "needs one")
        raise InputError(f"The transformer of the model {name} {lacks}, and the folder has {has}; get the model again.")


def _check_scheduler(folder: Path, name: str) -> None:
    """Check that the scheduler samples flow matching without random numbers.

    Raises:
        InputError: it does not.
    """
    config = read_json(folder, "scheduler/scheduler_config.json", name)
    kind = config.get("_class_name")
    problem = next((f"{setting} is on" for setting in _OFF if config.get(setting)), "")
    if not isinstance(kind, str) or kind not in SHIFT_SETTINGS:
        problem = f"it is a {kind}"
    elif not isinstance(shift := config.get(SHIFT_SETTINGS[kind], 1.0), int | float) or not 0 < shift < math.inf:
        problem = f"its {SHIFT_SETTINGS[kind]} is {shift!r}"
    elif (num := config.get("num_train_timesteps", 1000)) != 1000:
        problem = f"its num_train_timesteps is {num!r}"
    elif kind == "UniPCMultistepScheduler" and not config.get("use_flow_sigmas"):
        problem = "use_flow_sigmas is off"
    if problem:
        raise InputError(
            f"The scheduler of the model {name} cannot be used: {problem}; svdq works with "
            f"{' and '.join(SHIFT_SETTINGS)} and flow matching as in the published models."
        )


def _check_text_and_image(folder: Path, name: str) -> None:
    """Check a WanPipeline, the class of text-to-video models and of TI2V-5B, which does both.

    Raises:
        InputError: it makes videos from text only, or its configs do not fit.
    """
    if read_json(folder, "model_index.json", name).get("expand_timesteps") is not True:
        raise InputError(
            f"The model {name} makes videos from text only (WanPipeline); give an image-to-video model such as "
            f"{LAYOUT.example}."
        )
    check_configs(folder, name)


LAYOUT = Layout(
    pipeline="WanImageToVideoPipeline",
    example="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    components={
        HIGH_NOISE: (TRANSFORMER_CLASS,),
        LOW_NOISE: (TRANSFORMER_CLASS,),
        "vae": (VAE_CLASS,),
        "text_encoder": ("UMT5EncoderModel",),
        "tokenizer": ("T5TokenizerFast", "T5Tokenizer"),
        "image_encoder": ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
        "image_processor": (
            "CLIPImageProcessor",
            "CLIPProcessor",
            "CLIPImageProcessorFast",
            "CLIPImageProcessorPil",
        ),
        "scheduler": tuple(SHIFT_SETTINGS),
    },
    optional=frozenset({LOW_NOISE, "image_encoder", "image_processor"}),
    denoisers=frozenset({HIGH_NOISE, LOW_NOISE}),
    # As diffusers' documentation recommends.
    float32=frozenset({"vae", "image_encoder"}),
    settings=("boundary_ratio", "expand_timesteps"),
    weighted=(HIGH_NOISE, LOW_NOISE, "vae", "text_encoder", "image_encoder"),
    check_configs=check_configs,
)
#: The folder of TI2V-5B names the class that makes videos from text.
TEXT_AND_IMAGE_LAYOUT = replace(
    LAYOUT,
    pipeline="WanPipeline",
    example="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    components={name: kinds for name, kinds in LAYOUT.components.items() if name not in LAYOUT.optional},
    weighted=(HIGH_NOISE, "vae", "text_encoder"),
    check_configs=_check_text_and_image,
)
