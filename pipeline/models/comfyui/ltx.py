"""Reads a workflow of LTX-2: one stage, or two with a latent upsampler between them."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Graph, Node, Notes
from svdq.pipeline.models.comfyui.ltx_photos import PHOTO_NODES, photos_in, upsampled_size
from svdq.pipeline.models.comfyui.model_chain import UNREAD, ModelChain, model_chain, uses_of
from svdq.pipeline.models.comfyui.source import (
    Recipe,
    Source,
    files_named,
    frames_of,
    photo_of,
    prompt_of,
    quietly,
    refuse_kinds,
)
from svdq.pipeline.models.comfyui.stages import LATENTS, SAMPLERS, Stage, note_euler, note_start, stages_of
from svdq.pipeline.models.ltx.family import FRAME_STEP, LATENT_SIDE, NO_GUIDANCE
from svdq.pipeline.models.ltx.layout import (
    DISTILLED_SIGMA_VALUES,
    IMAGE_CRF,
    STAGE_2_DISTILLED_SIGMA_VALUES,
    TRANSFORMER,
)
from svdq.pipeline.models.model_file import WEIGHTS_SUFFIXES

#: Settings of LTXVScheduler, with ComfyUI's defaults.
_OF_SCHEDULER: dict[str, Any] = {"max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1}


def levels_of(
    graph: Graph, stage: Stage, size: tuple[int, int] | None, frames: int | None, num_stages: int, notes: Notes
) -> tuple[float, ...]:
    """Return the noise level before each step of a stage; a size or frames that are not known count as usual."""
    if stage.sigmas is not None:
        return stage.sigmas[stage.start : stage.end]
    parts = graph.chain(stage.node.inputs.get("sigmas"), "sigmas")
    scheduler = next((node for node in parts if node.type == "LTXVScheduler"), None)
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
        note_euler(stage, notes)
    note_start(replace(stage, start=0), notes)


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
    for node in graph.chain(guider.inputs.get("parameters"), "parameters"):
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
    return found


_WHOLE = ("connectors", "vae", "audio_vae", "vocoder")  # in a checkpoint, besides the transformer
#: Upsamplers of other stages than svdq's second one, and one file of several.
_OTHER_UPSAMPLER, _SHARD = re.compile(r"temporal|x1\.5"), re.compile(r"-of-\d+\.")


def files_of(graph: Graph, model: ModelChain, starts: Mapping[str, Any], base: str, notes: Notes) -> dict[str, str]:
    """Return the files by component, from the inputs that need `vae`, `audio_vae`, `text_encoder` and the upsampler."""
    found: dict[str, str] = {}
    if "ckpt_name" in model.loader.inputs:
        _take(found, model.loader, _WHOLE, model.file, base, notes)
    for kind, value in starts.items():
        loader = next((node for node in graph.chain(value, "vae", "clip") if files_named(graph, node)), None)
        if loader is None or loader is model.loader:
            continue
        notes.read(loader)
        for name, file in files_named(graph, loader).items():
            components: tuple[str, ...] = ("audio_vae", "vocoder") if kind == "audio_vae" else (kind,)
            if kind == "text_encoder":
                is_part = name in ("ckpt_name", "ltxv_path") or re.search(r"proj|connector", file.lower())
                components = ("text_encoder",) * ("gemma" in file.lower()) + ("connectors",) * bool(is_part)
            _take(found, loader, components or (kind,), file if components else "", base, notes)
    return found


def _take(found: dict[str, str], loader: Node, components: tuple[str, ...], file: str, base: str, notes: Notes) -> None:
    lowered = file.lower()
    is_unread = not lowered.endswith(WEIGHTS_SUFFIXES) or bool(UNREAD.search(lowered) or _SHARD.search(lowered))
    is_unread |= bool(components == ("latent_upsampler",) and _OTHER_UPSAMPLER.search(lowered))
    # The other VAE of LTX-2.5 decodes by diffusion.
    if is_unread or (components == ("vae",) and "2.5" in base and "conv" not in lowered and "vae" in lowered):
        notes.add(loader, f"loads {file or 'another file'}; svdq takes the {', '.join(components)} of the base")
        for each in components:
            found.pop(each, None)
    else:
        found |= dict.fromkeys(components, file)


#: Versions by a part of a file's name, with the hub id of the base, and its text encoder.
_VERSIONS = (
    (r"2[._]?3", "diffusers/LTX-2.3-Distilled-Diffusers", "Gemma3ForConditionalGeneration"),
    (r"2[._]?5", "Lightricks/LTX-2.5-Diffusers", "Gemma4UnifiedForConditionalGeneration"),
)
_UPSAMPLERS = ("LTXVLatentUpsampler", "LTXVLatentUpsamplerTiled")
_STARTS = ("EmptyLTXVLatentVideo", "LTXVImgToVideo")  # nodes that begin a video, with its size
_PASSING = ("LTXVConcatAVLatent", "LTXVSeparateAVLatent", "LTXVCropGuides")
#: Nodes that need no word: svdq does what they do.
_QUIET = (
    *_PASSING,
    "LTXVConditioning",
    "LTXVEmptyLatentAudio",
    "LTXVAudioVAEDecode",
    "LTXVTiledVAEDecode",
    "LTXFloatToInt",
)
#: What svdq cannot, by a part of the name of a node before the last sampler.
_REFUSED = {
    "iclora": "makes a video with an in-context LoRA",
    "audiovaeencode": "makes a video from sound",
    "vaeencodeaudio": "makes a video from sound",
    "referenceaudio": "makes a video from sound",
    "director": "makes a video along a timeline",
    "looping": "makes a video from another one",
    "extend": "makes a video from another one",
    "loadvideo": "makes a video from another one",
    "vaeencode": "makes a video from latents of pictures",
}


def is_ltx(graph: Graph) -> bool:
    """Return whether a workflow has nodes of LTX."""
    return any(node.type.startswith(("LTX", "EmptyLTX")) for node in graph.nodes.values())


def read_ltx(graph: Graph, end: Node, notes: Notes) -> Recipe:
    """Read the video that a sampler makes; raises InputError, with the node, where svdq cannot make it."""
    stages = stages_of(graph, end, notes)
    models = [model_chain(graph, stage.model, stage.node, notes) for stage in stages]
    needed = graph.before(end)
    before = [node for node in graph.nodes.values() if node.id in needed]
    base, crf = _base(graph, models[0], notes)
    refuse_kinds(before, _REFUSED)
    if lora := next((each for each in models[0].loras if re.search(r"ic[-_]?lora", each.file.lower())), None):
        raise InputError(f"{lora.node} adds {lora.file}, an in-context LoRA, which svdq cannot; leave it out.")
    paths = [_path(graph, stage) for stage in stages]
    empty = paths[0][-1] if paths[0] else end
    if empty.type not in _STARTS:
        raise InputError(f"{empty} has no latents that svdq can start from; it reads {' and '.join(_STARTS)}.")
    notes.read(*graph.of_types(*_QUIET))
    for node in (node for path in paths for node in path):
        if node.type in (*_STARTS, *PHOTO_NODES, *_UPSAMPLERS):
            notes.read(node)
        elif node.type not in _PASSING:
            notes.add(node, "changes the latents; svdq passes them on unchanged")
    has_two = _has_second(graph, stages, models, paths, notes)
    photo, last = photos_in(graph, paths, crf, notes)
    size = upsampled_size(graph, empty, _factor(graph, paths) if len(stages) > 1 else 1, notes)
    frames = frames_of(graph, empty, "length", FRAME_STEP, notes)
    levels = levels_of(graph, stages[0], size, frames, 1 + has_two, notes)
    for stage in stages[: 1 + has_two]:
        note_sampler(graph, stage, notes)
    prompt, text_encoder = prompt_of(graph, stages[0].positive, "positive", notes)
    negative_prompt = prompt_of(graph, stages[0].negative, "negative", notes)[0]
    defaults = {"stages": 1 + has_two, **guidance_of(graph, stages[0], notes)}
    if size is not None:
        defaults["width"], defaults["height"] = size
    others = {"frames": frames, "negative_prompt": negative_prompt}
    nodes = [node for path in paths for node in path]
    starts = {
        "vae": next((node.inputs["vae"] for node in nodes if "vae" in node.inputs), None),
        "audio_vae": next((node.inputs["audio_vae"] for node in before if "audio_vae" in node.inputs), None),
        "text_encoder": text_encoder,
        "latent_upsampler": next(
            (node.inputs.get("upscale_model") for node in nodes if node.type in _UPSAMPLERS), None
        ),
    }
    return Recipe(
        base=base,
        weights={TRANSFORMER: models[0].file, **files_of(graph, models[0], starts, base, notes)},
        loras=tuple((TRANSFORMER, lora) for lora in models[0].loras),
        defaults=defaults | {name: value for name, value in others.items() if value is not None},
        scheduler={} if levels == DISTILLED_SIGMA_VALUES else {"sigmas": list(levels)},
        source=Source(
            encoder=empty,
            photo=photo_of(graph, photo.image, notes),
            last_photo=None if last is None else photo_of(graph, last.image, notes),
            has_last_photo=last is not None,
            prompt=prompt,
            negative_prompt=negative_prompt,
            size=size,
            frames=frames,
        ),
        seed=stages[0].seed,
    )


def _base(graph: Graph, model: ModelChain, notes: Notes) -> tuple[str, int]:
    """Return the hub id of the model that a file is of, by its name, and how strongly its photos are compressed."""
    name = model.file.lower().replace("\\", "/").rpartition("/")[2]
    for version, base, encoder in _VERSIONS:
        if re.search(rf"ltx[a-z]*[-_. ]?v?{version}", name):
            return base, IMAGE_CRF[encoder]
    if re.search(r"ltx[-_. ]?2|19b", name):
        raise InputError(
            f"{model.loader} loads {model.file}, which is LTX-2.0; svdq makes videos with LTX-2.3 and 2.5."
        )
    if not any(node.type.startswith("LTXVConcatAV") for node in graph.nodes.values()):
        raise InputError(
            f"{model.loader} loads {model.file}, which is LTX-Video by its nodes; svdq makes videos with LTX-2.3 and "
            "2.5."
        )
    notes.add(model.loader, f"loads {model.file}, which is taken for LTX-2.3 by its nodes; see `base`")
    return _VERSIONS[0][1], IMAGE_CRF[_VERSIONS[0][2]]


def _path(graph: Graph, stage: Stage) -> list[Node]:
    """Return the nodes that the latents of a stage come from, the last first, after the sampler before."""
    return [*takewhile(lambda node: node.type not in SAMPLERS, graph.chain(stage.latents, *LATENTS))]


def _has_second(
    graph: Graph, stages: list[Stage], models: list[ModelChain], paths: list[list[Node]], notes: Notes
) -> bool:
    """Return whether svdq makes a video in two stages; raises InputError for samplers that go on in another way."""
    if len(stages) == 1:
        return False
    first, second = stages[:2]
    if len(stages) > 2:
        raise InputError(f"{stages[2].node} is the third sampler of a video, and svdq has two stages for LTX-2.")
    upsampler = next((node for node in paths[1] if node.type in _UPSAMPLERS), None)
    if upsampler is None:
        raise InputError(f"{second.node} goes on with the latents of {first.node} without {_UPSAMPLERS[0]}.")
    name = _upsampler_file(graph, upsampler)
    if (models[0].file, max(first.cfg, 1)) != (models[1].file, max(second.cfg, 1)) or "temporal" in name:
        what = "goes on with another model or guidance, or more frames"
        notes.add(second.node, f"{what}; svdq makes the video of the first sampler, in one stage")
        return False
    if uses_of(models[0]) != uses_of(models[1]):
        notes.add(second.node, "has other LoRAs, or other strengths, than the first sampler; svdq takes the first's")
    levels = levels_of(graph, second, None, None, 2, notes)
    if levels != STAGE_2_DISTILLED_SIGMA_VALUES:
        ours, theirs = (", ".join(f"{each:g}" for each in these) for these in (STAGE_2_DISTILLED_SIGMA_VALUES, levels))
        notes.add(second.node, f"has the noise levels {theirs}; svdq's second stage has {ours}")
    if second.seed != first.seed:
        notes.add(second.node, f"has the seed {second.seed}; svdq draws the noise of both stages from the first seed")
    return True


def _upsampler_file(graph: Graph, upsampler: Node) -> str:
    loader = graph.origin(upsampler.inputs.get("upscale_model"))
    return str(quietly(graph, loader.inputs.get("model_name")) if loader is not None else "").lower()


def _factor(graph: Graph, paths: list[list[Node]]) -> float:
    """Return by how much latents are enlarged before the second stage, by the name of the upsampler's file."""
    name = next((_upsampler_file(graph, node) for node in paths[1] if node.type in _UPSAMPLERS), "")
    return 1 if "temporal" in name else 1.5 if "x1.5" in name else 2
