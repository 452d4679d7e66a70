"""The samplers of a workflow as stages of one denoising: which model, which noise levels, which guidance."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Graph, Node, Schedule, Stage
from svdq.pipeline.models.comfyui.values import UnknownValueError, number_of, number_or, text_of, value_of, whole_of

_MAX_STAGES, _MAX_STEPS, _MAX_SEED = 20, 1000, 2**63 - 1
#: Inputs that bring the latents of another sampler.
_LATENTS = ("latent_image", "samples", "latent", "latents", "video_latent", "av_latent")
_GUIDERS = {"CFGGuider", "BasicGuider"}


def stages_of(graph: Graph, last: Node) -> list[Stage]:
    """Return the stages that lead to a sampler, in their order; raises InputError for what cannot be read."""
    found: list[Stage] = []
    node: Node | None = last
    while node is not None and len(found) <= _MAX_STAGES:
        graph.read(node)
        try:
            stages = samplers_of(graph)[node.type](graph, node)
        except UnknownValueError as error:
            raise InputError(
                f"{node} has an input that {error.args[0]} computes, which svdq cannot; set it to a number in ComfyUI."
            ) from error
        for stage in stages:
            if not 1 <= stage.schedule.steps <= _MAX_STEPS:
                raise InputError(f"{node} has {stage.schedule.steps} steps; set it to 1 to {_MAX_STEPS} in ComfyUI.")
        found = [*stages, *found]
        node = _path_to(graph, node)[1]
    seed = found[0].seed
    if seed is not None and not 0 <= seed <= _MAX_SEED:
        what = "is drawn anew for each video" if seed < 0 else f"is above {_MAX_SEED}"
        graph.note(found[0].node, f"has the seed {seed}, which {what}; svdq draws one for each video, see --seed")
        found[0] = replace(found[0], seed=None)
    return found


def last_samplers(graph: Graph) -> list[Node]:
    """Return the samplers whose latents no other sampler continues."""
    samplers = [*graph.of_types(*samplers_of(graph))]
    continued = [before.id for node in samplers if (before := _path_to(graph, node)[1]) is not None]
    return [node for node in samplers if node.id not in continued]


def note_start(graph: Graph, stage: Stage, *, denoise: float = 1.0) -> None:
    """Note a sampler that does not begin with noise alone."""
    if stage.schedule.start or min(denoise, stage.schedule.denoise) < 1:
        graph.note(
            stage.node, "starts part of the way (start_at_step or denoise); svdq starts from noise, with all steps"
        )


def note_euler(graph: Graph, stage: Stage) -> None:
    """Note a sampler that svdq lacks."""
    what = f"has the sampler {stage.sampler.removeprefix('wrapper:')}, which svdq lacks"
    graph.note(stage.node, f"{what}; svdq uses Euler's method (euler) with the same noise levels")


def samplers_of(graph: Graph) -> dict[str, Callable[[Graph, Node], Sequence[Stage]]]:
    """Return what reads the samplers that are known, by their types."""
    return {**_SAMPLERS, **graph.types.samplers}


def _path_to(graph: Graph, sampler: Node) -> tuple[tuple[Node, ...], Node | None]:
    """Return the nodes that a sampler's latents come from, the nearest first, and the sampler before them."""
    passed: list[Node] = []
    for node in graph.chain(_latents(sampler), *_LATENTS):
        if node.type in samplers_of(graph):
            return tuple(passed), node
        passed.append(node)
    return tuple(passed), None


def _latents(sampler: Node) -> Any:
    return next((sampler.inputs[name] for name in _LATENTS if name in sampler.inputs), None)


def plain_stage(graph: Graph, node: Node) -> Stage:
    """Return a sampler by inputs of the usual names, with all steps of its schedule."""
    return Stage(
        node=node,
        model=node.inputs.get("model"),
        positive=node.inputs.get("positive"),
        negative=node.inputs.get("negative"),
        latents=_latents(node),
        path=_path_to(graph, node)[0],
        cfg=_guidance(graph, node),
        sampler=text_of(graph, node, "sampler_name"),
        schedule=Schedule(
            node=node,
            name=text_of(graph, node, "scheduler"),
            steps=whole_of(graph, node, "steps", 20),
            denoise=number_or(graph, node, "denoise", 1.0),
        ),
        seed=_seed(graph, node),
    )


def _guidance(graph: Graph, node: Node) -> float:
    """Return the guidance of a sampler; of one that changes from step to step the first."""
    origin = graph.origin(node.inputs.get("cfg"))
    if origin is None or origin.type != "CreateCFGScheduleFloatList":
        return number_or(graph, node, "cfg", 1.0)
    graph.read(origin)
    start, end = (number_of(graph, origin, f"cfg_scale_{name}") or 1.0 for name in ("start", "end"))
    if start != end:
        graph.note(origin, f"changes the guidance from step to step; svdq guides by {start:g} in all of an expert")
    return start


def _seed(graph: Graph, node: Node) -> int | None:
    name = next((each for each in ("seed", "noise_seed") if each in node.inputs), None)
    try:
        return None if name is None else whole_of(graph, node, name)
    except UnknownValueError as error:
        graph.note(error.args[0], "makes a seed that svdq cannot compute; svdq draws one for each video, see --seed")
        return None


def steps_until(end: int, steps: int) -> int | None:
    """Return the step before which a sampler ends; None if it does all steps."""
    return max(0, end) if end < steps else None


def plain_sampler(graph: Graph, node: Node) -> list[Stage]:
    """Read a sampler by inputs of the usual names."""
    return [plain_stage(graph, node)]


def _advanced(graph: Graph, node: Node) -> list[Stage]:
    """Read KSamplerAdvanced, which does a part of the steps."""
    stage = plain_stage(graph, node)
    start, end = whole_of(graph, node, "start_at_step"), whole_of(graph, node, "end_at_step", _MAX_STEPS)
    return [
        replace(
            stage,
            schedule=replace(stage.schedule, start=max(0, start), end=steps_until(end, stage.schedule.steps)),
            adds_noise=text_of(graph, node, "add_noise") != "disable",
            keeps_noise=text_of(graph, node, "return_with_leftover_noise") == "enable",
        )
    ]


def _custom(graph: Graph, node: Node) -> list[Stage]:
    """Read SamplerCustom and SamplerCustomAdvanced, whose parts are other nodes."""
    guider, noise, chosen = (graph.origin(node.inputs.get(name)) for name in ("guider", "noise", "sampler"))
    graph.read(guider, noise, chosen)
    stage = replace(plain_stage(graph, node), sampler="", keeps_noise=True)
    if guider is not None:
        if guider.type not in _GUIDERS | graph.types.guiders:
            graph.note(guider, "guides in a way that svdq lacks; svdq guides by one scale, as CFGGuider")
        stage = replace(
            stage,
            model=guider.inputs.get("model"),
            positive=guider.inputs.get("positive", guider.inputs.get("conditioning")),
            negative=guider.inputs.get("negative"),
            cfg=number_or(graph, guider, "cfg", 1.0),
        )
    if noise is not None:
        stage = replace(stage, adds_noise=noise.type != "DisableNoise", seed=_seed(graph, noise))
    elif value_of(graph, node.inputs.get("add_noise")) is False:
        stage = replace(stage, adds_noise=False)
    if chosen is not None:
        stage = replace(stage, sampler=chosen.text("sampler_name") or chosen.type)
    return [replace(stage, schedule=schedule_from(graph, node.inputs.get("sigmas")))]


_SAMPLERS: Mapping[str, Callable[[Graph, Node], list[Stage]]] = {
    "KSampler": plain_sampler,
    "KSamplerAdvanced": _advanced,
    "SamplerCustom": _custom,
    "SamplerCustomAdvanced": _custom,
}


def schedule_from(graph: Graph, sigmas: Any) -> Schedule:
    """Read the noise levels that nodes give as sigmas, and which part of them; raises InputError for unknown nodes."""
    parts: list[tuple[Node, int]] = []
    value = sigmas
    while (node := graph.origin(value)) is not None and _CHANGE.match(node.type):
        if any(node is part for part, _ in parts):
            raise InputError(f"The noise levels of {node} depend on themselves; correct its links.")
        parts.append((node, value.slot))
        value = node.inputs.get("sigmas")
    if node is None:
        raise InputError("A sampler of the workflow has no sigmas; connect a BasicScheduler or ManualSigmas.")
    known = {**_SCHEDULES, **graph.types.schedules}
    if node.type not in known:
        raise InputError(
            f"{node} makes noise levels that svdq does not know; svdq reads {', '.join(known)} and SplitSigmas: "
            "connect one of these in its place."
        )
    graph.read(node, *(part for part, _ in parts))
    schedule = known[node.type](graph, node, value.slot)
    for part, slot in reversed(parts):
        if part.type == "SplitSigmasAtT":
            schedule = replace(schedule, boundary=number_or(graph, part, "boundary", 0.9))
        elif part.type == "SplitSigmas":
            place = schedule.start + max(0, whole_of(graph, part, "step"))
            schedule = replace(schedule, end=place) if slot == 0 else replace(schedule, start=place)
    return schedule


_CHANGE = re.compile(r"SplitSigmas(AtT)?$|Visualize")  # nodes that take a part of noise levels, or show them


def _basic(graph: Graph, node: Node, slot: int) -> Schedule:
    steps, denoise = whole_of(graph, node, "steps") or 20, number_or(graph, node, "denoise", 1.0)
    return Schedule(node=node, name=text_of(graph, node, "scheduler"), steps=steps, denoise=denoise)


def _beta(graph: Graph, node: Node, slot: int) -> Schedule:
    if {number_or(graph, node, name, 0.6) for name in ("alpha", "beta")} != {0.6}:
        graph.note(node, "has another alpha and beta than 0.6, which svdq uses")
    return Schedule(node=node, name="beta", steps=whole_of(graph, node, "steps") or 20)


def _manual(graph: Graph, node: Node, slot: int) -> Schedule:
    text = text_of(graph, node, "sigmas")
    try:
        levels = tuple(float(each) for each in text.replace(";", ",").replace(",", " ").split())
    except ValueError as error:
        raise InputError(f"{node} has sigmas that are no numbers: {text[:60]!r}; correct them in ComfyUI.") from error
    steps = len(levels) - 1
    return Schedule(node=node, levels=levels[:-1] if levels and levels[-1] == 0 else levels, steps=steps)


_SCHEDULES: Mapping[str, Callable[[Graph, Node, int], Schedule]] = {
    "BasicScheduler": _basic,
    "BetaSamplingScheduler": _beta,
    "ManualSigmas": _manual,
}
