"""Names of LTX-2's weights in files of Lightricks, ComfyUI and llama.cpp. Does not import torch.

They are those of diffusers' scripts/convert_ltx2_to_diffusers.py, as far as its loaders do not convert them.
"""

from collections.abc import Mapping

from svdq.pipeline.models.family import FileNames

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
        unused=("vision_tower", "multi_modal_projector", "embed_vision", "embed_audio"),
    ),
}
