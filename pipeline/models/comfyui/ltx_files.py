"""Which files of a workflow of LTX-2 the components are, besides the transformer."""

import re
from collections.abc import Mapping
from typing import Any

from svdq.pipeline.models.comfyui.graph import Graph
from svdq.pipeline.models.comfyui.model_chain import UNREAD, ModelChain
from svdq.pipeline.models.comfyui.node import Link, Node
from svdq.pipeline.models.comfyui.notes import Notes
from svdq.pipeline.models.comfyui.source import FILES_OF_LOADERS, quietly
from svdq.pipeline.models.model_file import WEIGHTS_SUFFIXES

_WHOLE = ("connectors", "vae", "audio_vae", "vocoder")  # in a checkpoint, besides the transformer
#: Upsamplers of other stages than svdq's second one, and one file of several.
_OTHER_UPSAMPLER, _SHARD = re.compile(r"temporal|x1\.5"), re.compile(r"-of-\d+\.")


def files_of(graph: Graph, model: ModelChain, starts: Mapping[str, Any], base: str, notes: Notes) -> dict[str, str]:
    """Return the files by component, from the inputs that need `vae`, `audio_vae`, `text_encoder` and the upsampler."""
    found: dict[str, str] = {}
    if "ckpt_name" in model.loader.inputs:
        _take(found, model.loader, _WHOLE, model.file, base, notes)
    for kind, value in starts.items():
        loader = _loader(graph, value)
        if loader is None or loader is model.loader:
            continue
        notes.read(loader)
        for name in (*FILES_OF_LOADERS, "clip_name2", "ltxv_path"):
            file = quietly(graph, loader.inputs.get(name))
            if not isinstance(file, str):
                continue
            components: tuple[str, ...] = ("audio_vae", "vocoder") if kind == "audio_vae" else (kind,)
            if kind == "text_encoder":
                is_part = name in ("ckpt_name", "ltxv_path") or re.search(r"proj|connector", file.lower())
                components = ("text_encoder",) * ("gemma" in file.lower()) + ("connectors",) * bool(is_part)
            _take(found, loader, components or (kind,), file if components else "", base, notes)
    return found


def _loader(graph: Graph, value: Any) -> Node | None:
    node, seen = graph.origin(value), set[str]()
    while node is not None and node.id not in seen:
        seen.add(node.id)
        if any(isinstance(quietly(graph, node.inputs.get(name)), str) for name in FILES_OF_LOADERS):
            return node
        links = (node.inputs.get(name) for name in ("vae", "clip"))
        node = graph.origin(next((each for each in links if isinstance(each, Link)), None))
    return None


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
