"""Writes untrained models with Wan's classes, each less than 1 MB, for tests. Their videos show noise.

Structure and settings are Wan's (the compression of the VAEs, patches, scheduler, boundary); only the widths are small,
and the weights are random.
"""

import string
from pathlib import Path
from typing import Any, Literal

import torch

from svdq.pipeline.models.components import be_quiet
from svdq.pipeline.models.folder_files import claim, name_classes, writing
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.wan.parameters import WanParameters

#: Two experts (2.2 I2V-A14B), CLIP's image encoder (2.1 I2V-14B), and the photo as first latent frame (2.2 TI2V-5B).
Variant = Literal["i2v-a14b", "i2v-14b", "ti2v-5b"]
VARIANTS: tuple[Variant, ...] = ("i2v-a14b", "i2v-14b", "ti2v-5b")

#: Widths of the text encoder and of CLIP.
_TEXT_DIM, _IMAGE_DIM = 32, 16
#: Empirical factors of last layers, which restore the spread of a trained model's outputs and the influence of the
#: prompt on them, so that frames vary and comparisons of their bits are meaningful.
_LIVELY = {"proj_out": 3.0, "text": 16.0, "decoder": 2.0}
#: The settings of schedulers: as published with Wan2.2-I2V-A14B-Diffusers, and as in distilled models.
SCHEDULERS: dict[str, dict[str, Any]] = {
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
    """Write the model into `folder`, a diffusers directory of less than 1 MB; the same bytes every time.

    A folder that svdq has written before is overwritten.

    Raises:
        InputError: the folder has other content, or cannot be written.
    """
    claim(folder, WanParameters.title)
    be_quiet()
    import diffusers

    experts = variant == "i2v-a14b"
    expanded = variant == "ti2v-5b"
    settings = SCHEDULERS[scheduler] | ({"flow_shift": 5.0} if expanded else {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = _tokenizer()
        parts: dict[str, Any] = {
            HIGH_NOISE: _transformer(variant),
            LOW_NOISE: _transformer(variant) if experts else None,
            "vae": _vae(variant),
            "text_encoder": _text_encoder(len(tokenizer)),
            "image_encoder": _image_encoder() if variant == "i2v-14b" else None,
        }
    pipeline: Any = diffusers.WanImageToVideoPipeline(
        **{name: part and part.eval() for name, part in parts.items()},
        tokenizer=tokenizer,
        image_processor=_image_processor() if variant == "i2v-14b" else None,
        scheduler=getattr(diffusers, scheduler)(**settings),
        boundary_ratio=0.9 if experts else None,
        expand_timesteps=expanded,
    )
    with writing(folder):
        pipeline.save_pretrained(folder)
        name_classes(
            folder,
            _class_name="WanPipeline" if expanded else "WanImageToVideoPipeline",
            tokenizer=["transformers", "T5TokenizerFast"],
            image_processor=["transformers", "CLIPImageProcessor"],
        )


def _transformer(variant: Variant) -> Any:
    from diffusers import WanTransformer3DModel

    channels = {"i2v-a14b": (36, 16), "i2v-14b": (36, 16), "ti2v-5b": (48, 48)}[variant]
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
        **({"image_dim": _IMAGE_DIM, "added_kv_proj_dim": 24} if variant == "i2v-14b" else {}),
    )
    with torch.no_grad():
        transformer.proj_out.weight.mul_(_LIVELY["proj_out"])
        for block in transformer.blocks:
            block.attn2.to_out[0].weight.mul_(_LIVELY["text"])
    return transformer


def _vae(variant: Variant) -> Any:
    from diffusers import AutoencoderKLWan

    config: dict[str, Any] = {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    if variant == "ti2v-5b":
        # Real: 48 channels, and 2x2 pixels as channels before and after, for a picture compressed 16 times.
        config |= {"z_dim": 48, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48, "is_residual": True}
        config |= {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
    vae: Any = AutoencoderKLWan(**config)
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(_LIVELY["decoder"])
    return vae


def _text_encoder(vocabulary: int) -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary, d_model=_TEXT_DIM, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0
        )
    )


def _tokenizer() -> Any:
    """Return a tokenizer whose pieces are the printable characters of ASCII."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *sorted(set(string.printable) - set(string.whitespace))]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(place)) for place, piece in enumerate(pieces)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return T5TokenizerFast(tokenizer_object=tokenizer, extra_ids=0, **names)


def _image_encoder() -> Any:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        image_size=224, patch_size=32, hidden_size=_IMAGE_DIM, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    return CLIPVisionModel(config)


def _image_processor() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224})
