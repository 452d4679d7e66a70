"""Sizes of weights files that are not here: of those that presets name as published, of others by their names."""

import re
from collections.abc import Mapping

_GIGABYTES: Mapping[str, Mapping[str, float]] = {
    "Comfy-Org/Wan_2.2_ComfyUI_Repackaged": {
        "split_files/diffusion_models/wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors": 14.29,
        "split_files/diffusion_models/wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors": 14.29,
        "split_files/diffusion_models/wan2.2_ti2v_5B_fp16.safetensors": 10.0,
        "split_files/vae/wan_2.1_vae.safetensors": 0.254,
        "split_files/vae/wan2.2_vae.safetensors": 1.41,
        "split_files/loras/wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors": 1.23,
        "split_files/loras/wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors": 1.23,
    },
    "Comfy-Org/Wan_2.1_ComfyUI_repackaged": {
        "split_files/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors": 6.74,
    },
    "QuantStack/Wan2.2-I2V-A14B-GGUF": {
        "HighNoise/Wan2.2-I2V-A14B-HighNoise-Q4_K_M.gguf": 9.65,
        "LowNoise/Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf": 9.65,
    },
    "lightx2v/Wan2.2-Distill-Loras": {
        "wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022.safetensors": 0.63,
        "wan2.2_i2v_A14b_low_noise_lora_rank64_lightx2v_4step_1022.safetensors": 0.74,
    },
    "Kijai/LTX2.3_comfy": {
        "diffusion_models/ltx-2.3-22b-distilled-1.1_transformer_only_fp8_scaled.safetensors": 25.2,
    },
    "Lightricks/LTX-2.5": {
        "diffusion_models/ltx-2.5-22b-distilled-transformer-comfy-int8-convrot.safetensors": 21.504,
        "text_encoders/gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors": 15.373,
        "vae/ltx-2.5-video-vae-conv-bf16.safetensors": 1.452,
        "vae/ltx-2.5-audio-vae-bf16.safetensors": 0.365,
        "latent_upscale_models/ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors": 0.996,
    },
}

#: About how many bytes a file has, by `owner/name:file`.
SIZES = {
    f"{repository}:{file}": round(gigabytes * 10**9)
    for repository, files in _GIGABYTES.items()
    for file, gigabytes in files.items()
}

#: Bits of a weight by the format in the name of a file; files of the K types of GGUF have blocks of several types.
_BITS = {
    "mxfp8": 8.25, "fp8": 8, "e4m3": 8, "e5m2": 8, "int8": 8, "fp4": 4.5, "w4a4": 4,
    "q8_0": 8.5, "q6_k": 6.57, "q5_k": 5.6, "q5_1": 6, "q5_0": 5.5,
    "q4_k": 4.8, "q4_1": 5, "q4_0": 4.5, "q3_k": 3.9, "q2_k": 3,
}  # fmt: skip
_FORMAT = re.compile("|".join(_BITS))


def quantized_bits(name: str) -> float | None:
    """Return the bits of a weight in a file whose name says that it is quantized; None for other names."""
    found = _FORMAT.search(name.lower())
    return _BITS[found[0]] if found else None
