"""The samplers of a workflow as stages of one denoising: which model, which noise levels, which guidance."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Graph, Link, Node, Notes
from svdq.pipeline.models.comfyui.values import UnknownValueError, moe_schedule, number_of, value_of

SAMPLERS = (
    "KSampler",
    "KSamplerAdvanced",
    "SamplerCustom",
    "SamplerCustomAdvanced",
    "WanVideoSampler",
    "WanMoeKSampler",
    "WanMoeKSamplerAdvanced",
)
_MAX_STEPS, MAX_SEED = 1000, 2**63 - 1
OWN_LEVELS = ""  # in place of a schedule: diffusers' noise levels, by WanVideoSampler
#: Inputs that bring the latents of another sampler.
LATENTS = ("latent_image", "samples", "latent", "latents", "video_latent", "av_latent")
#: Guiders that are read; what only LTX-2 has, in `ltx.py`.
_GUIDERS = ("CFGGuider", "BasicGuider", "LTXVDualCFGGuider", "MultimodalGuider", "STGGuider")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A sampler: steps `start` to `end` of a schedule, with one model."""

    node: Node
    model: Any  # the input
    positive: Any
    negative: Any
    latents: Any
    cfg: float
    sampler: str
    seed: int | None = None
    scheduler: str = "simple"
    steps: int = 20
    sigmas: tuple[float, ...] | None = None  # in place of a schedule; without the 0 at the end
    start: int = 0
    end: int | None = None  # None: to the last
    shift: float | None = None  # where the sampler has it itself
    boundary: float | None = None  # the noise level at which a sampler with two models changes to the second
    adds_noise: bool = True
    keeps_noise: bool = False  # whether noise is left after the last of its steps
    denoise: float = 1.0


def stages_of(graph: Graph, last: Node, notes: Notes) -> list[Stage]:
    """Return the stages that lead to a sampler, in their order; raises InputError for what cannot be read."""
    found: list[Stage] = []
    node: Node | None = last
    while node is not None:
        try:
            stages = list(_read(graph, node, notes))
        except UnknownValueError as error:
            raise InputError(
                f"{node} has an input that {error.args[0]} computes, which svdq cannot; set it to a number in ComfyUI."
            ) from error
        for stage in stages:
            if not 1 <= stage.steps <= _MAX_STEPS:
                raise InputError(f"{node} has {stage.steps} steps; set it to 1 to {_MAX_STEPS} in ComfyUI.")
        found = [*stages, *found]
        if len(found) > 20:
            break
        node = _sampler_before(graph, stages[0].latents, notes)
    first = found[0]
    if first.seed is not None and not 0 <= first.seed <= MAX_SEED:
        what = "is drawn anew for each video" if first.seed < 0 else f"is above {MAX_SEED}"
        notes.add(first.node, f"has the seed {first.seed}, which {what}; svdq draws one for each video, see --seed")
        found[0] = replace(first, seed=None)
    return found


def note_start(stage: Stage, notes: Notes) -> None:
    """Note a sampler that does not begin with noise alone."""
    if stage.start or stage.denoise < 1:
        notes.add(
            stage.node, "starts part of the way (start_at_step or denoise); svdq starts from noise, with all steps"
        )


def note_euler(stage: Stage, notes: Notes) -> None:
    """Note a sampler that svdq lacks."""
    what = f"has the sampler {stage.sampler.removeprefix('wrapper:')}, which svdq lacks"
    notes.add(stage.node, f"{what}; svdq uses Euler's method (euler) with the same noise levels")


def last_samplers(graph: Graph) -> list[Node]:
    """Return the samplers whose latents no other sampler continues."""
    samplers = list(graph.of_types(*SAMPLERS))
    continued = set()
    for node in samplers:
        latents = next((node.inputs[name] for name in LATENTS if name in node.inputs), None)
        before = _sampler_before(graph, latents, Notes())
        continued |= {before.id} if before else set()
    return [node for node in samplers if node.id not in continued]


def _sampler_before(graph: Graph, latents: Any, notes: Notes) -> Node | None:
    passed: list[Node] = []
    for node in graph.chain(latents, *LATENTS):
        if node.type in SAMPLERS:
            for each in passed:
                if not each.type.startswith("LTX"):  # which `ltx.py` reads
                    notes.add(each, "changes the latents between two samplers; svdq passes them on unchanged")
            return node
        passed.append(node)
    return None


def _read(graph: Graph, node: Node, notes: Notes) -> Iterator[Stage]:
    """Read a sampler; that with two models as two stages."""
    notes.read(node)
    inputs = node.inputs

    def number(name: str, default: float = 0) -> float:
        found = number_of(graph, node, name, default)
        return default if found is None else found

    def text(name: str) -> str:
        return str(value_of(graph, inputs.get(name)) or "")

    common: dict[str, Any] = {
        "node": node,
        "model": inputs.get("model"),
        "positive": inputs.get("positive"),
        "negative": inputs.get("negative"),
        "latents": next((inputs[name] for name in LATENTS if name in inputs), None),
        "cfg": _guidance(graph, node, notes),
        "sampler": text("sampler_name"),
        "steps": int(number("steps", 20)),
        "scheduler": text("scheduler"),
        "seed": _seed(graph, node, notes, "seed", "noise_seed"),
    }
    if node.type == "KSampler":
        yield Stage(**common, denoise=number("denoise", 1.0))
    elif node.type == "KSamplerAdvanced":
        yield Stage(
            **common,
            start=int(number("start_at_step")),
            end=_end(int(number("end_at_step", 10_000)), common["steps"]),
            adds_noise=text("add_noise") != "disable",
            keeps_noise=text("return_with_leftover_noise") == "enable",
        )
    elif node.type.startswith("WanMoeKSampler"):
        both = common | {"shift": number("sigma_shift", 8.0), "boundary": number("boundary", 0.9)}
        high = Stage(**(both | {"model": inputs.get("model_high_noise"), "cfg": number("cfg_high_noise", 1.0)}))
        yield replace(high, keeps_noise=True, denoise=number("denoise", 1.0), start=int(number("start_at_step")))
        low = {"model": inputs.get("model_low_noise"), "cfg": number("cfg_low_noise", 1.0), "adds_noise": False}
        yield Stage(**(both | low))
    elif node.type == "WanVideoSampler":
        yield _of_wrapper(graph, node, common, number, notes)
    else:
        yield _of_custom(graph, node, common, notes)


def _guidance(graph: Graph, node: Node, notes: Notes) -> float:
    """Return the guidance of a sampler; of one that changes from step to step the first."""
    origin = graph.origin(node.inputs.get("cfg"))
    if origin is not None and origin.type == "CreateCFGScheduleFloatList":
        notes.read(origin)
        scales = [number_of(graph, origin, f"cfg_scale_{name}", 1.0) or 1.0 for name in ("start", "end")]
        if scales[0] != scales[1]:
            notes.add(
                origin, f"changes the guidance from step to step; svdq guides by {scales[0]:g} in all of an expert"
            )
        return scales[0]
    return number_of(graph, node, "cfg", 1.0) or 0.0


def _end(end: int, steps: int) -> int | None:
    return end if end < steps else None


def _seed(graph: Graph, node: Node, notes: Notes, *names: str) -> int | None:
    for name in names:
        if name in node.inputs:
            try:
                return int(number_of(graph, node, name) or 0)
            except UnknownValueError as error:
                notes.add(
                    error.args[0], "makes a seed that svdq cannot compute; svdq draws one for each video, see --seed"
                )
                return None
    return None


def _of_custom(graph: Graph, node: Node, common: dict[str, Any], notes: Notes) -> Stage:
    """Read SamplerCustom and SamplerCustomAdvanced, whose parts are other nodes."""
    inputs = node.inputs
    guider, noise, chosen = (graph.origin(inputs.get(name)) for name in ("guider", "noise", "sampler"))
    notes.read(guider, noise, chosen)
    if guider is not None:
        if guider.type not in _GUIDERS:
            notes.add(guider, "guides in a way that svdq lacks; svdq guides by one scale, as CFGGuider")
        common |= {
            "model": guider.inputs.get("model"),
            "positive": guider.inputs.get("positive", guider.inputs.get("conditioning")),
            "negative": guider.inputs.get("negative"),
            "cfg": number_of(graph, guider, "cfg", 1.0),
        }
    adds_noise = value_of(graph, inputs.get("add_noise")) is not False
    if noise is not None:
        adds_noise = noise.type != "DisableNoise"
        common["seed"] = _seed(graph, noise, notes, "noise_seed", "seed")
    common["sampler"] = (chosen.text("sampler_name") if chosen is not None else "") or (chosen.type if chosen else "")
    return Stage(
        **(common | {"adds_noise": adds_noise, "keeps_noise": True} | _sigmas(graph, inputs.get("sigmas"), notes))
    )


def _sigmas(graph: Graph, value: Any, notes: Notes) -> dict[str, Any]:
    """Return the schedule that nodes give as sigmas, as fields of a stage."""
    node = graph.origin(value)
    if node is None:
        raise InputError("A sampler of the workflow has no sigmas; connect a BasicScheduler or ManualSigmas.")
    notes.read(node)
    if node.type == "BasicScheduler":
        steps, denoise = int(number_of(graph, node, "steps") or 20), number_of(graph, node, "denoise", 1.0)
        return {"scheduler": str(value_of(graph, node.inputs.get("scheduler"))), "steps": steps, "denoise": denoise}
    if node.type == "BetaSamplingScheduler":
        if (number_of(graph, node, "alpha", 0.6), number_of(graph, node, "beta", 0.6)) != (0.6, 0.6):
            notes.add(node, "has another alpha and beta than 0.6, which svdq uses")
        return {"scheduler": "beta", "steps": int(number_of(graph, node, "steps") or 20)}
    if node.type.startswith("Visualize"):  # KJNodes
        return _sigmas(graph, node.inputs.get("sigmas"), notes)
    if node.type == "LTXVScheduler":
        return {"scheduler": node.type, "steps": int(number_of(graph, node, "steps") or 20)}
    if node.type == "ManualSigmas":
        text = str(value_of(graph, node.inputs.get("sigmas")) or "")
        try:
            levels = tuple(float(each) for each in text.replace(";", ",").replace(",", " ").split())
        except ValueError as error:
            raise InputError(
                f"{node} has sigmas that are no numbers: {text[:60]!r}; correct them in ComfyUI."
            ) from error
        return {"sigmas": levels[:-1] if levels and levels[-1] == 0 else levels, "steps": len(levels) - 1}
    if node.type == "SplitSigmasAtT":
        whole = _sigmas(graph, node.inputs.get("sigmas"), notes)
        return whole | {"boundary": number_of(graph, node, "boundary", 0.9)}
    if node.type == "SplitSigmas":
        whole = _sigmas(graph, node.inputs.get("sigmas"), notes)
        place = int(number_of(graph, node, "step") or 0)
        assert isinstance(value, Link)
        place += whole.get("start", 0)
        return whole | ({"end": place} if value.slot == 0 else {"start": place})
    if node.type == "WanMoEScheduler":
        shift, steps, high, _ = moe_schedule(graph, node)
        assert isinstance(value, Link)
        part = {5: {"end": high}, 6: {"start": high}}.get(value.slot, {})
        return {"scheduler": str(value_of(graph, node.inputs["scheduler"])), "steps": steps, "shift": shift, **part}
    raise InputError(
        f"{node} makes noise levels that svdq does not know; svdq reads BasicScheduler, BetaSamplingScheduler, "
        "ManualSigmas, LTXVScheduler, WanMoEScheduler and SplitSigmas: connect one of these in its place."
    )


#: Inputs of WanVideoSampler that are read elsewhere, or that change nothing.
_READ = {"model", "text_embeds", "image_embeds", "samples", "scheduler", "sigmas", "cfg", "steps", "shift", "seed"}


def _of_wrapper(graph: Graph, node: Node, common: dict[str, Any], number: Any, notes: Notes) -> Stage:
    """Read WanVideoSampler, whose `unipc` and `euler` are diffusers' schedulers."""
    inputs = node.inputs
    for name, value in inputs.items():
        if (origin := graph.origin(value)) is not None and name not in _READ and not name.endswith(("step", "steps")):
            notes.add(origin, f"is the {name} of {node}, which svdq has not; svdq renders without")
    texts = graph.origin(inputs.get("text_embeds"))
    notes.read(texts)
    steps, start, end = common["steps"], number("start_step", 0), number("end_step", -1)
    boundary = next((each for each in (start, end) if 0 < each < 1), None)  # of WanVideoSigmaToStep
    start, end = (0, -1) if boundary else (int(start), int(end))
    scheduler, sigmas = inputs.get("scheduler"), graph.origin(inputs.get("sigmas"))
    common |= {"sampler": f"wrapper:{value_of(graph, scheduler)}", "scheduler": OWN_LEVELS}
    common |= {"positive": inputs.get("text_embeds"), "negative": inputs.get("text_embeds")}
    notes.read(graph.origin(scheduler))
    if number("riflex_freq_index"):
        notes.add(node, "changes the positions of frames (RIFLEx), which svdq does not")
    common |= {
        "shift": number("shift", 5.0),
        "boundary": boundary,
        "start": max(0, start),
        "end": None if end < 0 else _end(end, steps),
        "adds_noise": graph.origin(inputs.get("samples")) is None,
        "keeps_noise": True,
        "denoise": number("denoise_strength", 1.0),
    }
    if sigmas is not None and not sigmas.type.startswith("WanVideoScheduler"):
        common |= _sigmas(graph, inputs["sigmas"], notes)
    return Stage(**common)
