"""How the samplers of a workflow of Wan denoise, and the `[scheduler]` of a model file that says so."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Graph, Node, Schedule, Stage
from svdq.pipeline.models.comfyui.stages import note_euler, note_start, plain_stage, schedule_from, steps_until
from svdq.pipeline.models.comfyui.values import UnknownValueError, number_of, number_or, text_of, value_of, whole_of
from svdq.pipeline.models.model_file import ScheduleName
from svdq.pipeline.models.sigmas import sigmas_of

_OWN_LEVELS = ""  # in place of the name of a schedule: diffusers' noise levels, by WanVideoSampler
_DEFAULT_SHIFT = 8.0  # where no ModelSamplingSD3 sets it: comfy/supported_models.py
_EULER, _UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
#: Schedulers of WanVideoSampler that are diffusers' own, with its noise levels.
_WRAPPED = {"wrapper:unipc": _UNIPC, "wrapper:euler": _EULER}
_MAX_SHIFT = 100  # of a model file
_HANDOVER = 0.002  # difference of noise levels that counts
_STAND_IN = "simple"  # in place of a schedule that svdq lacks
#: Inputs of WanVideoSampler that are read elsewhere, or that change nothing.
_READ = {"model", "text_embeds", "image_embeds", "samples", "scheduler", "sigmas", "cfg", "steps", "shift", "seed"}


def two_models(graph: Graph, node: Node) -> list[Stage]:
    """Read WanMoeKSampler, which changes from one model to the other."""
    stage = plain_stage(graph, node)
    shift, boundary = number_or(graph, node, "sigma_shift", 8.0), number_or(graph, node, "boundary", 0.9)
    schedule = replace(stage.schedule, shift=shift, boundary=boundary)
    high = replace(
        stage,
        model=node.inputs.get("model_high_noise"),
        cfg=number_or(graph, node, "cfg_high_noise", 1.0),
        schedule=replace(schedule, start=max(0, whole_of(graph, node, "start_at_step"))),
        keeps_noise=True,
    )
    low = replace(
        stage,
        model=node.inputs.get("model_low_noise"),
        path=(),
        cfg=number_or(graph, node, "cfg_low_noise", 1.0),
        schedule=schedule,
        adds_noise=False,
    )
    return [high, low]


def wrapper(graph: Graph, node: Node) -> list[Stage]:
    """Read WanVideoSampler, whose `unipc` and `euler` are diffusers' schedulers."""
    stage, inputs = plain_stage(graph, node), node.inputs
    for name, value in inputs.items():
        if (origin := graph.origin(value)) is not None and name not in _READ and not name.endswith(("step", "steps")):
            graph.note(origin, f"is the {name} of {node}, which svdq has not; svdq renders without")
    graph.read(graph.origin(inputs.get("text_embeds")), graph.origin(inputs.get("scheduler")))
    if number_of(graph, node, "riflex_freq_index"):
        graph.note(node, "changes the positions of frames (RIFLEx), which svdq does not")
    return [
        replace(
            stage,
            positive=inputs.get("text_embeds"),
            negative=inputs.get("text_embeds"),
            latents=inputs.get("image_embeds"),
            sampler=f"wrapper:{value_of(graph, inputs.get('scheduler'))}",
            schedule=_wrapped_schedule(graph, node, stage.schedule.steps),
            adds_noise=graph.origin(inputs.get("samples")) is None,
            keeps_noise=True,
        )
    ]


def _wrapped_schedule(graph: Graph, node: Node, steps: int) -> Schedule:
    start, end = number_or(graph, node, "start_step", 0), number_or(graph, node, "end_step", -1)
    boundary = next((each for each in (start, end) if 0 < each < 1), None)  # of WanVideoSigmaToStep
    own = Schedule(
        node=node,
        name=_OWN_LEVELS,
        steps=steps,
        start=0 if boundary else max(0, int(start)),
        end=None if boundary or end < 0 else steps_until(int(end), steps),
        shift=number_or(graph, node, "shift", 5.0),
        boundary=boundary,
        denoise=number_or(graph, node, "denoise_strength", 1.0),
    )
    sigmas = graph.origin(node.inputs.get("sigmas"))
    graph.read(sigmas)
    if sigmas is None or sigmas.type.startswith("WanVideoScheduler"):
        return own
    given = schedule_from(graph, node.inputs["sigmas"])
    return replace(
        given,
        start=given.start or own.start,
        end=own.end if given.end is None else given.end,
        shift=given.shift or own.shift,
        boundary=given.boundary or own.boundary,
        denoise=min(given.denoise, own.denoise),
    )


def moe_schedule(graph: Graph, node: Node) -> tuple[float, int, int, int]:
    """Return the first outputs of a WanMoEScheduler: shift, steps, and of them the first expert's and the second's.

    The shift is the smallest multiple of `interval` with which the second expert begins at the `boundary` or above.
    """
    boundary, interval, denoise = (number_of(graph, node, name) for name in ("boundary", "interval", "denoise"))
    high, low = (whole_of(graph, node, name) for name in ("steps_high", "steps_low"))
    scheduler = text_of(graph, node, "scheduler")
    is_known = scheduler in get_args(ScheduleName) and 0 < min(high, low) <= max(high, low) < 100
    if not (is_known and denoise in (None, 1) and boundary and interval and interval >= 0.01):
        raise UnknownValueError(node)
    for number in range(1, int(100 / interval) + 1):
        if sigmas_of(scheduler, high + low, number * interval)[high] >= boundary:
            return round(number * interval, 2), high + low, high, low
    raise UnknownValueError(node)


def moe_levels(graph: Graph, node: Node, slot: int) -> Schedule:
    """Read the noise levels of a WanMoEScheduler: all, the first expert's (5), or the second's (6)."""
    shift, steps, high, _ = moe_schedule(graph, node)
    return Schedule(
        node=node,
        name=text_of(graph, node, "scheduler"),
        steps=steps,
        start=high if slot == 6 else 0,
        end=high if slot == 5 else None,
        shift=shift,
    )


def scheduler_of(graph: Graph, stages: Sequence[Stage], shifts: Sequence[float | None]) -> tuple[int, dict[str, Any]]:
    """Return the number of steps and the scheduler of a model file; `shifts` has one for the model of each stage."""
    first = stages[0]
    kind = _class_of(graph, stages)
    parts = [_named(graph, stage, shift) for stage, shift in zip(stages, shifts, strict=True)]
    for before, after in pairwise(stages):
        _check_handover(graph, before, after)
    if not first.adds_noise:
        graph.note(first.node, "adds no noise to the photo's latents; svdq starts from noise")
    note_start(graph, first, denoise=min(part.denoise for part in parts))
    start, last = parts[0], parts[-1]
    boundary = next((part.boundary for part in parts if part.boundary), None)
    switch: dict[str, Any] = {}
    if boundary and len(stages) > 1:
        switch = {"boundary": boundary}
    elif len(stages) > 1:
        switch = {"switch_at": start.steps if start.end is None else start.end}
    common = {"class": kind, "shift": round(float(start.shift or 0), 6)}  # an editor's slider leaves 5.000000000000001
    if first.sampler in _WRAPPED and first.schedule.name == _OWN_LEVELS:
        return start.steps, common | switch
    same = {(part.name, part.levels, part.steps, round(part.shift or 0, 6)) for part in parts}
    if len(same) == 1 and start.levels is None:
        if last.end is not None:
            graph.note(stages[-1].node, f"ends after step {last.end}; svdq does all {start.steps} steps")
        return start.steps, common | {"sigmas": start.name, **switch}
    levels = _levels(graph, stages, parts)
    if "switch_at" in switch:
        switch = {"switch_at": len(_levels(graph, stages[:1], parts[:1]))}
    return len(levels), {"class": kind, "shift": 1.0, "sigmas": levels, **switch}


def _named(graph: Graph, stage: Stage, shift: float | None) -> Schedule:
    """Return the schedule of a stage with a name that svdq has, and the shift of its model where it has none."""
    schedule = stage.schedule
    shift = schedule.shift or shift or _DEFAULT_SHIFT
    if not 0 < shift <= _MAX_SHIFT:
        raise InputError(f"{stage.node} has the shift {shift:g}; set it above 0 and up to {_MAX_SHIFT} in ComfyUI.")
    name = schedule.name
    if schedule.levels is None and name not in get_args(ScheduleName):
        name = _STAND_IN
        if schedule.name != _OWN_LEVELS:
            graph.note(stage.node, f"has the schedule {schedule.name}, which svdq lacks; svdq uses {_STAND_IN}")
        elif stage.sampler not in _WRAPPED:
            graph.note(stage.node, f"has its own noise levels; svdq uses the schedule {_STAND_IN}")
    return replace(schedule, name=name, shift=shift)


def _class_of(graph: Graph, stages: Sequence[Stage]) -> str:
    kind = _EULER
    for stage in stages:
        name = stage.sampler
        if name in ("euler", "wrapper:euler"):
            continue
        if name == "wrapper:unipc":
            kind = _UNIPC
        elif name.startswith(("uni_pc", "wrapper:unipc")):
            kind = _UNIPC
            graph.note(
                stage.node,
                f"has the sampler {name.removeprefix('wrapper:')}; svdq uses diffusers' {_UNIPC}, another solver of "
                "that name: near, not equal",
            )
        else:
            note_euler(graph, stage)
    return kind


def _check_handover(graph: Graph, before: Stage, after: Stage) -> None:
    ends, starts = before.schedule, after.schedule
    if ends.boundary is None and ends.end is None:
        graph.note(after.node, "denoises a finished video once more; svdq passes on what the first sampler leaves")
    if not before.keeps_noise and ends.boundary is None and ends.end is not None:
        graph.note(
            before.node, "removes all noise at its end (return_with_leftover_noise); svdq leaves the rest to the next"
        )
    if after.adds_noise:
        graph.note(after.node, "adds noise again; svdq does not")
    if ends.end is not None and starts.start != ends.end and starts.steps == ends.steps:
        graph.note(after.node, f"starts at step {starts.start}, where the one before ends at {ends.end}; svdq goes on")


def _levels(graph: Graph, stages: Sequence[Stage], parts: Sequence[Schedule]) -> list[float]:
    """Return the noise level before each step of all stages."""
    levels: list[float] = []
    reached: float | None = None  # the noise level at which the stage before ends
    for stage, part in zip(stages, parts, strict=True):
        own = part.levels if part.levels is not None else tuple(sigmas_of(part.name, part.steps, part.shift or 0))
        if reached is not None and own[part.start :] and abs(reached - own[part.start]) > _HANDOVER:
            what = f"goes on from a noise level of {own[part.start]:.3g}, where the one before ends at {reached:.3g}"
            graph.note(stage.node, f"{what}; svdq steps from one schedule to the other")
        levels += [round(level, 6) for level in own[part.start : part.end]]
        reached = own[part.end] if part.end is not None and part.end < len(own) else 0.0
    falling = [
        level for place, level in enumerate(levels) if level > max(levels[place + 1 :], default=0) and level <= 1
    ]
    if not falling:
        raise InputError(f"The sampler {stages[0].node} has no noise levels from 1 down to 0; correct its sigmas.")
    return falling
