"""What a workflow makes a video of: photos, prompts, size and frames, by the node that encodes the photo."""

import re
from dataclasses import dataclass
from typing import Any

from svdq.pipeline.models.comfyui.graph import MAX_NAME, Encoder, Graph, Link, Node
from svdq.pipeline.models.comfyui.values import UnknownValueError, number_of, quiet_number, quietly, value_of, whole_of

#: Inputs of loaders of text encoders, VAEs and upsamplers that name files.
_FILES = ("vae_name", "clip_name", "model_name", "clip_name1", "text_encoder", "ckpt_name", "clip_name2")
_CHOICE = re.compile(r"(?<!\\)\{[^{}]*\|[^{}]*\}")  # {red|blue}
_TEXTS = ("text", "prompt", "positive_prompt", "string", "value")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The inputs of one video."""

    encoder: Node
    photo: str | None
    last_photo: str | None
    has_last_photo: bool
    prompt: str | None
    negative_prompt: str | None
    size: tuple[int, int] | None  # None: as the photo
    frames: int | None
    vae: str | None = None
    text_encoder: str | None = None
    image_encoder: str | None = None


def source_of(graph: Graph, encoder: Node, positive: Any, negative: Any, *, multiple: int, frame_step: int) -> Source:
    """Read what the node that encodes the photo, and the prompts, depend on.

    Sides are multiples of `multiple` pixels, and numbers of frames one more than a multiple of `frame_step`.
    """
    graph.read(encoder)
    names = graph.types.encoders[encoder.type]
    known = {names.width, names.height, names.frames, names.photo, names.last_photo, "vae", "positive", "negative"}
    for name, value in encoder.inputs.items():
        if (origin := graph.origin(value)) is not None and name not in known and "clip" not in name:
            graph.note(origin, f"is the {name} of {encoder}, which svdq has not; svdq renders without")
    size = size_of(graph, encoder, names, multiple)
    frames = frames_of(graph, encoder, names, frame_step)
    for name, neutral in names.neutral.items():
        if (strength := quiet_number(graph, encoder, name)) not in (None, neutral):
            graph.note(encoder, f"has the {name} {strength:g}, which svdq has not; svdq takes the photo as it is")
    batch = quiet_number(graph, encoder, "batch_size") or 1
    if batch > 1:
        graph.note(encoder, f"makes {batch:g} videos; give `--variations {batch:g}`")
    photo = photo_of(graph, encoder.inputs.get(names.photo))
    if graph.origin(encoder.inputs.get(names.photo)) is None:
        graph.note(encoder, "has no photo, so it makes a video from text alone; svdq needs a photo")
    last = encoder.inputs.get(names.last_photo)
    has_last = graph.origin(last) is not None
    prompt, clip = prompt_of(graph, positive, "positive")
    negative_prompt, _ = prompt_of(graph, negative, "negative")
    return Source(
        encoder=encoder,
        photo=photo,
        last_photo=photo_of(graph, last) if has_last else None,
        has_last_photo=has_last,
        prompt=prompt,
        negative_prompt=negative_prompt,
        size=size,
        frames=frames,
        vae=_loaded(graph, encoder.inputs.get("vae")),
        text_encoder=_loaded(graph, clip),
        image_encoder=_image_encoder(graph, encoder),
    )


def size_of(graph: Graph, node: Node, names: Encoder, multiple: int) -> tuple[int, int] | None:
    """Return width and height, as latents with sides of `multiple` pixels have them; None: as the photo's."""
    try:
        width, height = (whole_of(graph, node, name) for name in (names.width, names.height))
    except UnknownValueError as error:
        graph.note(error.args[0], "computes the size from the photo; `--size auto` does so here")
        return None
    return (width // multiple * multiple, height // multiple * multiple) if width and height else None


def frames_of(graph: Graph, node: Node, names: Encoder, step: int) -> int | None:
    """Return the number of frames, as latents of `step` frames have them; None if that is left open."""
    try:
        length = number_of(graph, node, names.frames)
    except UnknownValueError as error:
        graph.note(error.args[0], "computes the number of frames, which svdq cannot; give --frames")
        return None
    return None if length is None else (int(length) - 1) // step * step + 1


def photo_of(graph: Graph, value: Any) -> str | None:
    """Return the file of the photo that an input comes from, through what scales it."""
    names = ("image", "images", "input", "pixels", "value")
    for node in graph.chain(value, *names):
        if (name := node.text("image")) is not None:
            graph.read(node)
            return name
        is_passed = node.type.lower().startswith(("get", "preview", "unload")) or node.id in graph.notes.read_ids
        if not is_passed and any(isinstance(node.inputs.get(each), Link) for each in names):
            graph.note(node, "changes the photo; svdq scales and crops each photo to the size of the video itself")
    return None


def prompt_of(graph: Graph, value: Any, side: str, family: str = "") -> tuple[str | None, Any]:
    """Return a prompt, and the input of its node that is the text encoder.

    Nodes whose type begins with `family` may lie between, and do not change it.
    """
    passing = ("ConditioningZeroOut", "Reroute", *graph.types.encoders, *([family] if family else []))
    zeroed = False
    for node in graph.chain(value, side, "conditioning", "conditioning_1", "conditioning_to"):
        graph.read(node)
        zeroed = zeroed or node.type == "ConditioningZeroOut"
        names = (f"{side}_prompt",) if f"{side}_prompt" in node.inputs else _TEXTS
        name = next((each for each in names if each in node.inputs and "conditioning" not in each), None)
        if name is not None:
            own = Link(node=node.id, slot=0) if "model_name" in node.inputs else None  # a loader and encoder in one
            clip = node.inputs.get("clip", node.inputs.get("t5", own))
            try:
                text = value_of(graph, node.inputs[name])
                if not zeroed and isinstance(text, str) and (choice := _CHOICE.search(text)):
                    what = f"has choices in its {side} prompt, such as {choice[0][:60]}, of which ComfyUI draws one"
                    graph.note(node, f"{what} for each video; give a prompt without")
                    return None, clip
            except UnknownValueError as error:
                graph.note(error.args[0], f"computes the {side} prompt, which svdq cannot; give it with the photo")
                return None, clip
            return ("" if zeroed else str(text or "")), clip
        if not node.type.startswith(passing):
            graph.note(node, f"changes the {side} prompt; svdq takes the text alone")
    return None, None


def _loaded(graph: Graph, value: Any) -> str | None:
    """Return the file that a loader of a text encoder, VAE or image encoder names, through nodes that pass it on."""
    for node in graph.chain(value, "vae", "clip", "t5"):
        graph.read(node)
        for name, file in files_named(graph, node).items():
            return None if name == "ckpt_name" else file
    return None


def files_named(graph: Graph, node: Node, *more: str) -> dict[str, str]:
    """Return the files that a loader of text encoders, VAEs or upsamplers names, by its inputs."""
    found = {name: quietly(graph, node.inputs.get(name)) for name in (*_FILES, *more)}
    return {name: file for name, file in found.items() if isinstance(file, str) and len(file) <= MAX_NAME}


def _image_encoder(graph: Graph, encoder: Node) -> str | None:
    """Return the file of the image encoder (CLIP) that the photo goes through, too."""
    for name, value in encoder.inputs.items():
        node = graph.origin(value)
        if node is not None and "clip" in name:
            graph.read(node)
            loader = next((node.inputs[each] for each in ("clip_vision", "clip") if each in node.inputs), value)
            if (found := _loaded(graph, loader)) is not None:
                return found
    return None
