"""Reads a workflow into what a model file and a submission say, with notes on what is left out."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Graph, Link, Node, Notes
from svdq.pipeline.models.comfyui.ltx import is_ltx, read_ltx
from svdq.pipeline.models.comfyui.model_chain import ModelChain, model_chain, uses_of
from svdq.pipeline.models.comfyui.schedule import schedule_of
from svdq.pipeline.models.comfyui.source import (
    CONDITIONING,
    Recipe,
    Source,
    find_encoder,
    quietly,
    read_svd,
    refuse,
    source_of,
)
from svdq.pipeline.models.comfyui.stages import SAMPLERS, Stage, last_samplers, stages_of
from svdq.pipeline.models.comfyui.values import UnknownValueError, number_of, without_switches
from svdq.pipeline.models.comfyui.workflow import read_graph

HIGH, LOW = "transformer", "transformer_2"
_SAVERS = {"CreateVideo": "fps", "VHS_VideoCombine": "frame_rate", "SaveAnimatedWEBP": "fps", "SaveWEBM": "fps"}
#: Nodes that need no word: svdq does what they do, or nobody sees what they do.
_QUIET = re.compile(
    r"VAEDecode|CLIPVision|VAELoader|CLIPLoader|Save|VHS_VideoCombine|CreateVideo|Preview|Primitive|.*Constant|Show"
    r"|.*Clean|Unload|LoadImage|.*Math|WanVideoDecode|WanVideoBlockSwap|WanVideoTorchCompile|WanVideoVRAM|.*Note"
    r"|ComfySwitchNode|GetImageSize|Display|PlaySound",
    re.IGNORECASE,
)
#: Nodes that interpolate frames, and what svdq does in place of nodes after the decode, by a part of their names.
_INTERPOLATIONS = ("rife", "film", "gimm", "vfi", "interpolat")
_AFTERWARDS = dict.fromkeys(
    _INTERPOLATIONS, "interpolates frames; `svdq submit --interpolate` does so by motion estimation"
) | {
    "upscale": "enlarges the frames; `svdq submit --upscale` does",
    "audio": "concerns sound; svdq writes the sound that LTX-2 makes, and none for Wan",
    "colormatch": "corrects colors; svdq does not",
}


def read_recipe(workflow: Mapping[str, Any]) -> Recipe:
    """Read a workflow; raises InputError, with the node, where svdq cannot make such a video."""
    try:
        return _read(workflow)
    except UnknownValueError as error:
        raise InputError(
            f"{error.args[0]} computes a value that svdq needs and cannot compute; set it to a constant in ComfyUI."
        ) from error
    except RecursionError as error:
        raise InputError(
            "Nodes of the workflow depend on each other in a circle, or on too many in a row; correct its links."
        ) from error
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"[:100]
        raise InputError(f"The workflow is not as ComfyUI writes it ({what}); save it again.") from error


def _read(workflow: Mapping[str, Any]) -> Recipe:
    graph, notes = without_switches(read_graph(workflow)), Notes()
    if not graph.nodes:
        raise InputError("The workflow has no node that runs: all are muted, bypassed or notes.")
    ends = last_samplers(graph)
    if not ends:
        _refuse_without_sampler(graph)
    if not any(node.type.startswith(("Wan", "LTX", "EmptyLTX")) for node in graph.nodes.values()):
        refuse([*graph.nodes.values()])
    end, recipe = _first_video(graph, ends, notes)
    rate = _rate(graph, end, notes)
    fps = recipe.defaults.get("fps", rate)
    if rate not in (None, fps):
        what = f"makes a video of {fps} frames a second, to be played at {rate}"
        notes.add(recipe.source.encoder, f"{what}; svdq plays it as it is made")
    _note_the_rest(graph, end, notes)
    nodes = graph.nodes.values()
    models = [each for node in nodes for each in node.models]
    given = [node.inputs.get(name) for node in nodes for name in ("ckpt_name", "ltxv_path")]
    return replace(
        recipe,
        defaults=recipe.defaults | ({} if fps is None else {"fps": fps}),
        notes=tuple(notes.sentences),
        urls={str(each["name"]): str(each["url"]) for each in models if each.get("name") and each.get("url")},
        checkpoints=frozenset(str(quietly(graph, each)) for each in given),
    )


def _first_video(graph: Graph, ends: list[Node], notes: Notes) -> tuple[Node, Recipe]:
    """Return the last sampler of the first video of a photo, and what was read of it.

    Other samplers may make the photo before, or the next part after. Raises InputError if none makes such a video.
    """
    read = read_ltx if is_ltx(graph) else _read_video
    refused: list[InputError] = []
    for end in sorted(ends, key=lambda each: len(graph.before(each))):
        own = Notes()
        try:
            recipe = read(graph, end, own)
        except InputError as error:
            refused.append(error)
        else:
            _note_other_videos(graph, [other for other in ends if other is not end], end, notes)
            notes.sentences += own.sentences
            notes.read_ids |= own.read_ids
            return end, recipe
    raise refused[0]


def _read_video(graph: Graph, end: Node, notes: Notes) -> Recipe:
    """Read the video of Wan or Stable Video Diffusion that a sampler makes."""
    stages = stages_of(graph, end, notes)
    starts = [stages[0].positive, stages[0].latents, stages[0].node.inputs.get("image_embeds")]
    encoder = find_encoder(graph, starts, end)
    stages, models = _experts(stages, [model_chain(graph, each.model, each.node, notes) for each in stages])
    for stage in stages[1:]:
        if (stage.positive, stage.negative) != (stages[0].positive, stages[0].negative):
            notes.add(stage.node, "has other prompts or photos than the first sampler; svdq takes the first's for both")
    source = source_of(graph, encoder, stages[0].positive, stages[0].negative, notes)
    if encoder.type == CONDITIONING:
        return read_svd(graph, stages[0], models[0], source, notes)
    base, components = _base(models, source, notes)
    if source.has_last_photo and base.startswith("Wan-AI/Wan2.1-I2V"):
        notes.add(encoder, "has a last photo, which Wan 2.1 I2V does not take in svdq; svdq renders without")
        source = replace(source, has_last_photo=False, last_photo=None)
    steps, scheduler = schedule_of(stages, [each.shift for each in models], notes)
    guidance = tuple(stage.cfg for stage in stages)
    if len(guidance) == 2 and guidance[0] <= 1 < guidance[1]:
        notes.add(
            stages[1].node, f"guides by {guidance[1]:g}; svdq guides no step where the first expert has 1, as diffusers"
        )
    files = {"text_encoder": source.text_encoder, "vae": source.vae}
    if "2.1" in base:
        files["image_encoder"] = source.image_encoder
    weights = dict(zip(components, (each.file for each in models), strict=True))
    return Recipe(
        base=base,
        weights=weights | {component: file for component, file in files.items() if file},
        loras=tuple((name, lora) for name, each in zip(components, models, strict=True) for lora in each.loras),
        defaults=_defaults(steps, guidance, source),
        scheduler=scheduler,
        source=source,
        seed=stages[0].seed,
    )


def _note_other_videos(graph: Graph, others: Sequence[Node], end: Node, notes: Notes) -> None:
    for other in others:
        if other.id in graph.before(end):
            notes.add(other, "makes what the video starts from; svdq takes a photo")
        else:
            notes.add(other, "makes another video, or the next part; svdq imports the first, see `svdq submit --then`")
        notes.read(*(graph.nodes[each] for each in graph.before(other)))


def _defaults(steps: int, guidance: tuple[float, ...], source: Source) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": steps}
    for name, scale in zip(("guidance_scale", "guidance_scale_2"), guidance, strict=False):
        found[name] = round(float(scale), 6)
    if source.size is not None:
        found["width"], found["height"] = source.size
    others = {"frames": source.frames, "negative_prompt": source.negative_prompt}
    return found | {name: value for name, value in others.items() if value is not None}


def _refuse_without_sampler(graph: Graph) -> None:
    nodes = [*graph.nodes.values()]
    named = [node for node in nodes if "sampler" in node.type.lower() and "select" not in node.type.lower()]
    named += [node for node in nodes if node.type.startswith(("workflow/", "workflow>"))]  # group nodes, as of old
    named = named or [node for node in nodes if node.type.endswith("Api") or "Api" in node.type]
    if not named:
        refuse(nodes)
    where = f" ({', '.join(map(str, (named or nodes)[:3]))})"
    raise InputError(f"The workflow has no sampler that svdq reads{where}; use one of {', '.join(SAMPLERS)}.")


def _experts(stages: list[Stage], models: list[ModelChain]) -> tuple[list[Stage], list[ModelChain]]:
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
            joined[-1] = (replace(before, end=stage.end, keeps_noise=stage.keeps_noise), theirs)
        else:
            joined.append((stage, model))
    if len(joined) > 2:
        raise InputError(f"{joined[2][0].node} is the third sampler with a model, and svdq has two experts.")
    return [stage for stage, _ in joined], [model for _, model in joined]


def _base(models: list[ModelChain], source: Source, notes: Notes) -> tuple[str, tuple[str, ...]]:
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
        return "Wan-AI/Wan2.2-I2V-A14B-Diffusers", (HIGH, LOW)
    if source.encoder.type == "Wan22ImageToVideoLatent" or "ti2v" in file:
        return "Wan-AI/Wan2.2-TI2V-5B-Diffusers", (HIGH,)
    if re.search(r"2[._]2|high.?noise|low.?noise", file) and "5b" not in file:
        raise InputError(f"{loader} loads {models[0].file} alone; svdq needs the files of both experts of Wan 2.2.")
    if "flf2v" in file or "fl2v" in file:
        return "Wan-AI/Wan2.1-FLF2V-14B-720P-diffusers", (HIGH,)
    size = next((each for each in ("480", "720") if each in file), None)
    if size is None:
        notes.add(loader, f"loads {models[0].file}, which is taken for Wan 2.1 I2V-14B-480P by its nodes; see `base`")
    return f"Wan-AI/Wan2.1-I2V-14B-{size or 480}P-Diffusers", (HIGH,)


def _rate(graph: Graph, end: Node, notes: Notes) -> int | None:
    """Return the frames a second of what saves the video, before an interpolation."""
    for saver in graph.of_types(*_SAVERS):
        before = graph.before(saver)
        if end.id not in before:
            continue
        notes.read(saver)
        try:
            rate = number_of(graph, saver, _SAVERS[saver.type])
            for node in (graph.nodes[each] for each in before):
                if _is_interpolation(node) and node.inputs.get("source_fps") is not None:
                    rate = number_of(graph, node, "source_fps")
                elif _is_interpolation(node):
                    times = (number_of(graph, node, name) for name in ("multiplier", "interpolation_factor"))
                    rate = None if rate is None else rate / (next(filter(None, times), None) or 1)
        except UnknownValueError as error:
            notes.add(error.args[0], "computes the frames a second, which svdq cannot; give --fps")
            return None
        return None if rate is None else max(1, round(rate))
    return None


def _is_interpolation(node: Node) -> bool:
    return any(part in node.type.lower() for part in _INTERPOLATIONS)


def _note_the_rest(graph: Graph, end: Node, notes: Notes) -> None:
    """Note all nodes that have a part in what is saved, and were not read."""
    consumers = {
        origin.id for node in graph.nodes.values() for v in node.inputs.values() if (origin := graph.origin(v))
    }
    savers = [node for node in graph.nodes.values() if node.id not in consumers and end.id in graph.before(node)]
    needed = set().union(*(graph.before(node) for node in savers))
    for node in graph.nodes.values():
        is_constant = not any(map(graph.origin, node.inputs.values())) and "load" not in node.type.lower()
        is_constant = is_constant or quietly(graph, Link(node=node.id, slot=0)) is not None
        if node.id in needed and node.id not in notes.read_ids and not is_constant and not _QUIET.match(node.type):
            kind = node.type.lower()
            what = next((what for part, what in _AFTERWARDS.items() if part in kind), "is left out")
            notes.add(node, what)
