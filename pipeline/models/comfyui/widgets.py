"""The names of the widgets of ComfyUI's nodes, in the order in which the editor's format saves their values.

Files of newer editors name the widgets beside the inputs of a node; this table is for older ones.
"""

from collections.abc import Mapping

CONTROL = "control_after_generate"  # the editor's: whether a seed changes after each run
_LORA = "lora_name strength_model strength_clip"
_SIZE = "width height length batch_size"

WIDGETS: Mapping[str, tuple[str, ...]] = {
    kind: tuple(names.split())
    for kind, names in {
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
        "ImageOnlyCheckpointLoader": "ckpt_name",
        "KSampler": f"seed {CONTROL} steps cfg sampler_name scheduler denoise",
        "KSamplerAdvanced": f"add_noise noise_seed {CONTROL} steps cfg sampler_name scheduler start_at_step "
        "end_at_step return_with_leftover_noise",
        "KSamplerSelect": "sampler_name",
        "LoadImage": "image upload",
        "LoadWanVideoClipTextEncoder": "model_name precision load_device",
        "LoadWanVideoT5TextEncoder": "model_name precision load_device quantization",
        "LoraLoader": _LORA,
        "LoraLoaderModelOnly": "lora_name strength_model",
        "Lora Loader Stack (rgthree)": " ".join(f"lora_0{n} strength_0{n}" for n in range(1, 5)),
        "EmptyLTXVLatentVideo": _SIZE,
        "GuiderParameters": "modality cfg stg perturb_attn rescale modality_scale skip_step cross_attn",
        "LatentUpscaleModelLoader": "model_name",
        "LowVRAMAudioVAELoader": "ckpt_name",
        "LowVRAMCheckpointLoader": "ckpt_name",
        "LowVRAMLatentUpscaleModelLoader": "model_name",
        "LTXAVTextEncoderLoader": "text_encoder ckpt_name device",
        "LTXVAddGuide": "frame_idx strength",
        "LTXVAudioVAELoader": "ckpt_name",
        "LTXVConditioning": "frame_rate",
        "LTXVDualCFGGuider": "video_cfg audio_cfg",
        "LTXVEmptyLatentAudio": "frames_number frame_rate batch_size",
        "LTXVGemmaCLIPModelLoader": "gemma_path ltxv_path max_length",
        "LTXVImgToVideo": f"{_SIZE} strength",
        "LTXVImgToVideoConditionOnly": "strength bypass",
        "LTXVImgToVideoInplace": "strength bypass",
        "LTXVPreprocess": "img_compression",
        "LTXVScheduler": "steps max_shift base_shift stretch terminal",
        "ManualSigmas": "sigmas",
        "MathExpression|pysssss": "expression",
        "ModelSamplingSD3": "shift",
        "PainterI2V": f"{_SIZE} motion_amplitude",
        "PrimitiveFloat": "value",
        "PrimitiveInt": f"value {CONTROL}",
        "mxSlider": "Xi Xf isfloatX",
        "MultimodalGuider": "skip_blocks",
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
        "STGGuider": "cfg stg rescale",
        "SVD_img2vid_Conditioning": "width height video_frames motion_bucket_id fps augmentation_level",
        "UNETLoader": "unet_name weight_dtype",
        "UnetLoaderGGUF": "unet_name",
        "UnetLoaderGGUFAdvanced": "unet_name dequant_dtype patch_dtype patch_on_device",
        "VAELoader": "vae_name",
        "Wan22ImageToVideoLatent": _SIZE,
        "WanFirstLastFrameToVideo": _SIZE,
        "WanImageToVideo": _SIZE,
        "WanMoeKSampler": f"boundary seed {CONTROL} steps cfg_high_noise cfg_low_noise sampler_name scheduler "
        "sigma_shift denoise",
        "WanMoeKSamplerAdvanced": f"boundary add_noise noise_seed {CONTROL} steps cfg_high_noise cfg_low_noise "
        "sampler_name scheduler sigma_shift start_at_step end_at_step return_with_leftover_noise",
        "WanMoEScheduler": "scheduler steps_high steps_low boundary interval denoise",
        "WanVideoImageClipEncode": "generation_width generation_height num_frames force_offload noise_aug_strength "
        "latent_strength clip_embed_strength adjust_resolution",
        "WanVideoImageToVideoEncode": "width height num_frames noise_aug_strength start_latent_strength "
        "end_latent_strength force_offload fun_or_fl2v_model tiled_vae",
        "WanVideoLoraSelect": "lora strength low_mem_load merge_loras",
        "WanVideoLoraSelectMulti": " ".join(f"lora_{n} strength_{n}" for n in range(5)) + " low_mem_load merge_loras",
        "WanVideoModelLoader": "model base_precision quantization load_device attention_mode rms_norm_function",
        "WanVideoSampler": f"steps cfg shift seed {CONTROL} force_offload scheduler riflex_freq_index denoise_strength "
        "batched_cfg rope_function start_step end_step add_noise_to_samples",
        "VideoLinearCFGGuidance": "min_cfg",
        "WanVideoScheduler": "scheduler steps shift start_step end_step",
        "WanVideoTextEncode": "positive_prompt negative_prompt force_offload use_disk_cache device",
        "WanVideoVAELoader": "model_name precision",
    }.items()
}
#: Nodes with a text as their only widget.
TEXTS = ("PrimitiveString", "PrimitiveStringMultiline", "StringConstant", "StringConstantMultiline", "Text Multiline")
