"""From the samplers of a workflow to the `[scheduler]` of a model file."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Notes
from svdq.pipeline.models.comfyui.stages import OWN_LEVELS, Stage, note_euler, note_start
from svdq.pipeline.models.model_file import ScheduleName
from svdq.pipeline.models.sigmas import sigmas_of

DEFAULT_SHIFT = 8.0  # of Wan where no ModelSamplingSD3 sets it: comfy/supported_models.py
EULER, UNIPC = "FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"
#: Schedulers of WanVideoSampler that are diffusers' own, with its noise levels.
_WRAPPED = {"wrapper:unipc": UNIPC, "wrapper:euler": EULER}
_HANDOVER = 0.002  # difference of noise levels that counts
_STAND_IN = "simple"  # in place of a schedule that svdq lacks


def schedule_of(stages: Sequence[Stage], shifts: Sequence[float | None], notes: Notes) -> tuple[int, dict[str, Any]]:
    """Return the number of steps and the scheduler of a model file; `shifts` has one for the model of each stage."""
    both = [stage.shift or shift or DEFAULT_SHIFT for stage, shift in zip(stages, shifts, strict=True)]
    kind = _class_of(stages, notes)
    names = [_name_of(stage, notes) for stage in stages]
    for before, after in pairwise(stages):
        _check_handover(before, after, notes)
    first = stages[0]
    if not first.adds_noise:
        notes.add(first.node, "adds no noise to the photo's latents; svdq starts from noise")
    note_start(replace(first, denoise=min(stage.denoise for stage in stages)), notes)
    boundary = next((stage.boundary for stage in stages if stage.boundary), None)
    switch = {} if len(stages) == 1 else {"boundary": boundary} if boundary else None
    if switch is None:
        switch = {"switch_at": first.end if first.end is not None else first.steps}
    if first.sampler in _WRAPPED and first.scheduler == OWN_LEVELS:
        return first.steps, {"class": kind, "shift": _plain(both[0]), **switch}
    same = all((stage.sigmas, stage.steps) == (first.sigmas, first.steps) for stage in stages)
    if same and {*names} == {names[0]} and len({round(shift, 6) for shift in both}) == 1 and first.sigmas is None:
        if stages[-1].end is not None:
            notes.add(stages[-1].node, f"ends after step {stages[-1].end}; svdq does all {first.steps} steps")
        return first.steps, {"class": kind, "shift": _plain(both[0]), "sigmas": names[0], **switch}
    levels = _levels(stages, names, both, notes)
    if len(stages) > 1 and not boundary:
        switch = {"switch_at": len(_levels(stages[:1], names[:1], both[:1], notes))}
    return len(levels), {"class": kind, "shift": 1.0, "sigmas": levels, **switch}


def _plain(number: float) -> float:
    """Return a number without what an editor's slider leaves of it, such as 5.000000000000001."""
    return round(float(number), 6)


def _class_of(stages: Sequence[Stage], notes: Notes) -> str:
    kind = EULER
    for stage in stages:
        name = stage.sampler
        if name in ("euler", "wrapper:euler"):
            continue
        if name == "wrapper:unipc":
            kind = UNIPC
        elif name.startswith(("uni_pc", "wrapper:unipc")):
            kind = UNIPC
            notes.add(
                stage.node,
                f"has the sampler {name.removeprefix('wrapper:')}; svdq uses diffusers' {UNIPC}, another solver of "
                "that name: near, not equal",
            )
        else:
            note_euler(stage, notes)
    return kind


def _name_of(stage: Stage, notes: Notes) -> str:
    name = stage.scheduler
    if stage.sigmas is not None or name in get_args(ScheduleName):
        return name
    if name != OWN_LEVELS:
        notes.add(stage.node, f"has the schedule {name}, which svdq lacks; svdq uses {_STAND_IN}")
    elif stage.sampler not in _WRAPPED:
        notes.add(stage.node, f"has its own noise levels; svdq uses the schedule {_STAND_IN}")
    return _STAND_IN


def _check_handover(before: Stage, after: Stage, notes: Notes) -> None:
    if before.boundary is None and before.end is None:
        notes.add(after.node, "denoises a finished video once more; svdq passes on what the first sampler leaves")
    if not before.keeps_noise and before.boundary is None and before.end is not None:
        notes.add(
            before.node, "removes all noise at its end (return_with_leftover_noise); svdq leaves the rest to the next"
        )
    if after.adds_noise:
        notes.add(after.node, "adds noise again; svdq does not")
    if before.end is not None and after.start != before.end and after.steps == before.steps:
        notes.add(after.node, f"starts at step {after.start}, where the one before ends at {before.end}; svdq goes on")


def _levels(stages: Sequence[Stage], names: Sequence[str], shifts: Sequence[float], notes: Notes) -> list[float]:
    """Return the noise level before each step of all stages."""
    levels: list[float] = []
    reached: float | None = None  # the noise level at which the stage before ends
    for stage, name, shift in zip(stages, names, shifts, strict=True):
        own = list(stage.sigmas) if stage.sigmas is not None else sigmas_of(name, stage.steps, shift)
        if reached is not None and own[stage.start :] and abs(reached - own[stage.start]) > _HANDOVER:
            what = f"goes on from a noise level of {own[stage.start]:.3g}, where the one before ends at {reached:.3g}"
            notes.add(stage.node, f"{what}; svdq steps from one schedule to the other")
        levels += [round(level, 6) for level in own[stage.start : stage.end]]
        reached = own[stage.end] if stage.end is not None and stage.end < len(own) else 0.0
    falling = [
        level for place, level in enumerate(levels) if level > max(levels[place + 1 :], default=0) and level <= 1
    ]
    if not falling:
        raise InputError(f"The sampler {stages[0].node} has no noise levels from 1 down to 0; correct its sigmas.")
    return falling
