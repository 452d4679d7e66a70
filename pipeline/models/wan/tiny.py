"""Writes an untrained Wan with the classes of diffusers, small enough for tests, as `untrained.py` says."""

import string
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from svdq.pipeline.models.untrained import CLIP, claim, enlarge, image_processor, save
from svdq.pipeline.models.wan.family import WanParameters
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.weights.components import be_quiet

#: Wan with two experts (2.2 I2V-A14B), CLIP's image encoder (2.1 I2V-14B), the same for first and last frame (2.1
#: FLF2V-14B), or the photo as first latent frame (2.2 TI2V-5B).
Variant = Literal["i2v-a14b", "i2v-14b", "flf2v-14b", "ti2v-5b"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
_WITH_IMAGE_ENCODER = ("i2v-14b", "flf2v-14b")

_TEXT_DIM, _IMAGE_DIM = 32, 16  # of the text and image encoders
_IMAGE_TOKENS = (224 // 32) ** 2 + 1  # tokens of a photo: CLIP's patches and one for the whole
#: The settings of Wan's schedulers: as published with Wan2.2-I2V-A14B-Diffusers, and as in distilled models.
WAN_SCHEDULERS: dict[str, dict[str, Any]] = {
    "UniPCMultistepScheduler": {
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 3.0,
        "solver_order": 2,
    },
    "FlowMatchEulerDiscreteScheduler": {"num_train_timesteps": 1000, "shift": 8.0},
}


def write_tiny_wan(folder: Path, variant: Variant = "i2v-a14b", *, scheduler: str = "UniPCMultistepScheduler") -> None:
    """Write a model of Wan of less than 1 MB into a folder; raises InputError if it has content of others."""
    claim(folder, WanParameters.title)
    be_quiet()
    import diffusers
    import transformers

    text_sizes = {"d_model": _TEXT_DIM, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    image_sizes = {"hidden_size": _IMAGE_DIM, **CLIP}
    has_experts, is_expanded, has_image = variant == "i2v-a14b", variant == "ti2v-5b", variant in _WITH_IMAGE_ENCODER
    shift = {"ti2v-5b": 5.0, "flf2v-14b": 16.0}.get(variant)
    settings = WAN_SCHEDULERS[scheduler] | ({"flow_shift": shift} if shift else {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = _tokenizer()
        texts = transformers.UMT5Config(vocab_size=len(tokenizer), dropout_rate=0.0, **text_sizes)
        images = transformers.CLIPVisionConfig(**image_sizes)
        parts: dict[str, Any] = {
            HIGH_NOISE: _transformer(variant),
            LOW_NOISE: _transformer(variant) if has_experts else None,
            "vae": _wan_vae(variant),
            "text_encoder": transformers.UMT5EncoderModel(texts),
            "image_encoder": transformers.CLIPVisionModel(images) if has_image else None,
        }
    pipeline: Any = diffusers.WanImageToVideoPipeline(
        **{name: part and part.eval() for name, part in parts.items()},
        tokenizer=tokenizer,
        image_processor=image_processor() if has_image else None,
        scheduler=getattr(diffusers, scheduler)(**settings),
        boundary_ratio=0.9 if has_experts else None,
        expand_timesteps=is_expanded,
    )
    save(
        pipeline,
        folder,
        _class_name="WanPipeline" if is_expanded else "WanImageToVideoPipeline",
        tokenizer=["transformers", "T5TokenizerFast"],
        image_processor=["transformers", "CLIPImageProcessor"],
    )


def _transformer(variant: Variant) -> Any:
    from diffusers import WanTransformer3DModel

    channels = (48, 48) if variant == "ti2v-5b" else (36, 16)
    transformer: Any = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels[0],
        out_channels=channels[1],
        text_dim=_TEXT_DIM,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        # Positions of up to 2048x2048 pixels and 1021 frames.
        rope_max_seq_len=256,
        **({"image_dim": _IMAGE_DIM, "added_kv_proj_dim": 24} if variant in _WITH_IMAGE_ENCODER else {}),
        pos_embed_seq_len=2 * _IMAGE_TOKENS if variant == "flf2v-14b" else None,
    )
    if variant == "flf2v-14b":
        torch.nn.init.normal_(transformer.condition_embedder.image_embedder.pos_embed)
    enlarge(transformer.proj_out.weight, 3.0)
    for block in transformer.blocks:
        enlarge(block.attn2.to_out[0].weight, 16.0)
    return transformer


def _wan_vae(variant: Variant) -> Any:
    from diffusers import AutoencoderKLWan

    config: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    if variant == "ti2v-5b":
        # Real: 48 channels, and 2x2 pixels as channels before and after, for a picture compressed 16 times.
        config |= {"z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48, "is_residual": True}
        config |= {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
    vae: Any = AutoencoderKLWan(**config)
    enlarge(vae.decoder.conv_out.weight, 2.0)
    return vae


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *sorted(set(string.printable) - set(string.whitespace))]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0, **names)
