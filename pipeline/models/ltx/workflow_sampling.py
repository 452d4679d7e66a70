"""How the samplers of a workflow of LTX-2 denoise: noise levels and guidance."""

import math
from collections.abc import Mapping, Sequence

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Graph, Node, Schedule, Stage
from svdq.pipeline.models.comfyui.stages import note_euler, note_start
from svdq.pipeline.models.comfyui.values import quiet_number, quietly, whole_of
from svdq.pipeline.models.ltx.family import FRAME_STEP, LATENT_SIDE, NO_GUIDANCE
from svdq.pipeline.models.ltx.layout import ANCESTRAL, SAMPLERS

#: Settings of LTXVScheduler, with ComfyUI's defaults.
_OF_SCHEDULER: Mapping[str, float] = {"max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1}
#: Parameters of svdq by inputs of guiders, and of the parameters of a MultimodalGuider.
_OF_GUIDERS = {
    "stg": "stg_scale",
    "rescale": "guidance_rescale",
    "video_cfg": "guidance_scale",
    "audio_cfg": "audio_guidance_scale",
}
_OF_PARAMETERS = {
    "cfg": "guidance_scale",
    "stg": "stg_scale",
    "rescale": "guidance_rescale",
    "modality_scale": "modality_scale",
}


def read_schedule(graph: Graph, node: Node, slot: int) -> Schedule:
    """Read an LTXVScheduler, whose noise levels depend on the size of the video."""
    return Schedule(node=node, name=node.type, steps=whole_of(graph, node, "steps") or 20)


def num_tokens(size: tuple[int, int] | None, frames: int | None, num_stages: int) -> int:
    """Return the number of tokens in the first of some stages; a size or frames that are not known count as usual."""
    width, height = size or (768, 512)
    return width * height // (LATENT_SIDE * num_stages) ** 2 * (((frames or 121) - 1) // FRAME_STEP + 1)


def levels_of(graph: Graph, stage: Stage, num_tokens: int) -> tuple[float, ...]:
    """Return the noise level before each step of a stage."""
    schedule = stage.schedule
    part = slice(schedule.start, schedule.end)
    if schedule.levels is not None:
        return schedule.levels[part]
    node = schedule.node
    if node.type != "LTXVScheduler":
        what = f"has the schedule {schedule.name}, which svdq lacks for LTX-2"
        graph.note(stage.node, f"{what}; svdq uses LTXVScheduler's noise levels")
        return ltx_levels(schedule.steps, num_tokens, **_OF_SCHEDULER)[part]
    given = {name: quiet_number(graph, node, name) for name in _OF_SCHEDULER}
    settings = {name: usual if (value := given[name]) is None else value for name, usual in _OF_SCHEDULER.items()}
    try:
        return ltx_levels(schedule.steps, num_tokens if "latent" in node.inputs else 4096, **settings)[part]
    except ArithmeticError as error:
        raise InputError(f"{node} has settings that give no noise levels; correct them in ComfyUI.") from error


def ltx_levels(
    steps: int, num_tokens: int, *, max_shift: float, base_shift: float, stretch: float, terminal: float
) -> tuple[float, ...]:
    """Return the noise levels of LTXVScheduler for a number of tokens: comfy_extras/nodes_lt.py."""
    shift = base_shift + (max_shift - base_shift) * (num_tokens - 1024) / (4096 - 1024)
    even = [1 - step / steps for step in range(steps)]
    levels = [math.exp(shift) / (math.exp(shift) + 1 / level - 1) for level in even]
    scale = (1 - levels[-1]) / (1 - terminal) if stretch else 1.0
    return tuple(round(1 - (1 - level) / scale, 6) for level in levels) if scale else tuple(levels)


def sampler_of(graph: Graph, stages: Sequence[Stage]) -> str | None:
    """Return the scheduler class of the first stage's sampler if it is ancestral; note what svdq lacks."""
    kinds = [_kind_of(graph, stage) for stage in stages]
    for stage, kind in zip(stages, kinds, strict=True):
        if kind is None:
            note_euler(graph, stage)
        elif kind != (kinds[0] or SAMPLERS[0]):
            graph.note(stage.node, f"has the sampler {stage.sampler}; svdq takes the first sampler's for both stages")
        note_start(graph, stage)
    return ANCESTRAL if kinds[0] == ANCESTRAL else None


def _kind_of(graph: Graph, stage: Stage) -> str | None:
    """Return the scheduler class of a stage's sampler; None if svdq lacks it."""
    if stage.sampler in ("euler", "euler_ancestral"):
        return ANCESTRAL if stage.sampler == "euler_ancestral" else SAMPLERS[0]
    if stage.sampler != "SamplerEulerAncestral":
        return None
    chosen = graph.origin(stage.node.inputs.get("sampler"))
    eta, noise = (None if chosen is None else quiet_number(graph, chosen, name) for name in ("eta", "s_noise"))
    if eta == 0:  # it adds no noise
        return SAMPLERS[0]
    return ANCESTRAL if {eta, noise} <= {1, None} else None


def guidance_of(graph: Graph, stage: Stage) -> dict[str, float]:
    """Return the guidance of a stage as defaults; none where it is off, as it is by default."""
    found = dict(NO_GUIDANCE) | {"guidance_scale": stage.cfg, "audio_guidance_scale": stage.cfg}
    if (guider := graph.origin(stage.node.inputs.get("guider"))) is not None:
        own = {ours: quiet_number(graph, guider, theirs) for theirs, ours in _OF_GUIDERS.items()}
        found |= {name: value for name, value in own.items() if value is not None}
        for node in graph.chain(guider.inputs.get("parameters"), "parameters"):  # of the video, and of the sound
            graph.read(node)
            if str(node.inputs.get("modality")).upper() == "AUDIO":
                found["audio_guidance_scale"] = quiet_number(graph, node, "cfg") or 1.0
                graph.note(node, "guides the sound; svdq takes its cfg, and all else of the video's guidance for both")
            else:
                found |= {ours: quiet_number(graph, node, theirs) or 0.0 for theirs, ours in _OF_PARAMETERS.items()}
            if quietly(graph, node.inputs.get("skip_step")):
                graph.note(node, "skips steps of the guidance; svdq guides all")
    return {} if found == NO_GUIDANCE else {name: round(float(value), 6) for name, value in found.items()}
