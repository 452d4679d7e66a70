"""The photos of a workflow of LTX-2, and the size of its video."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import Encoder, Graph, Node, Notes
from svdq.pipeline.models.comfyui.source import photo_of, size_of
from svdq.pipeline.models.comfyui.values import quiet_number, quietly
from svdq.pipeline.models.ltx.family import LATENT_SIDE, SIZE_MULTIPLE

#: Nodes that put photos into latents.
PHOTO_NODES = (
    "LTXVImgToVideoInplace",
    "LTXVImgToVideoConditionOnly",
    "LTXVImgToVideoInplaceKJ",
    "LTXVAddGuide",
    "LTXVAddGuideMulti",
    "LTXVImgToVideo",
)
_IMAGE = re.compile(r"(.*\.)?image(_\d+)?")  # an input of these; `index_1` is of the same photo as `image_1`


@dataclass(frozen=True, kw_only=True)
class Photo:
    """A photo where a node puts it: at the first frame, or at another one by its number."""

    node: Node
    image: Any  # the input
    index: int
    strength: float
    is_off: bool


def photos_in(graph: Graph, paths: Sequence[Sequence[Node]], crf: int) -> tuple[Photo, Photo | None]:
    """Return the photos of the first and last frame; raises InputError if there is none of the first."""
    found = [photo for path in paths for node in path for photo in _photos_of(graph, node)]
    for node in graph.of_types("LTXVPreprocess"):
        if any(node.id in graph.before(photo.node) for photo in found):
            graph.read(node)
            theirs = quietly(graph, node.inputs.get("img_compression"))
            if theirs not in (None, crf):
                graph.note(node, f"compresses the photo by {theirs}; svdq does by {crf}, as diffusers")
    for photo in found:
        if photo.strength != 1 and not photo.is_off:
            graph.note(photo.node, f"holds to the photo with the strength {photo.strength:g}; svdq does with 1")
        if photo.index > 0 or photo.index < -1:
            graph.note(
                photo.node, f"has a photo for frame {photo.index}; svdq takes photos of the first and last frame"
            )
    first = [photo for photo in found if photo.index == 0]
    given, quiet = [photo for photo in first if not photo.is_off], replace(graph, notes=Notes())
    if not given and (first := [photo for photo in first if photo_of(quiet, photo.image) is not None]):
        graph.note(first[0].node, "is off, so the video is of text alone; svdq makes it of the photo")
    if not (given or first):
        node = found[0].node if found else paths[0][-1]
        raise InputError(
            f"{node} has no photo of the first frame, so the video is of text alone; "
            "svdq makes videos of one photo, or of two."
        )
    return (given or first)[-1], next((photo for photo in found if photo.index == -1 and not photo.is_off), None)


def _photos_of(graph: Graph, node: Node) -> Iterator[Photo]:
    if node.type not in PHOTO_NODES:
        return
    for name, image in node.inputs.items():
        if graph.origin(image) is None or (matched := _IMAGE.fullmatch(name)) is None:
            continue
        at, index, strength = (
            quiet_number(graph, node, f"{matched[1] or ''}{key}{matched[2] or ''}")
            for key in ("frame_idx", "index", "strength")
        )
        is_off = quietly(graph, node.inputs.get("bypass")) is True
        yield Photo(
            node=node,
            image=image,
            index=int(at or index or 0),
            strength=1.0 if strength is None else strength,
            is_off=is_off or strength == 0,
        )


def upsampled_size(graph: Graph, start: Node, names: Encoder, factor: float) -> tuple[int, int] | None:
    """Return width and height of the video, `factor` times its first latents; None: as the photo's."""
    latents = size_of(graph, start, names, LATENT_SIDE)
    if latents is None:
        return None
    theirs = [int(side * factor) for side in latents]
    width, height = (max(SIZE_MULTIPLE, side // SIZE_MULTIPLE * SIZE_MULTIPLE) for side in theirs)
    if [width, height] != theirs:
        graph.note(start, f"leads to {theirs[0]}x{theirs[1]}; sizes here are multiples of {SIZE_MULTIPLE}")
    return width, height
