"""What a workflow makes a video of: photos, prompts, size and frames, by the node that encodes the photo."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.graph import MAX_NAME, Graph, Link, Node, Notes
from svdq.pipeline.models.comfyui.model_chain import GUIDANCE, LoraUse, ModelChain
from svdq.pipeline.models.comfyui.stages import Stage, note_start
from svdq.pipeline.models.comfyui.values import UnknownValueError, number_of, value_of

CONDITIONING = "SVD_img2vid_Conditioning"
#: Nodes that encode the photo, with the names of their inputs: width, height, frames, photo, last photo.
ENCODERS: Mapping[str, tuple[str, str, str, str, str]] = {
    "WanImageToVideo": ("width", "height", "length", "start_image", ""),
    "PainterI2V": ("width", "height", "length", "start_image", ""),
    "WanFirstLastFrameToVideo": ("width", "height", "length", "start_image", "end_image"),
    "Wan22ImageToVideoLatent": ("width", "height", "length", "start_image", ""),
    "WanVideoImageToVideoEncode": ("width", "height", "num_frames", "start_image", "end_image"),
    CONDITIONING: ("width", "height", "video_frames", "init_image", ""),
    "WanVideoImageClipEncode": ("generation_width", "generation_height", "num_frames", "image", ""),
}
#: Inputs of loaders of text encoders, VAEs and upsamplers that name files.
_FILES = (
    *("vae_name", "clip_name", "model_name", "clip_name1", "text_encoder", "gemma_path", "ckpt_name"),
    *("clip_name2", "ltxv_path"),
)
#: What nodes that are not read would have made, by a part of their names.
_OTHER_KINDS = {
    "vace": "makes a video with VACE",
    "fun": "makes a video with Wan Fun (control or inpainting)",
    "camera": "makes a video along a camera's path",
    "sound": "makes a video from sound",
    "s2v": "makes a video from sound",
    "talk": "makes a video from sound",
    "animate": "makes a video from the motion of another one",
    "emptyhunyuan": "makes a video from text alone",
    "emptyembeds": "makes a video from text alone",
    "track": "makes a video along drawn paths",
    "phantom": "makes a video of subjects",
    "humo": "makes a video from sound",
}
#: Inputs of these that svdq lacks, with the values that change nothing.
_NEUTRAL = {"noise_aug_strength": 0, "start_latent_strength": 1, "end_latent_strength": 1, "motion_amplitude": 1}
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
    notes: tuple[str, ...] = ()
    urls: Mapping[str, str] = field(default_factory=dict)  # where files can be had, by name
    checkpoints: frozenset[str] = frozenset()  # files in ComfyUI's folder of checkpoints


def find_encoder(graph: Graph, starts: list[Any], sampler: Node) -> Node:
    """Return the node that encodes the photo, before the conditions or latents of a sampler; raises InputError."""
    seen: dict[str, Node] = {}
    left = [node for value in starts if (node := graph.origin(value)) is not None]
    while left:
        node = left.pop(0)
        if node.type in ENCODERS:
            return node
        if node.id not in seen:
            seen[node.id] = node
            left += [origin for value in node.inputs.values() if (origin := graph.origin(value)) is not None]
    refuse(list(seen.values()))
    where = f" ({', '.join(map(str, list(seen.values())[:4] or [sampler]))})"
    raise InputError(
        f"The workflow has no node that svdq can make a video of a photo with{where}; use one of {', '.join(ENCODERS)}."
    )


def refuse(nodes: list[Node]) -> None:
    """Raise InputError for the first node of a family or kind that svdq does not have."""
    if other := next((node for node in nodes if node.type.startswith("Hunyuan")), None):
        raise InputError(
            f"{other} belongs to HunyuanVideo, and svdq imports workflows of Wan, LTX-2 and Stable Video Diffusion."
        )
    refuse_kinds([node for node in nodes if node.type.startswith(("Wan", "Empty", "ARVideo"))], _OTHER_KINDS)


def refuse_kinds(nodes: Iterable[Node], kinds: Mapping[str, str]) -> None:
    """Raise InputError for the first node of a kind of video that svdq cannot make, by a part of its name."""
    for node in nodes:
        if what := next((what for part, what in kinds.items() if part in node.type.lower()), None):
            raise InputError(f"{node} {what}, which svdq cannot; it makes videos of one photo, or of two.")


def source_of(graph: Graph, encoder: Node, positive: Any, negative: Any, notes: Notes) -> Source:
    """Read what the node that encodes the photo, and the prompts, depend on."""
    notes.read(encoder)
    width_name, height_name, frames_name, photo_name, last_name = ENCODERS[encoder.type]
    for name, value in encoder.inputs.items():
        known = {width_name, height_name, frames_name, photo_name, last_name, "vae", "positive", "negative"}
        origin = graph.origin(value)
        if origin is not None and name not in known and "clip" not in name:
            notes.add(origin, f"is the {name} of {encoder}, which svdq has not; svdq renders without")
    size = size_of(graph, encoder, (width_name, height_name), 16, notes)
    frames = frames_of(graph, encoder, frames_name, 4, notes)
    for name, neutral in _NEUTRAL.items():
        if (strength := quietly(graph, encoder.inputs.get(name))) not in (None, neutral):
            notes.add(encoder, f"has the {name} {strength:g}, which svdq has not; svdq takes the photo as it is")
    batch = quietly(graph, encoder.inputs.get("batch_size"))
    if isinstance(batch, int) and batch > 1:
        notes.add(encoder, f"makes {batch} videos; give `--variations {batch}`")
    photo = photo_of(graph, encoder.inputs.get(photo_name), notes)
    if graph.origin(encoder.inputs.get(photo_name)) is None:
        notes.add(encoder, "has no photo, so it makes a video from text alone; svdq needs a photo")
    last = graph.origin(encoder.inputs.get(last_name)) if last_name else None
    prompt, clip = prompt_of(graph, positive, "positive", notes)
    negative_prompt, _ = prompt_of(graph, negative, "negative", notes)
    return Source(
        encoder=encoder,
        photo=photo,
        last_photo=photo_of(graph, encoder.inputs.get(last_name), notes) if last is not None else None,
        has_last_photo=last is not None,
        prompt=prompt,
        negative_prompt=negative_prompt,
        size=size,
        frames=frames,
        vae=_loaded(graph, encoder.inputs.get("vae"), notes),
        text_encoder=_loaded(graph, clip, notes),
        image_encoder=_image_encoder(graph, encoder, notes),
    )


def size_of(graph: Graph, node: Node, names: tuple[str, str], multiple: int, notes: Notes) -> tuple[int, int] | None:
    """Return width and height, as latents with sides of `multiple` pixels have them; None: as the photo's."""
    try:
        width, height = (number_of(graph, node, name) for name in names)
    except UnknownValueError as error:
        notes.add(error.args[0], "computes the size from the photo; `--size auto` does so here")
        return None
    return (int(width) // multiple * multiple, int(height) // multiple * multiple) if width and height else None


def frames_of(graph: Graph, node: Node, name: str, step: int, notes: Notes) -> int | None:
    """Return the number of frames, as latents of `step` frames have them; None if that is left open."""
    try:
        length = number_of(graph, node, name)
    except UnknownValueError as error:
        notes.add(error.args[0], "computes the number of frames, which svdq cannot; give --frames")
        return None
    return None if length is None else (int(length) - 1) // step * step + 1


def quietly(graph: Graph, value: Any) -> Any:
    """Return the constant that an input is; None if it is none."""
    try:
        return value_of(graph, value)
    except UnknownValueError:
        return None


def photo_of(graph: Graph, value: Any, notes: Notes) -> str | None:
    """Return the file of the photo that an input comes from, through what scales it."""
    names = ("image", "images", "input", "pixels", "value")
    for node in graph.chain(value, *names):
        if (name := node.text("image")) is not None:
            notes.read(node)
            return name
        is_passed = node.type.lower().startswith(("get", "preview", "unload")) or node.id in notes.read_ids
        if not is_passed and any(isinstance(node.inputs.get(each), Link) for each in names):
            notes.add(node, "changes the photo; svdq scales and crops each photo to the size of the video itself")
    return None


def prompt_of(graph: Graph, value: Any, side: str, notes: Notes) -> tuple[str | None, Any]:
    """Return a prompt, and the input of its node that is the text encoder."""
    zeroed = False
    for node in graph.chain(value, side, "conditioning", "conditioning_1", "conditioning_to"):
        notes.read(node)
        zeroed = zeroed or node.type == "ConditioningZeroOut"
        names = (f"{side}_prompt",) if f"{side}_prompt" in node.inputs else _TEXTS
        name = next((each for each in names if each in node.inputs and "conditioning" not in each), None)
        if name is not None and (node.type not in ENCODERS):
            own = Link(node=node.id, slot=0) if "model_name" in node.inputs else None  # WanVideoTextEncodeCached
            clip = node.inputs.get("clip", node.inputs.get("t5", own))
            try:
                text = value_of(graph, node.inputs[name])
                if not zeroed and isinstance(text, str) and (choice := _CHOICE.search(text)):
                    what = f"has choices in its {side} prompt, such as {choice[0][:60]}, of which ComfyUI draws one"
                    notes.add(node, f"{what} for each video; give a prompt without")
                    return None, clip
            except UnknownValueError as error:
                notes.add(error.args[0], f"computes the {side} prompt, which svdq cannot; give it with the photo")
                return None, clip
            return ("" if zeroed else str(text or "")), clip
        if node.type not in (*ENCODERS, "ConditioningZeroOut", "Reroute") and not node.type.startswith("LTXV"):
            notes.add(node, f"changes the {side} prompt; svdq takes the text alone")
    return None, None


def _loaded(graph: Graph, value: Any, notes: Notes) -> str | None:
    """Return the file that a loader of a text encoder, VAE or image encoder names, through nodes that pass it on."""
    for node in graph.chain(value, "vae", "clip", "t5"):
        notes.read(node)
        for name, file in files_named(graph, node).items():
            return None if name == "ckpt_name" else file
    return None


def files_named(graph: Graph, node: Node) -> dict[str, str]:
    """Return the files that a loader of text encoders, VAEs or upsamplers names, by its inputs."""
    found = {name: quietly(graph, node.inputs.get(name)) for name in _FILES}
    return {name: file for name, file in found.items() if isinstance(file, str) and len(file) <= MAX_NAME}


def _image_encoder(graph: Graph, encoder: Node, notes: Notes) -> str | None:
    """Return the file of the image encoder (CLIP) that the photo goes through, too."""
    for name, value in encoder.inputs.items():
        node = graph.origin(value)
        if node is not None and "clip" in name:
            notes.read(node)
            loader = next((node.inputs[each] for each in ("clip_vision", "clip") if each in node.inputs), value)
            if (found := _loaded(graph, loader, notes)) is not None:
                return found
    return None


#: The parameters that inputs of the conditioning are.
_INPUTS = {
    "width": "width",
    "height": "height",
    "video_frames": "frames",
    "motion_bucket_id": "motion_bucket_id",
    "fps": "fps",
    "augmentation_level": "noise_aug_strength",
}


def read_svd(graph: Graph, stage: Stage, model: ModelChain, source: Source, notes: Notes) -> Recipe:
    """Read a workflow of Stable Video Diffusion: the base by its checkpoint's name, and the defaults."""
    name = model.file.lower()
    suffix = "-xt-1-1" if "1_1" in name or "1-1" in name else "-xt" if "xt" in name else ""
    base = f"stabilityai/stable-video-diffusion-img2vid{suffix}"
    notes.add(model.loader, f"loads {model.file}, a checkpoint in one file; svdq takes the weights of {base}")
    for lora in model.loras:
        notes.add(lora.node, "adds a LoRA, which svdq has for Wan and LTX-2")
    found = {ours: number_of(graph, source.encoder, theirs) for theirs, ours in _INPUTS.items()}
    defaults: dict[str, Any] = {
        "steps": stage.steps,
        **{name: value for name, value in found.items() if value is not None},
    }
    for name in ("width", "height"):
        if name in defaults:
            defaults[name] = int(defaults[name]) // 64 * 64
    guides = next((node for node in graph.of_types(GUIDANCE) if node.id in graph.before(stage.node)), None)
    least = stage.cfg if guides is None else number_of(graph, guides, "min_cfg", 1.0)
    defaults |= {"min_guidance_scale": least, "max_guidance_scale": stage.cfg}
    if (stage.sampler, stage.scheduler) != ("euler", "karras"):
        notes.add(
            stage.node,
            f"has {stage.sampler} and {stage.scheduler}; svdq renders with euler and karras, the model's own",
        )
    note_start(stage, notes)
    return Recipe(base=base, defaults=defaults, source=source, seed=stage.seed)
