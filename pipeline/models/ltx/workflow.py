"""What svdq knows of ComfyUI's nodes for LTX-2: videos of one stage, or of two with a latent upsampler between."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Encoder, Graph, Node, NodeTypes, Stage
from svdq.pipeline.models.comfyui.model_chain import UNREAD, ModelChain, model_chain, uses_of, value_of_file
from svdq.pipeline.models.comfyui.recipe import Recipe, WorkflowReader, defaults_of, refuse_kinds
from svdq.pipeline.models.comfyui.source import Source, files_named, frames_of, photo_of, prompt_of
from svdq.pipeline.models.comfyui.values import quietly
from svdq.pipeline.models.comfyui.widgets import SIZE
from svdq.pipeline.models.ltx.family import FRAME_STEP
from svdq.pipeline.models.ltx.layout import (
    DISTILLED_SIGMA_VALUES,
    IMAGE_CRF,
    STAGE_2_DISTILLED_SIGMA_VALUES,
    TRANSFORMER,
    UPSAMPLER,
)
from svdq.pipeline.models.ltx.workflow_photos import PHOTO_NODES, Photo, photos_in, upsampled_size
from svdq.pipeline.models.ltx.workflow_sampling import guidance_of, levels_of, num_tokens, read_schedule, sampler_of
from svdq.pipeline.models.model_file import WEIGHTS_SUFFIXES

_WIDGETS = {
    "EmptyLTXVLatentVideo": SIZE,
    "GuiderParameters": "modality cfg stg perturb_attn rescale modality_scale skip_step cross_attn",
    "LTXAVTextEncoderLoader": "text_encoder ckpt_name device",
    "LTXVAddGuide": "frame_idx strength",
    "LTXVAudioVAELoader": "ckpt_name",
    "LTXVConditioning": "frame_rate",
    "LTXVDualCFGGuider": "video_cfg audio_cfg",
    "LTXVEmptyLatentAudio": "frames_number frame_rate batch_size",
    "LTXVGemmaCLIPModelLoader": "gemma_path ltxv_path max_length",
    "LTXVImgToVideo": f"{SIZE} strength",
    "LTXVImgToVideoConditionOnly": "strength bypass",
    "LTXVImgToVideoInplace": "strength bypass",
    "LTXVPreprocess": "img_compression",
    "LTXVScheduler": "steps max_shift base_shift stretch terminal",
    "MultimodalGuider": "skip_blocks",
    "STGGuider": "cfg stg rescale",
}
#: Nodes that begin a video, with its size.
_STARTS = {"EmptyLTXVLatentVideo": Encoder(photo=""), "LTXVImgToVideo": Encoder(photo="image")}
_UPSAMPLERS = ("LTXVLatentUpsampler", "LTXVLatentUpsamplerTiled")
_PASSING = ("LTXVConcatAVLatent", "LTXVSeparateAVLatent", "LTXVCropGuides")
#: What svdq cannot, by a part of the name of a node before the last sampler.
_REFUSED = {
    "iclora": "makes a video with an in-context LoRA",
    "audiovaeencode|vaeencodeaudio|referenceaudio": "makes a video from sound",
    "director": "makes a video along a timeline",
    "looping|extend|loadvideo": "makes a video from another one",
    "vaeencode": "makes a video from latents of pictures",
}
_USUAL_LEVELS = (DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES)
_TO_LOADERS = ("positive", "conditioning", "clip", "vae")  # inputs on the way to a loader
_OF_GEMMA = ("gemma_path", "ltxv_path")  # inputs of LTXVGemmaCLIPModelLoader
_WHOLE = ("connectors", "vae", "audio_vae", "vocoder")  # in a checkpoint, besides the transformer
#: Upsamplers of other stages than svdq's second one, and one file of several.
_OTHER_UPSAMPLER, _SHARD = re.compile(r"temporal|x1\.5"), re.compile(r"-of-\d+\.")


class _Version(NamedTuple):
    name: str  # pattern of a part of a file's name
    base: str
    image_crf: int  # how strongly photos are compressed


_VERSIONS = (
    _Version(r"2[._]?3", "diffusers/LTX-2.3-Distilled-Diffusers", IMAGE_CRF["Gemma3ForConditionalGeneration"]),
    _Version(r"2[._]?5", "Lightricks/LTX-2.5-Diffusers", IMAGE_CRF["Gemma4UnifiedForConditionalGeneration"]),
)


def read(graph: Graph, stages: Sequence[Stage]) -> Recipe:
    """Read a video of LTX-2."""
    first = stages[0]
    models = [model_chain(graph, stage.model, stage.node) for stage in stages]
    version = _version(graph, models[0])
    _refuse(graph, stages[-1].node, models[0])
    start = _start_of(first)
    _note_paths(graph, stages)
    used = stages[: 1 + _has_second(graph, stages, models)]
    photos = photos_in(graph, [stage.path for stage in stages], version.image_crf)
    size = upsampled_size(graph, start, _STARTS[start.type], _factor(graph, stages))
    frames = frames_of(graph, start, _STARTS[start.type], FRAME_STEP)
    levels = [levels_of(graph, stage, num_tokens(size, frames, len(used) - at)) for at, stage in enumerate(used)]
    scheduler: dict[str, Any] = {}
    if (sampler := sampler_of(graph, used)) is not None:
        scheduler["class"] = sampler
    for name, found, usual in zip(("sigmas", "stage_2_sigmas"), levels, _USUAL_LEVELS, strict=False):
        scheduler |= {} if found == usual else {name: list(found)}
    guidance = guidance_of(graph, first)
    weights = _weights(graph, stages, models[0], version.base)
    source = _source(graph, first, start, photos, size, frames)
    checkpoints = (value_of_file(graph, node.inputs.get("ltxv_path")) for node in graph.nodes.values())
    return Recipe(
        base=version.base,
        weights=weights,
        loras=tuple((TRANSFORMER, lora) for lora in models[0].loras),
        defaults=defaults_of(source, stages=len(used), **guidance),
        scheduler=scheduler,
        source=source,
        seed=first.seed,
        checkpoints=frozenset(filter(None, checkpoints)),
    )


def _source(
    graph: Graph,
    stage: Stage,
    start: Node,
    photos: tuple[Photo, Photo | None],
    size: tuple[int, int] | None,
    frames: int | None,
) -> Source:
    first, last = photos
    return Source(
        encoder=start,
        photo=photo_of(graph, first.image),
        last_photo=None if last is None else photo_of(graph, last.image),
        has_last_photo=last is not None,
        prompt=prompt_of(graph, stage.positive, "positive", "LTXV")[0],
        negative_prompt=prompt_of(graph, stage.negative, "negative", "LTXV")[0],
        size=size,
        frames=frames,
    )


def _version(graph: Graph, model: ModelChain) -> _Version:
    """Return the version that a model is of, by its file's name, else by nodes."""
    name = model.file.lower().replace("\\", "/").rpartition("/")[2]
    for version in _VERSIONS:
        if re.search(rf"ltx[a-z]*[-_. ]?v?{version.name}", name):
            return version
    if re.search(r"ltx[-_. ]?2|19b", name):
        raise InputError(
            f"{model.loader} loads {model.file}, which is LTX-2.0; svdq makes videos with LTX-2.3 and 2.5."
        )
    if not any(node.type.startswith("LTXVConcatAV") for node in graph.nodes.values()):
        raise InputError(
            f"{model.loader} loads {model.file}, which is LTX-Video by its nodes; svdq makes videos with LTX-2.3 and "
            "2.5."
        )
    graph.note(model.loader, f"loads {model.file}, which is taken for LTX-2.3 by its nodes; see `base`")
    return _VERSIONS[0]


def _refuse(graph: Graph, last: Node, model: ModelChain) -> None:
    """Raise InputError for nodes before the last sampler, and LoRAs, of videos that svdq cannot make."""
    needed = graph.before(last)
    refuse_kinds((node for node in graph.nodes.values() if node.id in needed), _REFUSED)
    if lora := next((each for each in model.loras if re.search(r"ic[-_]?lora", each.file.lower())), None):
        raise InputError(f"{lora.node} adds {lora.file}, an in-context LoRA, which svdq cannot; leave it out.")


def _start_of(stage: Stage) -> Node:
    start = stage.path[-1] if stage.path else stage.node
    if start.type not in _STARTS:
        raise InputError(f"{start} has no latents that svdq can start from; it reads {' and '.join(_STARTS)}.")
    return start


def _note_paths(graph: Graph, stages: Sequence[Stage]) -> None:
    for node in (node for stage in stages for node in stage.path):
        if node.type in (*_STARTS, *PHOTO_NODES, *_UPSAMPLERS):
            graph.read(node)
        elif node.type not in _PASSING:
            graph.note(node, "changes the latents; svdq passes them on unchanged")


def _has_second(graph: Graph, stages: Sequence[Stage], models: Sequence[ModelChain]) -> bool:
    """Return whether svdq makes a video in two stages; raises InputError for samplers that go on in another way."""
    if len(stages) == 1:
        return False
    first, second = stages[:2]
    if len(stages) > 2:
        raise InputError(f"{stages[2].node} is the third sampler of a video, and svdq has two stages for LTX-2.")
    if (name := _upsampler_file(graph, second)) is None:
        raise InputError(f"{second.node} goes on with the latents of {first.node} without {_UPSAMPLERS[0]}.")
    if (models[0].file, max(first.cfg, 1)) != (models[1].file, max(second.cfg, 1)) or "temporal" in name:
        what = "goes on with another model or guidance, or more frames"
        graph.note(second.node, f"{what}; svdq makes the video of the first sampler, in one stage")
        return False
    if uses_of(models[0]) != uses_of(models[1]):
        graph.note(second.node, "has other LoRAs, or other strengths, than the first sampler; svdq takes the first's")
    if second.seed != first.seed:
        graph.note(second.node, f"has the seed {second.seed}; svdq draws the noise of both stages from the first seed")
    return True


def _upsampler_file(graph: Graph, stage: Stage) -> str | None:
    """Return the name of the file by which the latents of a stage are enlarged before; None if they are not."""
    node = next((node for node in stage.path if node.type in _UPSAMPLERS), None)
    loader = None if node is None else graph.origin(node.inputs.get("upscale_model"))
    named = "" if loader is None else str(quietly(graph, loader.inputs.get("model_name"))).lower()
    return None if node is None else named


def _factor(graph: Graph, stages: Sequence[Stage]) -> float:
    """Return by how much latents are enlarged before the second stage, by the name of the upsampler's file."""
    name = _upsampler_file(graph, stages[1]) if len(stages) > 1 else None
    return 1 if name is None or "temporal" in name else 1.5 if "x1.5" in name else 2


def _weights(graph: Graph, stages: Sequence[Stage], model: ModelChain, base: str) -> dict[str, str]:
    """Return the files by component; those that svdq does not read are noted, and left to the base."""
    path = [node for stage in stages for node in stage.path]
    before = graph.before(stages[-1].node)

    def first(name: str, nodes: Iterable[Node]) -> Any:
        return next((node.inputs[name] for node in nodes if name in node.inputs), None)

    starts = {
        "vae": first("vae", path),
        "audio_vae": first("audio_vae", (node for node in graph.nodes.values() if node.id in before)),
        "text_encoder": stages[0].positive,
        UPSAMPLER: first("upscale_model", (node for node in path if node.type in _UPSAMPLERS)),
    }
    found: dict[str, str] = {TRANSFORMER: model.file}
    if "ckpt_name" in model.loader.inputs:
        _take(graph, found, model.loader, _WHOLE, model.file, base)
    for kind, value in starts.items():
        files = ((node, files_named(graph, node, *_OF_GEMMA)) for node in graph.chain(value, *_TO_LOADERS))
        loader, named = next((each for each in files if each[1]), (model.loader, {}))
        if loader is not model.loader:
            graph.read(loader)
            for name, file in named.items():
                components = _components_of(kind, name, file)
                _take(graph, found, loader, components or (kind,), file if components else "", base)
    return found


def _components_of(kind: str, name: str, file: str) -> tuple[str, ...]:
    """Return the components in a file that a loader of a kind names; none if svdq reads nothing of it."""
    if kind == "audio_vae":
        return ("audio_vae", "vocoder")
    if kind != "text_encoder":
        return (kind,)
    has_connectors = name in ("ckpt_name", "ltxv_path") or re.search(r"proj|connector", file.lower())
    return ("text_encoder",) * ("gemma" in file.lower()) + ("connectors",) * bool(has_connectors)


def _take(graph: Graph, found: dict[str, str], loader: Node, components: tuple[str, ...], file: str, base: str) -> None:
    lowered = file.lower()
    is_unread = not lowered.endswith(WEIGHTS_SUFFIXES) or bool(UNREAD.search(lowered) or _SHARD.search(lowered))
    is_unread |= bool(components == (UPSAMPLER,) and _OTHER_UPSAMPLER.search(lowered))
    # The other VAE of LTX-2.5 decodes by diffusion.
    if is_unread or (components == ("vae",) and "2.5" in base and "conv" not in lowered and "vae" in lowered):
        graph.note(loader, f"loads {file or 'another file'}; svdq takes the {', '.join(components)} of the base")
        for each in components:
            found.pop(each, None)
    else:
        found |= dict.fromkeys(components, file)


READER = WorkflowReader(
    nodes="LTX|EmptyLTX",
    types=NodeTypes(
        widgets=_WIDGETS,
        schedules={"LTXVScheduler": read_schedule},
        guiders=frozenset({"LTXVDualCFGGuider", "MultimodalGuider", "STGGuider"}),
        encoders=_STARTS,
    ),
    quiet=f"{'|'.join(_PASSING)}|LTXV(Conditioning|EmptyLatentAudio|(Audio|Tiled)VAEDecode)|LTXFloatToInt",
    read=read,
)
