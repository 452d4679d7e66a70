"""What svdq knows of ComfyUI's nodes for Stable Video Diffusion."""

from collections.abc import Sequence

from svdq.pipeline.models.comfyui.graph import Encoder, Graph, NodeTypes, Stage
from svdq.pipeline.models.comfyui.model_chain import GUIDANCE, model_chain
from svdq.pipeline.models.comfyui.recipe import Recipe, WorkflowReader, defaults_of, find_encoder
from svdq.pipeline.models.comfyui.source import source_of
from svdq.pipeline.models.comfyui.stages import note_start
from svdq.pipeline.models.comfyui.values import number_of, number_or
from svdq.pipeline.models.svd.family import SIZE_MULTIPLE

_CONDITIONING = "SVD_img2vid_Conditioning"
#: The parameters that inputs of the conditioning are, besides size and frames.
_INPUTS = {"motion_bucket_id": "motion_bucket_id", "fps": "fps", "augmentation_level": "noise_aug_strength"}


def read(graph: Graph, stages: Sequence[Stage]) -> Recipe:
    """Read a video of Stable Video Diffusion: the base by its checkpoint's name, and the defaults."""
    stage = stages[0]
    encoder = find_encoder(graph, stage, [_CONDITIONING], {})
    model = model_chain(graph, stage.model, stage.node)
    source = source_of(graph, encoder, stage.positive, stage.negative, multiple=SIZE_MULTIPLE, frame_step=1)
    name = model.file.lower()
    suffix = "-xt-1-1" if "1_1" in name or "1-1" in name else "-xt" if "xt" in name else ""
    base = f"stabilityai/stable-video-diffusion-img2vid{suffix}"
    graph.note(model.loader, f"loads {model.file}, a checkpoint in one file; svdq takes the weights of {base}")
    for lora in model.loras:
        graph.note(lora.node, "adds a LoRA, which svdq has for other families only")
    found = {ours: number_of(graph, encoder, theirs) for theirs, ours in _INPUTS.items()}
    guides = next((node for node in graph.of_types(GUIDANCE) if node.id in graph.before(stage.node)), None)
    least = stage.cfg if guides is None else number_or(graph, guides, "min_cfg", 1.0)
    own = {name: value for name, value in found.items() if value is not None}
    own |= {"min_guidance_scale": least, "max_guidance_scale": stage.cfg}
    if (stage.sampler, stage.schedule.name) != ("euler", "karras"):
        graph.note(
            stage.node,
            f"has {stage.sampler} and {stage.schedule.name}; svdq renders with euler and karras, the model's own",
        )
    note_start(graph, stage)
    defaults = defaults_of(source, steps=stage.schedule.steps) | own
    return Recipe(base=base, defaults=defaults, source=source, seed=stage.seed)


READER = WorkflowReader(
    nodes="SVD_",
    types=NodeTypes(
        widgets={_CONDITIONING: "width height video_frames motion_bucket_id fps augmentation_level"},
        encoders={_CONDITIONING: Encoder(frames="video_frames", photo="init_image")},
    ),
    read=read,
)
