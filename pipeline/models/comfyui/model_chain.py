"""The nodes from a loader to a sampler: which file a model is of, its LoRAs, its shift, and what else changes it."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import MAX_NAME, Graph, Link, Node
from svdq.pipeline.models.comfyui.values import number_of, quietly
from svdq.pipeline.models.model_file import WEIGHTS_SUFFIXES

GUIDANCE = "VideoLinearCFGGuidance"  # changes the guidance from the first frame to the last, as svdq does
_FILES = ("unet_name", "ckpt_name", "gguf_name", "model_name", "model")  # inputs of loaders
_MODELS = ("model", "MODEL", "model1", "input")  # inputs that are models
#: Inputs that name a LoRA: alone, or one of several (rgthree, Kijai's wrapper, Comfyroll and Efficiency nodes).
_LORA_INPUT = re.compile(r"lora(?:_name)?(_\d+)?")
_STRENGTHS = ("strength_model", "strength", "model_weight", "lora_wt", "model_str")
#: Nodes that change how fast or with how much memory a model runs, by a part of their names.
_SPEED = (
    "sage",
    "compile",
    "blockswap",
    "block_swap",
    "vram",
    "torchsettings",
    "fp16accumulation",
    "offload",
    "multigpu",
)
_SPEED_ONLY = "concerns speed or memory only; see `svdq worker --attention`, `--compile` and `--offload`"
UNREAD = re.compile(r"mxfp4|w4a8|w4a16|awq|svdq")  # formats of weights, in names of files
#: Nodes that leave work out, by a part of their names.
_CACHES = ("teacache", "easycache", "magcache", "lazycache", "firstblockcache")


@dataclass(frozen=True, kw_only=True)
class LoraUse:
    """A LoRA as a node names it."""

    node: Node
    file: str
    strength: float


@dataclass(frozen=True, kw_only=True)
class ModelChain:
    """What reaches a sampler as its model."""

    loader: Node
    file: str
    loras: tuple[LoraUse, ...] = ()  # in the order in which they are added
    shift: float | None = None  # of the last node that sets one


def uses_of(model: ModelChain) -> list[tuple[str, float]]:
    """Return the files and strengths of the LoRAs of a model."""
    return [(lora.file, lora.strength) for lora in model.loras]


def model_chain(graph: Graph, model: Any, sampler: Node) -> ModelChain:
    """Follow a sampler's model to its loader; raises InputError if there is none."""
    loras: list[LoraUse] = []
    shift: float | None = None
    seen: set[str] = set()
    node, last = graph.origin(model), sampler
    while node is not None and node.id not in seen:
        seen.add(node.id)
        last = node
        graph.read(node)
        if (file := _file_of(graph, node)) is not None:
            _note_loading(graph, node, file)
            chain = ModelChain(loader=node, file=file, shift=shift)
            return replace(chain, loras=(*_stack_of(graph, node.inputs.get("lora")), *reversed(loras)))
        stack = node.inputs.get("lora", node.inputs.get("lora_stack"))
        found = [*lora_entries(graph, node), *_stack_of(graph, stack)]
        loras += reversed(found)
        if node.type == "ModelSamplingSD3":
            shift = number_of(graph, node, "shift") if shift is None else shift
        elif not found and node.type != GUIDANCE:
            _note_change(graph, node)
        node = graph.origin(_model_before(node))
    raise InputError(
        f"The sampler {sampler} has no model that a loader loads: the way there ends at {last}; connect a loader."
    )


def _note_loading(graph: Graph, node: Node, file: str) -> None:
    """Note what a loader does besides loading: other parts of a model, and weights that it rounds."""
    for name, value in node.inputs.items():
        part = graph.origin(value)
        if part is None or name == "lora" or name in _FILES:
            continue
        if any(each in f"{name}{part.type}".lower().replace(" ", "") for each in _SPEED):
            graph.note(part, _SPEED_ONLY)
        else:
            graph.note(part, f"is the {name} of {node}, which svdq has not; svdq renders without")
    if unread := UNREAD.search(file.lower()):
        graph.note(
            node,
            f"loads {file}; svdq does not read weights in {unread[0]}: name the model's file in bf16, fp8, int8 or "
            "GGUF in `[weights]`",
        )
    rounded = node.text("weight_dtype", "quantization") or ""
    if rounded.startswith("fp8") and "fp8" not in file.lower():
        graph.note(node, f"rounds weights to {rounded}; svdq takes them as the file has them")


def _file_of(graph: Graph, node: Node) -> str | None:
    for name in _FILES:
        if name == "model" and isinstance(node.inputs.get(name), Link):
            continue
        if name in node.inputs and isinstance(found := value_of_file(graph, node.inputs[name]), str):
            return found
    return None


def value_of_file(graph: Graph, value: Any) -> str | None:
    """Return the file that an input names, also by a list of names as a node; None for anything else."""
    found = quietly(graph, value)  # None: a model, not the name of one
    if not isinstance(found, str) or len(found) > MAX_NAME:
        return None
    return found if found.lower().endswith((*WEIGHTS_SUFFIXES, ".pt", ".pth", ".ckpt")) else None


def _model_before(node: Node) -> Any:
    links = {name: each for name, each in node.inputs.items() if isinstance(each, Link)}
    return next((links[name] for name in _MODELS if name in links), next(iter(links.values()), None))


def _note_change(graph: Graph, node: Node) -> None:
    kind = node.type.lower().replace(" ", "")
    if "lora" in kind or "passthrough" in kind:
        return  # a stack that is off, or a node that passes models on
    if any(part in kind for part in _CACHES):
        graph.note(node, "leaves steps out to be faster; svdq computes all of them")
    elif any(part in kind for part in _SPEED):
        graph.note(node, _SPEED_ONLY)
    else:
        graph.note(node, "changes the model; svdq runs it unchanged")


def _stack_of(graph: Graph, value: Any) -> Iterator[LoraUse]:
    """Yield the LoRAs of a chain of nodes, the first before."""
    for node in reversed([*graph.chain(value, "prev_lora", "lora_stack")]):
        graph.read(node)
        yield from lora_entries(graph, node)


def lora_entries(graph: Graph, node: Node) -> Iterator[LoraUse]:
    """Yield the LoRAs that a node names itself: one, numbered ones, or rgthree's entries; none that is off."""
    for name, value in node.inputs.items():
        if isinstance(value, dict) and "lora" in value:  # Power Lora Loader (rgthree)
            file, strength = value["lora"], _strength(value) if value.get("on", True) else 0.0
        elif isinstance(value, dict | list) and name == "loras":  # Lora Loader (LoraManager)
            yield from _of_manager(node, value)
            continue
        elif (found := _LORA_INPUT.fullmatch(name)) is not None:
            number = found[1] or ""
            if number and str(node.inputs.get(f"switch{number}", "on")).lower() == "off":
                continue
            file = value_of_file(graph, value)
            given = (number_of(graph, node, f"{each}{number}") for each in _STRENGTHS)
            strength = next((each for each in given if each is not None), 1.0)
        else:
            continue
        if isinstance(file, str) and file.lower() != "none" and strength:
            if node.inputs.get("blocks") is not None:
                graph.note(node, "applies a LoRA to some blocks only; svdq applies it to all")
            yield LoraUse(node=node, file=file, strength=float(strength))


def _strength(entry: Mapping[str, Any]) -> float:
    """Return the strength of an entry of a stack, 1 if it has none; NaN, which no model file takes, if it is none."""
    found = entry.get("strength")
    try:
        return 1.0 if found is None else float(found)
    except (OverflowError, TypeError, ValueError):
        return math.nan


def _of_manager(node: Node, value: Any) -> Iterator[LoraUse]:
    entries = value.get("__value__", ()) if isinstance(value, Mapping) else value
    for each in entries if isinstance(entries, list) else ():
        if isinstance(each, dict) and each.get("active", True) and each.get("name") and (strength := _strength(each)):
            yield LoraUse(node=node, file=f"{each['name']}.safetensors", strength=strength)
