"""The names of the widgets of ComfyUI's nodes, in the order in which the editor's format saves their values.

Files of newer editors name the widgets beside the inputs of a node; this table is for older ones.
"""

from collections.abc import Mapping

CONTROL = "control_after_generate"  # the editor's: whether a seed changes after each run
SIZE = "width height length batch_size"

WIDGETS: Mapping[str, str] = {
    "BasicScheduler": "scheduler steps denoise",
    "BetaSamplingScheduler": "steps alpha beta",
    "CFGGuider": "cfg",
    "CheckpointLoader": "config_name ckpt_name",
    "CheckpointLoaderSimple": "ckpt_name",
    "CLIPLoader": "clip_name type device",
    "CLIPLoaderGGUF": "clip_name type",
    "CLIPTextEncode": "text",
    "CLIPVisionLoader": "clip_name",
    "ComfyMathExpression": "expression",
    "ComfySwitchNode": "switch",
    "CreateCFGScheduleFloatList": "steps cfg_scale_start cfg_scale_end interpolation start_percent end_percent",
    "CreateVideo": "fps",
    "easy mathFloat": "a b operation",
    "easy mathInt": "a b operation",
    "FrameInterpolate": "multiplier",
    "GIMMVFI_interpolate": "ds_factor interpolation_factor",
    "DiffusionModelLoaderKJ": "model_name weight_dtype compute_dtype patch_cublaslinear sage_attention",
    "ImageScale": "upscale_method width height crop",
    "ImageScaleBy": "upscale_method scale_by",
    "ImageOnlyCheckpointLoader": "ckpt_name",
    "KSampler": f"seed {CONTROL} steps cfg sampler_name scheduler denoise",
    "KSamplerAdvanced": f"add_noise noise_seed {CONTROL} steps cfg sampler_name scheduler start_at_step end_at_step "
    "return_with_leftover_noise",
    "KSamplerSelect": "sampler_name",
    "LoadImage": "image upload",
    "LoraLoader": "lora_name strength_model strength_clip",
    "LoraLoaderModelOnly": "lora_name strength_model",
    "Lora Loader Stack (rgthree)": " ".join(f"lora_0{n} strength_0{n}" for n in range(1, 5)),
    "LatentUpscaleModelLoader": "model_name",
    "LowVRAMAudioVAELoader": "ckpt_name",
    "LowVRAMCheckpointLoader": "ckpt_name",
    "LowVRAMLatentUpscaleModelLoader": "model_name",
    "ManualSigmas": "sigmas",
    "MathExpression|pysssss": "expression",
    "ModelSamplingSD3": "shift",
    "PrimitiveFloat": "value",
    "PrimitiveInt": f"value {CONTROL}",
    "mxSlider": "Xi Xf isfloatX",
    "RIFE VFI": "ckpt_name clear_cache_after_n_frames multiplier fast_mode ensemble scale_factor",
    "RIFEInterpolation": "source_fps target_fps scale model_name batch_size use_fp16",
    "RandomNoise": f"noise_seed {CONTROL}",
    "SamplerCustom": f"add_noise noise_seed {CONTROL} cfg",
    "ResizeImageMaskNode": "resize_type resize_type.width resize_type.height resize_type.crop scale_method",
    "ResolutionSelector": "aspect_ratio megapixels multiple",
    "SamplerEulerAncestral": "eta s_noise",
    "SaveAnimatedWEBP": "filename_prefix fps lossless quality method",
    "SaveWEBM": "filename_prefix codec fps crf",
    "Seed (rgthree)": "seed",
    "SimpleMath+": "expression",
    "SplitSigmas": "step",
    "SplitSigmasAtT": "boundary",
    "UNETLoader": "unet_name weight_dtype",
    "UnetLoaderGGUF": "unet_name",
    "UnetLoaderGGUFAdvanced": "unet_name dequant_dtype patch_dtype patch_on_device",
    "UpscaleModelLoader": "model_name",
    "VAELoader": "vae_name",
    "VideoLinearCFGGuidance": "min_cfg",
}
#: Nodes with a text as their only widget.
TEXTS = ("PrimitiveString", "PrimitiveStringMultiline", "StringConstant", "StringConstantMultiline", "Text Multiline")
