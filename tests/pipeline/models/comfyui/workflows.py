"""Workflows in the API format, as small as they can be, for tests to change."""

from typing import Any

Api = dict[str, dict[str, Any]]


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    """A node of the API format."""
    return {"class_type": kind, "inputs": inputs}


def two_experts() -> Api:
    """Wan 2.2 with a LoRA for each expert, 2 + 2 steps."""
    api: Api = {
        "clip": node("CLIPLoader", clip_name="umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan", device="default"),
        "vae": node("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "photo": node("LoadImage", image="cat.png"),
        "yes": node("CLIPTextEncode", text="The cat jumps.", clip=["clip", 0]),
        "no": node("CLIPTextEncode", text="blurry", clip=["clip", 0]),
        "i2v": node(
            "WanImageToVideo", width=832, height=480, length=81, batch_size=1,
            positive=["yes", 0], negative=["no", 0], vae=["vae", 0], start_image=["photo", 0],
        ),
        "decode": node("VAEDecode", samples=["low", 0], vae=["vae", 0]),
        "save": node("CreateVideo", fps=16, images=["decode", 0]),
    }  # fmt: skip
    for place, name in enumerate(("high", "low")):
        api[f"unet_{name}"] = node("UNETLoader", unet_name=f"wan2.2_i2v_{name}_noise_14B_fp8_scaled.safetensors")
        lora = {"lora_name": f"{name}.safetensors", "strength_model": 1.0000000000000002}
        api[f"lora_{name}"] = node("LoraLoaderModelOnly", model=[f"unet_{name}", 0], **lora)
        api[f"shift_{name}"] = node("ModelSamplingSD3", model=[f"lora_{name}", 0], shift=5.000000000000001)
        api[name] = node(
            "KSamplerAdvanced", add_noise="disable" if place else "enable", noise_seed=7, steps=4, cfg=1.0,
            sampler_name="euler", scheduler="simple", start_at_step=2 * place, end_at_step=10_000 if place else 2,
            return_with_leftover_noise="disable" if place else "enable", model=[f"shift_{name}", 0],
            positive=["i2v", 0], negative=["i2v", 1], latent_image=["high" if place else "i2v", 0 if place else 2],
        )  # fmt: skip
    return api


def wrapper() -> Api:
    """The same with the nodes of ComfyUI-WanVideoWrapper."""
    api: Api = {
        "t5": node("LoadWanVideoT5TextEncoder", model_name="umt5-xxl-enc-bf16.safetensors"),
        "vae": node("WanVideoVAELoader", model_name="Wan2_1_VAE_bf16.safetensors"),
        "photo": node("LoadImage", image="cat.png"),
        "texts": node("WanVideoTextEncode", positive_prompt="It jumps.", negative_prompt="blurry", t5=["t5", 0]),
        "i2v": node(
            "WanVideoImageToVideoEncode", width=832, height=480, num_frames=81, vae=["vae", 0], start_image=["photo", 0]
        ),
        "first": node("WanVideoLoraSelect", lora="first.safetensors", strength=0.5),
        "second": node("WanVideoLoraSelect", lora="second.safetensors", strength=1.0, prev_lora=["first", 0]),
        "decode": node("WanVideoDecode", samples=["low", 0], vae=["vae", 0]),
        "save": node("VHS_VideoCombine", frame_rate=16, images=["decode", 0]),
    }
    for place, name in enumerate(("high", "low")):
        api[f"model_{name}"] = node(
            "WanVideoModelLoader", model=f"Wan2_2-I2V-A14B-{name}.safetensors", lora=["second", 0]
        )
        api[name] = node(
            "WanVideoSampler", steps=8, cfg=1.0, shift=8.0, seed=3, scheduler="euler", start_step=4 * place,
            end_step=-1 if place else 4, model=[f"model_{name}", 0], image_embeds=["i2v", 0], text_embeds=["texts", 0],
            **({"samples": ["high", 0]} if place else {}),
        )  # fmt: skip
    return api
