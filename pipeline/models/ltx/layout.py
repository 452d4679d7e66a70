"""The folders of LTX-2 models, their facts, and the names of weights in their files. Does not import torch.

Names of Lightricks, ComfyUI and llama.cpp are as in diffusers' scripts/convert_ltx2_to_diffusers.py, as far as its
loaders do not convert them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.family import Facts, FileNames, FolderLayout
from svdq.pipeline.models.model_file import SchedulerEntry
from svdq.pipeline.models.weights.model_folder import read_index, read_json

#: From names of Gemma in GGUF to transformers'.
_GEMMA_GGUF = {
    r"^token_embd\.": "model.embed_tokens.",
    r"^output_norm\.": "model.norm.",
    r"^blk\.": "model.layers.",
    r"\.attn_(q|k|v)\.": r".self_attn.\1_proj.",
    r"\.attn_output\.": ".self_attn.o_proj.",
    r"\.attn_(q|k)_norm\.": r".self_attn.\1_norm.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".pre_feedforward_layernorm.",
    r"\.post_attention_norm\.": ".post_attention_layernorm.",
    r"\.post_ffw_norm\.": ".post_feedforward_layernorm.",
    r"\.ffn_(gate|up|down)\.": r".mlp.\1_proj.",
    r"\.layer_output_scale\.weight$": ".layer_scalar",
}
_OTHERS = r"vae\.|audio_vae\.|vocoder\.|text_embedding_projection\.|.*_embeddings_connector\."
FILE_NAMES: Mapping[str, FileNames] = {
    "transformer": FileNames(
        among_others=rf"(?!{_OTHERS})",
        originals={  # as musubi-tuner flattens them in LoRAs: `adaln_single_emb_timestep_embedder_linear_1`
            r"^(\w*adaln_single)_emb_timestep_embedder_(linear_\d)\.": r"\1.emb.timestep_embedder.\2.",
            r"^(\w*adaln_single)_linear\.": r"\1.linear.",
        },
        renames={r"^(audio_)?prompt_adaln_single\.": r"\1prompt_adaln."},  # diffusers#14145
    ),
    "vae": FileNames(
        among_others=r"vae\.",
        renames={  # diffusers#14145
            r"^decoder\.up_blocks\.7\.": "decoder.up_blocks.3.upsamplers.0.",
            r"^decoder\.up_blocks\.8\.": "decoder.up_blocks.3.",
        },
    ),
    "audio_vae": FileNames(among_others=r"audio_vae\."),
    "vocoder": FileNames(
        among_others=r"vocoder\.",
        renames={
            r"^vocoder\.(?=vocoder\.|bwe_generator\.|mel_stft\.)": "",
            r"\.ups\.": ".upsamplers.",
            r"\.resblocks\.": ".resnets.",
            r"\.conv_pre\.": ".conv_in.",
            r"\.conv_post\.": ".conv_out.",
            r"\.act_post\.": ".act_out.",
            r"\.downsample\.lowpass\.": ".downsample.",
        },
    ),
    "connectors": FileNames(
        among_others=r"(?:.*\.)?(?:video|audio)_embeddings_connector\.|text_embedding_projection\.",
        renames={
            r"^(?:connectors\.)?(video|audio)_embeddings_connector\.": r"\1_connector.",
            r"\.transformer_1d_blocks\.": ".transformer_blocks.",
            r"\.(q|k)_norm\.": r".norm_\1.",
            r"^text_embedding_projection\.(video|audio)_aggregate_embed\.": r"\1_text_proj_in.",
        },
        is_split=True,
    ),
    "text_encoder": FileNames(
        among_others=r"(?!text_embedding_projection\.|vision_model\.|multi_modal_projector\.|audio_projector\.)",
        renames=_GEMMA_GGUF
        | {
            r"^language_model\.model\.": "model.language_model.",
            r"^model\.(embed_tokens|layers|norm)\.": r"model.language_model.\1.",
        },
        raised_norms=("gemma3",),  # transformers adds it in the norm
        unused=("vision_tower", "multi_modal_projector", "embed_vision", "embed_audio"),
    ),
}


TRANSFORMER, UPSAMPLER = "transformer", "latent_upsampler"
#: The noise levels of distilled models, of the first or only stage and of the second one; diffusers has them under the
#: same names, in a module that imports torch.
DISTILLED_SIGMA_VALUES = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875)
STAGE_2_DISTILLED_SIGMA_VALUES = (0.909375, 0.725, 0.421875)
#: Samplers by diffusers' names: Euler's method, and one that adds noise in each step but the last, with an eta of 1.
ANCESTRAL = "LTXEulerAncestralRFScheduler"
SAMPLERS = ("FlowMatchEulerDiscreteScheduler", ANCESTRAL)
#: Settings of a scheduler for given noise levels, as diffusers' documentation has them.
GIVEN_SIGMAS: dict[str, Any] = {"use_dynamic_shifting": False, "shift_terminal": None}
#: H.264's constant rate factor with which photos are compressed before they are encoded, as in training, by text
#: encoder; diffusers' names are DEFAULT_IMAGE_CRF and LTX2_5_IMAGE_CRF.
IMAGE_CRF = {"Gemma3ForConditionalGeneration": 33, "Gemma4UnifiedForConditionalGeneration": 18}

#: Defaults of the configs, which are the published models' values.
TRANSFORMER_DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 32,
    "attention_head_dim": 128,
    "in_channels": 128,
    "num_layers": 48,
    "cross_attention_dim": 4096,
    "audio_in_channels": 128,
    "audio_cross_attention_dim": 2048,
}
AUDIO_VAE_DEFAULTS: dict[str, Any] = {
    "latent_channels": 8,
    "mel_bins": 64,
    "sample_rate": 16000,
    "mel_hop_length": 160,
}
#: Settings of a scheduler with which a step draws random numbers.
_UNSUPPORTED = ("stochastic_sampling",)

LAYOUT = FolderLayout(
    pipeline="LTX2Pipeline",
    runs="LTX2ConditionPipeline",
    example="diffusers/LTX-2.3-Distilled-Diffusers",
    components={
        TRANSFORMER: ("LTX2VideoTransformer3DModel",),
        "vae": ("AutoencoderKLLTX2Video",),
        "audio_vae": ("AutoencoderKLLTX2Audio",),
        "vocoder": ("LTX2VocoderWithBWE",),
        "connectors": ("LTX2TextConnectors",),
        "text_encoder": tuple(IMAGE_CRF),
        "tokenizer": ("GemmaTokenizer", "GemmaTokenizerFast"),
        UPSAMPLER: ("LTX2LatentUpsamplerModel",),
        "scheduler": ("FlowMatchEulerDiscreteScheduler",),
    },
    optional=frozenset({UPSAMPLER}),
    beside=frozenset({UPSAMPLER}),
    as_named=frozenset({"text_encoder"}),
    modules=("diffusers", "transformers", "diffusers.pipelines.ltx2"),
    denoisers=frozenset({TRANSFORMER}),
    blocks=frozenset({"LTX2VideoTransformerBlock", "Gemma3DecoderLayer", "Gemma4UnifiedTextDecoderLayer"}),
    unconverted=frozenset({"vae"}),
    float32=frozenset({"vocoder"}),  # in bfloat16 it is audibly wrong
    phases={
        "embed": frozenset({"text_encoder", "connectors"}),
        "encode": frozenset({"vae"}),
        "step": frozenset({UPSAMPLER}),
        "decode": frozenset({"vae", "audio_vae", "vocoder"}),
    },
    # Of Gemma 3 12B, embeddings of 1.0 billion weights, the vision tower, and three of 48 layers.
    streamed={"text_encoder": 0.2},
    versions={"Gemma4UnifiedForConditionalGeneration": "gemma4-12b-ltx"},
    weighted=(TRANSFORMER, UPSAMPLER, "vae", "audio_vae", "vocoder", "connectors", "text_encoder"),
    file_names=FILE_NAMES,
)


def read_facts(folder: Path, name: str) -> Facts:
    """Return the values of `PUBLISHED` for a model folder; raises InputError if svdq cannot run it exactly."""
    index = read_index(folder, name, LAYOUT)
    scheduler = read_json(folder, "scheduler/scheduler_config.json", name)
    # Without it, transformers makes a tokenizer that reads every prompt as unknown words.
    read_json(folder, "tokenizer/tokenizer.json", name)
    if unsupported := [setting for setting in _UNSUPPORTED if scheduler.get(setting)]:
        raise InputError(
            f"The scheduler of the model {name} has {unsupported[0]} on, which svdq does not support; use a model with "
            "the scheduler settings of the published ones."
        )
    vae = read_json(folder, "vae/config.json", name)
    if vae.get("timestep_conditioning"):
        raise InputError(f"The VAE of the model {name} adds noise as it decodes, which svdq does not support.")
    encoder = index["text_encoder"]
    transformer = TRANSFORMER_DEFAULTS | read_json(folder, f"{TRANSFORMER}/config.json", name)
    if not transformer.get("cross_attn_mod"):
        raise InputError(f"The model {name} is LTX-2.0; svdq makes videos with LTX-2.3 and 2.5.")
    return {
        "image_crf": IMAGE_CRF[encoder[1]] if encoder[1] in IMAGE_CRF else IMAGE_CRF["Gemma3ForConditionalGeneration"],
        "has_upsampler": UPSAMPLER in index,
        "scheduler": scheduler,
        "transformer": transformer,
        "vae": vae,
        "audio_vae": AUDIO_VAE_DEFAULTS | read_json(folder, "audio_vae/config.json", name),
        "sound_rate": read_json(folder, "vocoder/config.json", name).get("output_sampling_rate", 48000),
        # Only models that are not distilled shift noise levels by the size of a video.
        **({} if scheduler.get("use_dynamic_shifting") else {"sigmas": list(DISTILLED_SIGMA_VALUES)}),
    }


def use_scheduler(facts: Facts, given: SchedulerEntry) -> Facts:
    """Return the facts that a sampler and noise levels change; raises InputError for any other change."""
    is_other = given.model_fields_set - {"class_name", "sigmas", "stage_2_sigmas"} or isinstance(given.sigmas, str)
    if is_other or given.class_name not in (None, *SAMPLERS):
        raise InputError(
            f"The scheduler of a model file for LTX-2 has lists of sigmas and stage_2_sigmas, and the class "
            f"{' or '.join(SAMPLERS)}; leave all else out."
        )
    changed: dict[str, Any] = {}
    if given.class_name == ANCESTRAL:
        changed["is_ancestral"] = True
    if isinstance(given.sigmas, tuple):
        changed |= {"scheduler": {**facts["scheduler"], **GIVEN_SIGMAS}, "sigmas": list(given.sigmas)}
    if given.stage_2_sigmas is not None:
        changed["stage_2_sigmas"] = list(given.stage_2_sigmas)
    return changed
