"""The folders of Wan's image-to-video models, and the facts that their configs give. Does not import torch."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Facts, FileNames, FolderLayout
from svdq.pipeline.models.model_file import CONFIGS, SchedulerEntry
from svdq.pipeline.models.weights.model_folder import INDEX, class_in, read_json

#: The schedulers whose state is passed on, and the name of the shift in the config of each.
SHIFT_SETTINGS = {"UniPCMultistepScheduler": "flow_shift", "FlowMatchEulerDiscreteScheduler": "shift"}
HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"  # the experts: of the noisy steps and of the others
#: Defaults of the configs: diffusers', which for a transformer are the published 14B models'.
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
    "pos_embed_seq_len": None,
}
VAE_DEFAULTS: dict[str, Any] = {
    "base_dim": 96,
    "z_dim": 16,
    "in_channels": 3,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 8,
}
#: Settings of a scheduler with which a step draws random numbers, or keeps more than svdq passes on.
_UNSUPPORTED = (
    "stochastic_sampling",
    "solver_p",
    "use_dynamic_shifting",
    # Noise levels that `experts.py` does not compute.
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "shift_terminal",
)

#: From names of T5 encoders in GGUF (llama.cpp) and in Wan's original code to transformers'.
_T5 = {
    r"^(token_embd|token_embedding)\.": "shared.",
    r"^(enc\.output_norm|norm)\.": "encoder.final_layer_norm.",
    r"^(enc\.blk|blocks)\.": "encoder.block.",
    r"\.attn[._]([qkvo])\.": r".layer.0.SelfAttention.\1.",
    r"\.(attn_rel_b|pos_embedding\.embedding)\.": ".layer.0.SelfAttention.relative_attention_bias.",
    r"\.(attn_norm|norm1)\.": ".layer.0.layer_norm.",
    r"\.(ffn_gate|ffn\.gate\.0)\.": ".layer.1.DenseReluDense.wi_0.",
    r"\.(ffn_up|ffn\.fc1)\.": ".layer.1.DenseReluDense.wi_1.",
    r"\.(ffn_down|ffn\.fc2)\.": ".layer.1.DenseReluDense.wo.",
    r"\.(ffn_norm|norm2)\.": ".layer.1.layer_norm.",
}
#: Original names in the levels of Wan 2.2's VAE, which diffusers does not convert, such as
#: encoder.downsamples.0.downsamples.2.resample.1.weight.
_VAE_LEVELS = {
    r"^(\w+)\.(down|up)samples\.(\d+)\.\2samples\.\d+\.(resample|time_conv)\.": r"\1.\2_blocks.\3.\2sampler.\4.",
    r"^(\w+)\.(down|up)samples\.(\d+)\.\2samples\.(\d+)\.": r"\1.\2_blocks.\3.resnets.\4.",
    **{
        rf"(\.resnets\.\d+)\.{theirs}\.": rf"\1.{ours}."
        for theirs, ours in {
            r"residual\.0": "norm1",
            r"residual\.2": "conv1",
            r"residual\.3": "norm2",
            r"residual\.6": "conv2",
            "shortcut": "conv_shortcut",
        }.items()
    },
}
#: Original names of layers as musubi-tuner flattens them in LoRAs: `blocks_3_self_attn_q`.
_FLATTENED = {
    r"^blocks_(\d+)_(self_attn|cross_attn)_(q|k|v|o|k_img|v_img)\.": r"blocks.\1.\2.\3.",
    r"^blocks_(\d+)_ffn_(\d)\.": r"blocks.\1.ffn.\2.",
    r"^(text_embedding|time_embedding|time_projection)_(\d)\.": r"\1.\2.",
    r"^img_emb_proj_(\d)\.": r"img_emb.proj.\1.",
    r"^head_head\.": "head.head.",
}
_OF_TRANSFORMER = FileNames(
    originals=_FLATTENED,
    # Of FLF2V-14B; diffusers' loader of single files lacks it, its scripts/convert_wan_to_diffusers.py has it.
    renames={r"^img_emb\.emb_pos$": "condition_embedder.image_embedder.pos_embed"},
)

_LAYOUT = FolderLayout(
    pipeline="WanImageToVideoPipeline",
    example="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    components={
        HIGH_NOISE: ("WanTransformer3DModel",),
        LOW_NOISE: ("WanTransformer3DModel",),
        "vae": ("AutoencoderKLWan",),
        "text_encoder": ("UMT5EncoderModel",),
        "tokenizer": ("T5TokenizerFast", "T5Tokenizer"),
        "image_encoder": ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
        "image_processor": ("CLIPImageProcessor", "CLIPProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil"),
        "scheduler": tuple(SHIFT_SETTINGS),
    },
    optional=frozenset({LOW_NOISE, "image_encoder", "image_processor"}),
    denoisers=frozenset({HIGH_NOISE, LOW_NOISE}),
    blocks=frozenset({"WanTransformerBlock", "UMT5Block"}),
    phases={
        "embed": frozenset({"text_encoder"}),
        "encode": frozenset({"vae", "image_encoder"}),
        "decode": frozenset({"vae"}),
    },
    float32=frozenset({"vae", "image_encoder"}),  # as diffusers' documentation recommends
    kept_float32=("time_embedder", "time_embedding"),  # diffusers' name and the original one; norms are small
    settings=("boundary_ratio", "expand_timesteps"),
    weighted=(HIGH_NOISE, LOW_NOISE, "vae", "text_encoder", "image_encoder"),
    file_names={
        HIGH_NOISE: _OF_TRANSFORMER,
        LOW_NOISE: _OF_TRANSFORMER,
        "vae": FileNames(originals=_VAE_LEVELS),
        "text_encoder": FileNames(originals=_T5),
    },
)
#: The folder of TI2V-5B names the class that makes videos from text.
_TEXT_AND_IMAGE_LAYOUT = replace(
    _LAYOUT,
    pipeline="WanPipeline",
    example="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    components={name: kinds for name, kinds in _LAYOUT.components.items() if name not in _LAYOUT.optional},
    weighted=(HIGH_NOISE, "vae", "text_encoder"),
)
LAYOUTS: Mapping[str, FolderLayout] = {layout.pipeline: layout for layout in (_LAYOUT, _TEXT_AND_IMAGE_LAYOUT)}


def read_facts(folder: Path, name: str) -> Facts:
    """Return the values of `PUBLISHED` for a model folder; raises InputError if svdq cannot run it exactly."""
    index = read_json(folder, INDEX, name)
    scheduler = read_json(folder, "scheduler/scheduler_config.json", name)
    if CONFIGS not in folder.parents:  # whose tokenizer is in the text encoder's file
        # Without it, transformers makes a tokenizer that reads every prompt as unknown words.
        read_json(folder, "tokenizer/tokenizer.json", name)
    boundary, is_expanded = index.get("boundary_ratio"), index.get("expand_timesteps") is True
    if index["_class_name"] == _TEXT_AND_IMAGE_LAYOUT.pipeline and not is_expanded:
        raise InputError(
            f"The model {name} makes videos from text only (WanPipeline); give an image-to-video model such as "
            f"{_LAYOUT.example}."
        )
    if (boundary is not None) != (class_in(index, LOW_NOISE) is not None):
        raise InputError(
            f"The model {name} must have both boundary_ratio and transformer_2 in its model_index.json, or none of "
            "them; get the whole model again."
        )
    if unsupported := [setting for setting in _UNSUPPORTED if scheduler.get(setting)]:
        raise InputError(
            f"The scheduler of the model {name} has {unsupported[0]} on, which svdq does not support; use a model with "
            "the scheduler settings of the published ones."
        )
    return {
        "boundary_ratio": boundary,
        "expand_timesteps": is_expanded,
        "has_image_encoder": class_in(index, "image_encoder") is not None,
        "scheduler": scheduler,
        "transformer": TRANSFORMER_DEFAULTS | read_json(folder, "transformer/config.json", name),
        "vae": VAE_DEFAULTS | read_json(folder, "vae/config.json", name),
    }


def use_scheduler(facts: Facts, given: SchedulerEntry) -> Facts:
    """Return the facts that another scheduler changes; raises InputError if svdq does not know its state."""
    changed: dict[str, Any] = {}
    if given.stage_2_sigmas is not None:
        raise InputError("Wan denoises in one stage, so it has no stage_2_sigmas; leave them out.")
    if given.class_name not in (None, facts["scheduler"]["_class_name"]):
        if given.class_name not in SHIFT_SETTINGS:
            raise InputError(
                f"There is no scheduler {given.class_name!r} for Wan; it may be {' or '.join(SHIFT_SETTINGS)}."
            )
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
        settings = flow if given.class_name == "UniPCMultistepScheduler" else {}
        changed["scheduler"] = {"_class_name": given.class_name, "num_train_timesteps": 1000, **settings}
    if given.sigmas is not None:
        changed["sigmas"] = given.sigmas if isinstance(given.sigmas, str) else list(given.sigmas)
    if (given.boundary or given.switch_at) and facts["boundary_ratio"] is None:
        raise InputError("The base has one transformer, so it has no boundary and no switch_at; leave these out.")
    if given.boundary is not None:
        changed["boundary_ratio"] = given.boundary
    if given.switch_at is not None:
        changed["switch_at"] = given.switch_at
    return changed
