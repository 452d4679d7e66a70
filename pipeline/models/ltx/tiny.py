"""Writes an untrained LTX-2 with the classes of diffusers, small enough for tests, as `untrained.py` says."""

import string
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from svdq.pipeline.models.ltx.family import LtxParameters
from svdq.pipeline.models.ltx.layout import GIVEN_SIGMAS, UPSAMPLER
from svdq.pipeline.models.untrained import claim, enlarge, save
from svdq.pipeline.models.weights.components import be_quiet

#: LTX-2.3 distilled, the same not distilled, and 2.5.
Variant = Literal["2.3", "2.3-dev", "2.5"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)

_CHANNELS, _AUDIO_CHANNELS, _MEL_BINS = 8, 4, 16  # of latents, and of mel spectrograms
_PACKED = _AUDIO_CHANNELS * _MEL_BINS // 4  # channels of a token of the sound
_TEXT_DIM, _TEXT_LAYERS = 16, 2
_HEADS, _HEAD_DIM, _AUDIO_HEAD_DIM = 2, 16, 8  # as many heads of sound as of video: the published model has that


def write_tiny_ltx(folder: Path, variant: Variant = "2.3") -> None:
    """Write a model of LTX-2 of some 13 MB into a folder; raises InputError if it has content of others."""
    claim(folder, LtxParameters.title)
    be_quiet()
    import diffusers
    from diffusers.pipelines.ltx2 import LTX2LatentUpsamplerModel

    is_new = variant == "2.5"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tokenizer = _tokenizer()
        parts: dict[str, Any] = {
            "transformer": _transformer(is_new=is_new),
            "connectors": _connectors(),
            "vae": _vae(),
            "audio_vae": _audio_vae(),
            "vocoder": _vocoder(),
            "text_encoder": _text_encoder(len(tokenizer), is_new=is_new),
        }
        upsampler: Any = LTX2LatentUpsamplerModel(
            in_channels=_CHANNELS, mid_channels=32, num_blocks_per_stage=1, use_rational_resampler=False
        )
        enlarge(upsampler.final_conv.weight, 3.0)
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        **({"use_dynamic_shifting": True, "shift_terminal": 0.1} if variant == "2.3-dev" else GIVEN_SIGMAS),
    )
    pipeline: Any = diffusers.LTX2Pipeline(
        **{name: part.eval() for name, part in parts.items()}, tokenizer=tokenizer, scheduler=scheduler
    )
    save(pipeline, folder, tokenizer=["transformers", "GemmaTokenizerFast"])
    upsampler.save_pretrained(folder / UPSAMPLER)  # beside, as in published folders


def _tokenizer() -> Any:
    from transformers import GemmaTokenizer

    characters = sorted(set(string.printable) - set(string.whitespace))
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *[f"<0x{byte:02X}>" for byte in range(256)], "\u2581"]
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys([*pieces, *characters]))}
    return GemmaTokenizer(vocab=vocabulary, merges=[], model_max_length=1024)


def _text_encoder(vocab_size: int, *, is_new: bool) -> Any:
    import transformers

    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": _TEXT_DIM,
        "intermediate_size": 24,
        "num_hidden_layers": _TEXT_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "sliding_window": 512,
        "max_position_embeddings": 2048,
    }
    if is_new:
        text |= {"global_head_dim": 8, "num_global_key_value_heads": 1}
        config = transformers.Gemma4UnifiedConfig(text_config=text, vision_config=None, audio_config=None)
        return transformers.Gemma4UnifiedForConditionalGeneration(config)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    text |= {"query_pre_attn_scalar": 8}
    return transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )


def _transformer(*, is_new: bool) -> Any:
    from diffusers import LTX2VideoTransformer3DModel

    transformer: Any = LTX2VideoTransformer3DModel(
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_attention_heads=_HEADS,
        attention_head_dim=_HEAD_DIM,
        cross_attention_dim=_HEADS * _HEAD_DIM,
        gated_attn=True,
        cross_attn_mod=True,
        audio_in_channels=_PACKED,
        audio_out_channels=_PACKED,
        audio_num_attention_heads=_HEADS,
        audio_attention_head_dim=_AUDIO_HEAD_DIM,
        audio_cross_attention_dim=_HEADS * _AUDIO_HEAD_DIM,
        audio_gated_attn=True,
        audio_cross_attn_mod=True,
        num_layers=3,
        caption_channels=_TEXT_DIM,
        rope_type="split",
        use_prompt_embeddings=False,
        perturbed_attn=True,
        **({"ff_bias": False, "use_keyframes_abs_pos_embedding": True} if is_new else {}),
    )
    if is_new:
        torch.nn.init.normal_(transformer.keyframes_abs_pos_embedding, std=0.1)
    enlarge(transformer.proj_out.weight, 2.0)
    enlarge(transformer.audio_proj_out.weight, 2.0)
    for block in transformer.transformer_blocks:  # or the prompt would hardly matter
        enlarge(block.attn2.to_out[0].weight, 8.0)
        enlarge(block.audio_attn2.to_out[0].weight, 8.0)
    return transformer


def _connectors() -> Any:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    sizes: dict[str, Any] = {}
    for modality, head_dim in (("video", _HEAD_DIM), ("audio", _AUDIO_HEAD_DIM)):
        sizes |= {
            f"{modality}_connector_num_attention_heads": _HEADS,
            f"{modality}_connector_attention_head_dim": head_dim,
            f"{modality}_connector_num_layers": 1,
            f"{modality}_connector_num_learnable_registers": 128,
            f"{modality}_gated_attn": True,
            f"{modality}_hidden_dim": _HEADS * head_dim,
        }
    return LTX2TextConnectors(
        caption_channels=_TEXT_DIM,
        text_proj_in_factor=_TEXT_LAYERS + 1,
        rope_type="split",
        per_modality_projections=True,
        proj_bias=True,
        **sizes,
    )


def _vae() -> Any:
    from diffusers import AutoencoderKLLTX2Video

    vae: Any = AutoencoderKLLTX2Video(
        latent_channels=_CHANNELS,
        block_out_channels=(16, 32, 64, 64),
        decoder_block_out_channels=(16, 32, 32, 64),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True,) * 4,
        decoder_spatio_temporal_scaling=(True,) * 4,
        decoder_inject_noise=(False,) * 5,
        upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        upsample_residual=(False,) * 4,
        upsample_factor=(2, 2, 1, 2),
        timestep_conditioning=False,
        encoder_causal=True,
        decoder_causal=False,
        encoder_spatial_padding_mode="zeros",
        decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    enlarge(vae.decoder.conv_out.conv.weight, 1.5)
    return _with_statistics(vae)


def _audio_vae() -> Any:
    from diffusers import AutoencoderKLLTX2Audio

    vae: Any = AutoencoderKLLTX2Audio(
        base_channels=_PACKED,  # as many as its statistics have
        ch_mult=(1, 2, 4),
        num_res_blocks=1,
        attn_resolutions=None,
        resolution=64,
        latent_channels=_AUDIO_CHANNELS,
        norm_type="pixel",
        causality_axis="height",
        mel_bins=_MEL_BINS,
        double_z=True,
    )
    enlarge(vae.decoder.conv_out.conv.weight, 8.0)
    return _with_statistics(vae)


def _with_statistics(vae: Any) -> Any:
    """Give the latents a mean and a standard deviation other than 0 and 1, which would hide a mistake."""
    vae.latents_mean.normal_(std=0.3)
    vae.latents_std.uniform_(0.6, 1.4)
    return vae


def _vocoder() -> Any:
    from diffusers.pipelines.ltx2 import LTX2VocoderWithBWE

    vocoder: Any = LTX2VocoderWithBWE(
        in_channels=2 * _MEL_BINS,
        hidden_channels=64,
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        bwe_in_channels=2 * _MEL_BINS,
        bwe_hidden_channels=32,
        bwe_resnet_kernel_sizes=[3],
        bwe_resnet_dilations=[[1, 3, 5]],
        num_mel_channels=_MEL_BINS,
    )
    # Published ones are windows; zeros, which they are in a new model, would mute it.
    vocoder.mel_stft.stft_fn.forward_basis.normal_(std=0.05)
    vocoder.mel_stft.mel_basis.uniform_(0, 0.1)
    enlarge(vocoder.vocoder.conv_in.weight, 6.0)
    enlarge(vocoder.vocoder.conv_out.weight, 0.06)
    return vocoder
