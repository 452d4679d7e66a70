"""The noise levels and the guidance of a sampler in a workflow of LTX-2."""

import math
from typing import Any

from svdq.pipeline.models.comfyui.graph import Graph
from svdq.pipeline.models.comfyui.node import Node
from svdq.pipeline.models.comfyui.notes import Notes
from svdq.pipeline.models.comfyui.source import quietly
from svdq.pipeline.models.comfyui.stages import Stage
from svdq.pipeline.models.ltx.family import FRAME_STEP, LATENT_SIDE, NO_GUIDANCE

#: Settings of LTXVScheduler, with ComfyUI's defaults.
_OF_SCHEDULER: dict[str, Any] = {"max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1}


def levels_of(
    graph: Graph, stage: Stage, size: tuple[int, int] | None, frames: int | None, num_stages: int, notes: Notes
) -> tuple[float, ...]:
    """Return the noise level before each step of a stage; a size or frames that are not known count as usual."""
    if stage.sigmas is not None:
        return stage.sigmas[stage.start : stage.end]
    scheduler = graph.origin(stage.node.inputs.get("sigmas"))
    while scheduler is not None and scheduler.type != "LTXVScheduler":
        scheduler = graph.origin(scheduler.inputs.get("sigmas"))  # of a part of it
    if scheduler is None:
        what = f"has the schedule {stage.scheduler}, which svdq lacks for LTX-2"
        notes.add(stage.node, f"{what}; svdq uses LTXVScheduler's noise levels")
    given = {} if scheduler is None else {name: quietly(graph, scheduler.inputs.get(name)) for name in _OF_SCHEDULER}
    settings = _OF_SCHEDULER | {name: value for name, value in given.items() if value is not None}
    width, height = size or (768, 512)
    pixels = (LATENT_SIDE * num_stages) ** 2
    tokens = width * height // pixels * (((frames or 121) - 1) // FRAME_STEP + 1)
    if scheduler is not None and "latent" not in scheduler.inputs:
        tokens = 4096
    return ltx_levels(stage.steps, tokens, **settings)[stage.start : stage.end]


def ltx_levels(
    steps: int, tokens: int, *, max_shift: float, base_shift: float, stretch: bool, terminal: float
) -> tuple[float, ...]:
    """Return the noise levels of LTXVScheduler for a number of tokens: comfy_extras/nodes_lt.py."""
    shift = base_shift + (max_shift - base_shift) * (tokens - 1024) / (4096 - 1024)
    even = [1 - step / steps for step in range(steps)]
    levels = [math.exp(shift) / (math.exp(shift) + 1 / level - 1) for level in even]
    scale = (1 - levels[-1]) / (1 - terminal) if stretch else 1.0
    return tuple(round(1 - (1 - level) / scale, 6) for level in levels) if scale else tuple(levels)


def note_sampler(graph: Graph, stage: Stage, notes: Notes) -> None:
    """Note a sampler that is another one than Euler's method, as an ancestral one with an eta of 0 is not."""
    chosen = graph.origin(stage.node.inputs.get("sampler"))
    is_plain = chosen is not None and "eta" in chosen.inputs and quietly(graph, chosen.inputs["eta"]) == 0
    if stage.sampler != "euler" and not (is_plain and stage.sampler == "SamplerEulerAncestral"):
        notes.add(
            stage.node,
            f"has the sampler {stage.sampler}, which svdq lacks; svdq uses Euler's method (euler) with the same noise "
            "levels",
        )
    if stage.denoise < 1:
        notes.add(stage.node, "starts part of the way (denoise); svdq starts from noise, with all steps")


def guidance_of(graph: Graph, stage: Stage, notes: Notes) -> dict[str, float]:
    """Return the guidance of a stage as defaults; none where it is off, as it is by default."""
    guider = graph.origin(stage.node.inputs.get("guider"))
    found = dict(NO_GUIDANCE) | {"guidance_scale": stage.cfg, "audio_guidance_scale": stage.cfg}
    if guider is not None:
        own = {name: quietly(graph, guider.inputs.get(name)) for name in ("stg", "rescale", "video_cfg", "audio_cfg")}
        names = {"stg": "stg_scale", "rescale": "guidance_rescale", "video_cfg": "guidance_scale"}
        names["audio_cfg"] = "audio_guidance_scale"
        found |= {names[name]: float(value) for name, value in own.items() if isinstance(value, int | float)}
        found |= _of_parameters(graph, guider, notes)
    return {} if found == NO_GUIDANCE else {name: round(float(value), 6) for name, value in found.items()}


def _of_parameters(graph: Graph, guider: Node, notes: Notes) -> dict[str, float]:
    """Return the guidance of a MultimodalGuider, whose parameters of video and sound are a chain of nodes."""
    found: dict[str, float] = {}
    node = graph.origin(guider.inputs.get("parameters"))
    seen: set[str] = set()
    while node is not None and node.id not in seen:
        seen.add(node.id)
        notes.read(node)
        own = {name: quietly(graph, node.inputs.get(name)) for name in ("cfg", "stg", "rescale", "modality_scale")}
        if str(node.inputs.get("modality")).upper() == "AUDIO":
            found.setdefault("audio_guidance_scale", float(own["cfg"] or 1))
            notes.add(node, "guides the sound; svdq takes its cfg, and all else of the video's guidance for both")
        else:
            names = ("guidance_scale", "stg_scale", "guidance_rescale", "modality_scale")
            found |= {name: float(value or 0) for name, value in zip(names, own.values(), strict=True)}
        if quietly(graph, node.inputs.get("skip_step")):
            notes.add(node, "skips steps of the guidance; svdq guides all")
        node = graph.origin(node.inputs.get("parameters"))
    return found
