"""Reads a workflow of LTX-2: one stage, or two with a latent upsampler between them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Graph
from svdq.pipeline.models.comfyui.ltx_files import files_of
from svdq.pipeline.models.comfyui.ltx_photos import PHOTO_NODES, frames_of, photos_in, size_of
from svdq.pipeline.models.comfyui.ltx_sampling import guidance_of, levels_of, note_sampler
from svdq.pipeline.models.comfyui.model_chain import ModelChain, model_chain, uses_of
from svdq.pipeline.models.comfyui.node import Node
from svdq.pipeline.models.comfyui.notes import Notes
from svdq.pipeline.models.comfyui.source import Source, photo_of, prompt_of, quietly
from svdq.pipeline.models.comfyui.stages import LATENTS, SAMPLERS, Stage, last_samplers, stages_of
from svdq.pipeline.models.ltx.layout import DISTILLED_SIGMA_VALUES, IMAGE_CRF, STAGE_2_DISTILLED_SIGMA_VALUES

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
    "looping": "makes a video from another one",
    "extend": "makes a video from another one",
    "loadvideo": "makes a video from another one",
    "vaeencode": "makes a video from latents of pictures",
}


@dataclass(frozen=True, kw_only=True)
class LtxVideo:
    """What is read of a workflow of LTX-2."""

    base: str
    model: ModelChain
    files: Mapping[str, str]  # by component, besides the transformer
    defaults: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    source: Source
    seed: int | None
    end: Node


def is_ltx(graph: Graph) -> bool:
    """Return whether a workflow has nodes of LTX."""
    return any(node.type.startswith(("LTX", "EmptyLTX")) for node in graph.nodes.values())


def read_ltx(graph: Graph, notes: Notes) -> LtxVideo:
    """Read the first video of a workflow; raises InputError, with the node, where svdq cannot make it."""
    ends = sorted(last_samplers(graph), key=lambda node: len(graph.before(node)))
    found: list[tuple[LtxVideo, Notes]] = []
    refused: list[InputError] = []
    for end in ends:
        own = Notes()
        try:
            found.append((_read(graph, end, own), own))
            break
        except InputError as error:
            refused.append(error)
    if not found:
        raise refused[0]
    video, own = found[0]
    notes.read_ids |= own.read_ids
    notes.sentences += own.sentences
    for other in ends:
        if other is not video.end:
            notes.add(other, "makes another video, or the next part; svdq imports one")
            notes.read(*(graph.nodes[each] for each in graph.before(other)))
    return video


def _read(graph: Graph, end: Node, notes: Notes) -> LtxVideo:
    stages = stages_of(graph, end, notes)
    models = [model_chain(graph, stage.model, stage.node, notes) for stage in stages]
    needed = graph.before(end)
    before = [node for node in graph.nodes.values() if node.id in needed]
    base, crf = _base(graph, models[0], notes)
    for node in before:
        if what := next((what for part, what in _REFUSED.items() if part in node.type.lower()), None):
            raise InputError(f"{node} {what}, which svdq cannot; it makes videos of one photo, or of two.")
    if lora := next((each for each in models[0].loras if re.search(r"ic[-_]?lora", each.file.lower())), None):
        raise InputError(f"{lora.node} adds {lora.file}, an in-context LoRA, which svdq cannot; leave it out.")
    paths = [list(_path(graph, stage)) for stage in stages]
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
    size = size_of(graph, empty, _factor(graph, paths) if len(stages) > 1 else 1, notes)
    frames = frames_of(graph, empty, notes)
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
    return LtxVideo(
        base=base,
        model=models[0],
        files=files_of(graph, models[0], starts, base, notes),
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
            vae=None,
            text_encoder=None,
            image_encoder=None,
        ),
        seed=stages[0].seed,
        end=end,
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


def _path(graph: Graph, stage: Stage) -> Iterator[Node]:
    """Yield the nodes that the latents of a stage come from, the last first, after the sampler before."""
    node, seen = graph.origin(stage.latents), set()
    while node is not None and node.type not in SAMPLERS and node.id not in seen:
        seen.add(node.id)
        yield node
        node = graph.origin(next((node.inputs[name] for name in LATENTS if name in node.inputs), None))


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
