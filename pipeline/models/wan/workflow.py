"""What svdq knows of ComfyUI's nodes for Wan: its own, and those of ComfyUI-WanVideoWrapper."""

import re
from collections.abc import Sequence
from dataclasses import replace

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Encoder, Graph, NodeTypes, Stage
from svdq.pipeline.models.comfyui.model_chain import ModelChain, model_chain, uses_of
from svdq.pipeline.models.comfyui.recipe import Recipe, WorkflowReader, defaults_of, find_encoder
from svdq.pipeline.models.comfyui.source import Source, source_of
from svdq.pipeline.models.comfyui.widgets import CONTROL, SIZE
from svdq.pipeline.models.wan.family import FRAME_STEP, SIZE_MULTIPLE
from svdq.pipeline.models.wan.layout import HIGH_NOISE, LOW_NOISE
from svdq.pipeline.models.wan.workflow_sampling import moe_levels, moe_schedule, scheduler_of, two_models, wrapper

_WIDGETS = {
    "LoadWanVideoClipTextEncoder": "model_name precision load_device",
    "LoadWanVideoT5TextEncoder": "model_name precision load_device quantization",
    "PainterI2V": f"{SIZE} motion_amplitude",
    "Wan22ImageToVideoLatent": SIZE,
    "WanFirstLastFrameToVideo": SIZE,
    "WanImageToVideo": SIZE,
    "WanMoeKSampler": f"boundary seed {CONTROL} steps cfg_high_noise cfg_low_noise sampler_name scheduler sigma_shift "
    "denoise",
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
    "WanVideoScheduler": "scheduler steps shift start_step end_step",
    "WanVideoTextEncode": "positive_prompt negative_prompt force_offload use_disk_cache device",
    "WanVideoVAELoader": "model_name precision",
}
_ENCODERS = {
    "WanImageToVideo": Encoder(),
    "PainterI2V": Encoder(neutral={"motion_amplitude": 1}),
    "WanFirstLastFrameToVideo": Encoder(last_photo="end_image"),
    "Wan22ImageToVideoLatent": Encoder(),
    "WanVideoImageToVideoEncode": Encoder(
        frames="num_frames",
        last_photo="end_image",
        neutral={"noise_aug_strength": 0, "start_latent_strength": 1, "end_latent_strength": 1},
    ),
    "WanVideoImageClipEncode": Encoder(
        width="generation_width",
        height="generation_height",
        frames="num_frames",
        photo="image",
        neutral={"noise_aug_strength": 0},
    ),
}
#: What other nodes would have made, by a part of their names.
_REFUSED = {
    rf"^(Wan|Empty|ARVideo).*{part}": what
    for part, what in {
        "vace": "makes a video with VACE",
        "fun": "makes a video with Wan Fun (control or inpainting)",
        "camera": "makes a video along a camera's path",
        "sound|s2v|talk|humo": "makes a video from sound",
        "animate": "makes a video from the motion of another one",
        "hunyuan|embeds": "makes a video from text alone",
        "track": "makes a video along drawn paths",
        "phantom": "makes a video of subjects",
    }.items()
}


def read(graph: Graph, stages: Sequence[Stage]) -> Recipe:
    """Read a video of Wan."""
    first = stages[0]
    encoder = find_encoder(graph, first, _ENCODERS, _REFUSED)
    for stage in stages[1:]:
        for node in stage.path:
            graph.note(node, "changes the latents between two samplers; svdq passes them on unchanged")
    stages, models = _experts(stages, [model_chain(graph, each.model, each.node) for each in stages])
    for stage in stages[1:]:
        if (stage.positive, stage.negative) != (first.positive, first.negative):
            what = "has other prompts or photos than the first sampler"
            graph.note(stage.node, f"{what}; svdq takes the first's for both")
    source = source_of(graph, encoder, first.positive, first.negative, multiple=SIZE_MULTIPLE, frame_step=FRAME_STEP)
    base, components = _base(graph, models, source)
    if source.has_last_photo and base.startswith("Wan-AI/Wan2.1-I2V"):
        graph.note(encoder, "has a last photo, which Wan 2.1 I2V does not take in svdq; svdq renders without")
        source = replace(source, has_last_photo=False, last_photo=None)
    steps, scheduler = scheduler_of(graph, stages, [each.shift for each in models])
    guidance = {
        name: round(float(stage.cfg), 6)
        for name, stage in zip(("guidance_scale", "guidance_scale_2"), stages, strict=False)
    }
    if guidance["guidance_scale"] <= 1 < (second := guidance.get("guidance_scale_2", 1)):
        graph.note(
            stages[1].node, f"guides by {second:g}; svdq guides no step where the first expert has 1, as diffusers"
        )
    files = {"text_encoder": source.text_encoder, "vae": source.vae}
    if "2.1" in base:
        files["image_encoder"] = source.image_encoder
    weights = dict(zip(components, (each.file for each in models), strict=True))
    return Recipe(
        base=base,
        weights=weights | {component: file for component, file in files.items() if file},
        loras=tuple((name, lora) for name, each in zip(components, models, strict=True) for lora in each.loras),
        defaults=defaults_of(source, steps=steps, **guidance),
        scheduler=scheduler,
        source=source,
        seed=first.seed,
    )


def _experts(stages: Sequence[Stage], models: Sequence[ModelChain]) -> tuple[list[Stage], list[ModelChain]]:
    """Join samplers that go on with the same model; raises InputError for more than two."""
    joined: list[tuple[Stage, ModelChain]] = []
    for stage, model in zip(stages, models, strict=True):
        if joined and joined[-1][1].file == model.file:
            before, theirs = joined[-1]
            if (before.cfg, uses_of(theirs)) != (stage.cfg, uses_of(model)):
                raise InputError(
                    f"{stage.node} goes on with the model of {before.node}, with another guidance or other LoRAs, and "
                    "svdq has one of each for an expert."
                )
            schedule = replace(before.schedule, end=stage.schedule.end)
            joined[-1] = (replace(before, schedule=schedule, keeps_noise=stage.keeps_noise), theirs)
        else:
            joined.append((stage, model))
    if len(joined) > 2:
        raise InputError(f"{joined[2][0].node} is the third sampler with a model, and svdq has two experts.")
    return [stage for stage, _ in joined], [model for _, model in joined]


def _base(graph: Graph, models: Sequence[ModelChain], source: Source) -> tuple[str, tuple[str, ...]]:
    """Return the hub id of the model that files are of, by nodes and names, and the components that they are."""
    file = models[0].file.lower().replace("\\", "/").rpartition("/")[2]
    loader = models[0].loader
    for part, what in (
        ("t2v", "makes videos from text"),
        ("vace", "is VACE"),
        ("s2v", "makes videos from sound"),
        ("fun", "is Wan Fun"),
    ):
        if re.search(rf"(^|[-_. ]){part}([-_. ]|$)", file) and "ti2v" not in file:
            raise InputError(f"{loader} loads {models[0].file}, which {what}; svdq makes videos of photos.")
    if "animate" in file or "ltx" in file or "hunyuan" in file:
        raise InputError(f"{loader} loads {models[0].file}, which is no image-to-video model of Wan.")
    if len(models) == 2:
        return "Wan-AI/Wan2.2-I2V-A14B-Diffusers", (HIGH_NOISE, LOW_NOISE)
    if source.encoder.type == "Wan22ImageToVideoLatent" or "ti2v" in file:
        return "Wan-AI/Wan2.2-TI2V-5B-Diffusers", (HIGH_NOISE,)
    if re.search(r"2[._]2|high.?noise|low.?noise", file) and "5b" not in file:
        raise InputError(f"{loader} loads {models[0].file} alone; svdq needs the files of both experts of Wan 2.2.")
    if "flf2v" in file or "fl2v" in file:
        return "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", (HIGH_NOISE,)
    size = next((each for each in ("480", "720") if each in file), None)
    if size is None:
        graph.note(loader, f"loads {models[0].file}, which is taken for Wan 2.1 I2V-14B-480P by its nodes; see `base`")
    return f"Wan-AI/Wan2.1-I2V-14B-{size or 480}P-Diffusers", (HIGH_NOISE,)


READER = WorkflowReader(
    nodes="Wan|PainterI2V",
    types=NodeTypes(
        widgets=_WIDGETS,
        bundles={"WanVideoScheduler.*": ("sigmas", "steps", "shift", "scheduler", "start_step", "end_step")},
        outputs={"WanMoEScheduler": moe_schedule},
        samplers={"WanVideoSampler": wrapper, "WanMoeKSampler": two_models, "WanMoeKSamplerAdvanced": two_models},
        schedules={"WanMoEScheduler": moe_levels},
        encoders=_ENCODERS,
    ),
    quiet="WanVideo(Decode|BlockSwap|TorchCompile|VRAM)",
    read=read,
)
