"""Reads a workflow into what a model file and a submission say, with notes on what is left out."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, NoReturn

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.afterwards import INTERPOLATIONS, Afterwards, afterwards_of, rate_of
from svdq.pipeline.models.comfyui.graph import Graph, Link, Node, NodeTypes, Notes, Stage
from svdq.pipeline.models.comfyui.model_chain import LoraUse
from svdq.pipeline.models.comfyui.source import Source
from svdq.pipeline.models.comfyui.stages import last_samplers, samplers_of, stages_of
from svdq.pipeline.models.comfyui.values import UnknownValueError, quietly, without_switches
from svdq.pipeline.models.comfyui.workflow import read_graph
from svdq.pipeline.models.family import Family, imported

#: Nodes that need no word: svdq does what they do, or nobody sees what they do.
_QUIET = re.compile(
    r"VAEDecode|CLIPVision|VAELoader|CLIPLoader|Save|VHS_VideoCombine|CreateVideo|Preview|Primitive|.*Constant|Show"
    r"|.*Clean|Unload|LoadImage|.*Math|.*Note|ComfySwitchNode|GetImageSize|Display|PlaySound",
    re.IGNORECASE,
)
#: What svdq does in place of nodes after the decode, by a part of their names.
_AFTERWARDS = dict.fromkeys(
    INTERPOLATIONS, "interpolates frames; `svdq submit --interpolate` does so by motion estimation"
) | {
    "upscale": "enlarges the frames; `svdq submit --upscale` does",
    "audio": "concerns sound; svdq writes the sound that the model itself makes, if it makes any",
    "colormatch": "corrects colors; svdq does not",
}
_TEXT_ALONE = {"EmptyHunyuan": "makes a video from text alone"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A workflow in the terms of svdq; files are as ComfyUI names them."""

    base: str
    weights: Mapping[str, str] = field(default_factory=dict)  # by component
    loras: tuple[tuple[str, LoraUse], ...] = ()  # with their components
    defaults: dict[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    source: Source
    seed: int | None
    afterwards: Afterwards = field(default_factory=Afterwards)
    notes: tuple[str, ...] = ()
    urls: Mapping[str, str] = field(default_factory=dict)  # where files can be had, by name
    checkpoints: frozenset[str] = frozenset()  # files in ComfyUI's folder of checkpoints


def defaults_of(source: Source, **own: Any) -> dict[str, Any]:
    """Return defaults of a model file: a family's own, and size, frames and negative prompt where they are known."""
    width, height = source.size or (None, None)
    found = own | {"width": width, "height": height, "frames": source.frames, "negative_prompt": source.negative_prompt}
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class WorkflowReader:
    """What a family knows of workflows."""

    nodes: str  # pattern of the beginning of its nodes' types
    types: NodeTypes
    #: Reads the video that samplers make; raises InputError, with the node, where svdq cannot make it.
    read: Callable[[Graph, Sequence[Stage]], Recipe]
    quiet: str = "$"  # pattern of the beginning of types that need no word

    def owns(self, node: Node) -> bool:
        """Return whether a node is one of the family's."""
        return re.match(self.nodes, node.type) is not None


def read_recipe(workflow: dict[str, Any], families: Iterable[Family]) -> Recipe:
    """Read a workflow; raises InputError, with the node, where svdq cannot make such a video."""
    known = [family for family in families if family.workflow_reader]
    readers: list[WorkflowReader] = [imported(family.workflow_reader) for family in known]
    graph = read_graph(workflow, reduce(or_, (reader.types for reader in readers), NodeTypes()))
    try:
        return _read(without_switches(graph), readers, [family.parameters.title for family in known])
    except UnknownValueError as error:
        raise InputError(
            f"{error.args[0]} computes a value that svdq needs and cannot compute; set it to a constant in ComfyUI."
        ) from error


def _read(graph: Graph, readers: Sequence[WorkflowReader], titles: Sequence[str]) -> Recipe:
    nodes = [*graph.nodes.values()]
    if not nodes:
        raise InputError("The workflow has no node that runs: all are muted, bypassed or notes.")
    ends = last_samplers(graph)
    if not ends:
        _refuse_without_sampler(graph)
    if not any(reader.owns(node) for node in nodes for reader in readers):
        if other := next((node for node in nodes if node.type.startswith("Hunyuan")), None):
            listed = f"{', '.join(titles[:-1])} and {titles[-1]}"
            raise InputError(f"{other} belongs to HunyuanVideo, and svdq imports workflows of {listed}.")
        refuse_kinds(nodes, _TEXT_ALONE)
    end, reader, recipe = _first_video(graph, ends, readers)
    rate = rate_of(graph, end)
    fps = recipe.defaults.get("fps", rate)
    if rate not in (None, fps):
        what = f"makes a video of {fps} frames a second, to be played at {rate}"
        graph.note(recipe.source.encoder, f"{what}; svdq plays it as it is made")
    _note_the_rest(graph, end, reader)
    models = [each for node in nodes for each in node.models]
    checkpoints = (quietly(graph, node.inputs.get("ckpt_name")) for node in nodes)
    return replace(
        recipe,
        defaults=recipe.defaults | ({} if fps is None else {"fps": fps}),
        afterwards=afterwards_of(graph, end, fps),
        notes=tuple(graph.notes.sentences),
        urls={str(each["name"]): str(each["url"]) for each in models if each.get("name") and each.get("url")},
        checkpoints=recipe.checkpoints | {each for each in checkpoints if isinstance(each, str)},
    )


def _first_video(
    graph: Graph, ends: list[Node], readers: Sequence[WorkflowReader]
) -> tuple[Node, WorkflowReader, Recipe]:
    """Return the last sampler of the first video of a photo, the family that it is of, and what was read of it.

    Other samplers may make the photo before, or the next part after. Raises InputError if none makes such a video.
    """
    refused: list[InputError] = []
    for end in sorted(ends, key=lambda each: len(graph.before(each))):
        own = replace(graph, notes=Notes())
        try:
            stages = stages_of(own, end)
            before = graph.nearest((stages[0].positive, stages[0].latents))
            reader = next((each for node in before for each in readers if each.owns(node)), None)
            if reader is None:
                _refuse_without_encoder(graph, stages[0], _TEXT_ALONE)
            recipe = reader.read(own, stages)
        except InputError as error:
            refused.append(error)
        else:
            _note_other_videos(graph, [other for other in ends if other is not end], end)
            graph.notes.sentences += own.notes.sentences
            graph.notes.read_ids |= own.notes.read_ids
            return end, reader, recipe
    raise refused[0]


def find_encoder(graph: Graph, stage: Stage, types: Iterable[str], refused: Mapping[str, str]) -> Node:
    """Return the node of some types that encodes the photo; raises InputError if there is none before a sampler.

    `refused` has what svdq cannot make, by patterns of types.
    """
    before = graph.nearest((stage.positive, stage.latents))
    encoder = next((node for node in before if node.type in types), None)
    if encoder is None:
        _refuse_without_encoder(graph, stage, refused)
    return encoder


def refuse_kinds(nodes: Iterable[Node], refused: Mapping[str, str]) -> None:
    """Raise InputError for the first node of a kind of video that svdq cannot make, by patterns of types."""
    for node in nodes:
        if what := next((what for part, what in refused.items() if re.search(part, node.type, re.IGNORECASE)), None):
            raise InputError(f"{node} {what}, which svdq cannot; it makes videos of one photo, or of two.")


def _refuse_without_encoder(graph: Graph, stage: Stage, refused: Mapping[str, str]) -> NoReturn:
    before = [*graph.nearest((stage.positive, stage.latents))]
    refuse_kinds(before, refused)
    raise InputError(
        f"The workflow has no node that svdq can make a video of a photo with ({_listed(before or [stage.node], 4)}); "
        f"use one of {', '.join(graph.types.encoders)}."
    )


def _refuse_without_sampler(graph: Graph) -> NoReturn:
    nodes = [*graph.nodes.values()]
    named = [node for node in nodes if "sampler" in node.type.lower() and "select" not in node.type.lower()]
    named += [node for node in nodes if node.type.startswith(("workflow/", "workflow>"))]  # group nodes, as of old
    named = named or [node for node in nodes if "Api" in node.type] or nodes
    raise InputError(
        f"The workflow has no sampler that svdq reads ({_listed(named, 3)}); use one of "
        f"{', '.join(samplers_of(graph))}."
    )


def _listed(nodes: Sequence[Node], most: int) -> str:
    return ", ".join(map(str, nodes[:most]))


def _note_other_videos(graph: Graph, others: Sequence[Node], end: Node) -> None:
    for other in others:
        if other.id in graph.before(end):
            graph.note(other, "makes what the video starts from; svdq takes a photo")
        else:
            graph.note(other, "makes another video, or the next part; svdq imports the first, see `svdq submit --then`")
        graph.read(*(graph.nodes[each] for each in graph.before(other)))


def _note_the_rest(graph: Graph, end: Node, reader: WorkflowReader) -> None:
    """Note all nodes that have a part in what is saved, and were not read."""
    consumers = {
        origin.id for node in graph.nodes.values() for v in node.inputs.values() if (origin := graph.origin(v))
    }
    savers = [node for node in graph.nodes.values() if node.id not in consumers and end.id in graph.before(node)]
    needed = set().union(*(graph.before(node) for node in savers))
    for node in graph.nodes.values():
        is_constant = not any(map(graph.origin, node.inputs.values())) and "load" not in node.type.lower()
        is_constant = is_constant or quietly(graph, Link(node=node.id, slot=0)) is not None
        is_quiet = is_constant or _QUIET.match(node.type) or re.match(reader.quiet, node.type)
        if node.id in needed and node.id not in graph.notes.read_ids and not is_quiet:
            kind = node.type.lower()
            what = next((what for part, what in _AFTERWARDS.items() if part in kind), "is left out")
            graph.note(node, what)
