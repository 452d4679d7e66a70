"""Reads a workflow of Stable Video Diffusion. Its single-file checkpoints are not read: the base has the weights."""

from typing import Any

from svdq.pipeline.models.comfyui.graph import Graph
from svdq.pipeline.models.comfyui.model_chain import GUIDANCE, ModelChain
from svdq.pipeline.models.comfyui.node import Node
from svdq.pipeline.models.comfyui.notes import Notes
from svdq.pipeline.models.comfyui.stages import Stage
from svdq.pipeline.models.comfyui.values import number_of

CONDITIONING = "SVD_img2vid_Conditioning"
#: The parameters that inputs of the conditioning are.
_INPUTS = {
    "width": "width",
    "height": "height",
    "video_frames": "frames",
    "motion_bucket_id": "motion_bucket_id",
    "fps": "fps",
    "augmentation_level": "noise_aug_strength",
}


def svd_base(model: ModelChain, notes: Notes) -> str:
    """Return the hub id of the model that a checkpoint is, by its name."""
    name = model.file.lower()
    suffix = "-xt-1-1" if "1_1" in name or "1-1" in name else "-xt" if "xt" in name else ""
    base = f"stabilityai/stable-video-diffusion-img2vid{suffix}"
    notes.add(model.loader, f"loads {model.file}, a checkpoint in one file; svdq takes the weights of {base}")
    return base


def svd_defaults(graph: Graph, conditioning: Node, stage: Stage, notes: Notes) -> dict[str, Any]:
    """Return the defaults of a model file: the parameters of the video, and the guidance of first and last frame."""
    found = {ours: number_of(graph, conditioning, theirs) for theirs, ours in _INPUTS.items()}
    defaults: dict[str, Any] = {
        "steps": stage.steps,
        **{name: value for name, value in found.items() if value is not None},
    }
    for name in ("width", "height"):
        if name in defaults:
            defaults[name] = int(defaults[name]) // 64 * 64
    guides = next((node for node in graph.of_types(GUIDANCE) if node.id in graph.before(stage.node)), None)
    least = stage.cfg if guides is None else number_of(graph, guides, "min_cfg", 1.0)
    defaults |= {"min_guidance_scale": least, "max_guidance_scale": stage.cfg}
    if (stage.sampler, stage.scheduler) != ("euler", "karras"):
        notes.add(
            stage.node,
            f"has {stage.sampler} and {stage.scheduler}; svdq renders with euler and karras, the model's own",
        )
    if stage.start or stage.denoise < 1:
        notes.add(stage.node, "starts part of the way; svdq starts from noise, with all steps")
    return defaults
