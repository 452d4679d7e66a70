"""What a workflow does with frames after the decode: interpolates, enlarges and plays them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from svdq.pipeline.models.comfyui.graph import Graph, Node
from svdq.pipeline.models.comfyui.values import UnknownValueError, number_of, quietly
from svdq.pipeline.video_parameters import MAX_FPS, MAX_UPSCALE

_SAVERS = {"CreateVideo": "fps", "VHS_VideoCombine": "frame_rate", "SaveAnimatedWEBP": "fps", "SaveWEBM": "fps"}
#: Nodes that interpolate frames, by a part of their names.
INTERPOLATIONS = ("rife", "film", "gimm", "vfi", "interpolat")
_FRAMES = ("images", "image", "frames", "pixels")  # inputs that bring frames
_FACTOR = re.compile(r"(?<!\d)([2348])x|x([2348])(?!\d)", re.IGNORECASE)  # in names of upscalers: 4x-UltraSharp, x4plus


@dataclass(frozen=True, kw_only=True)
class Afterwards:
    """How svdq does the same."""

    interpolate: int | None = None  # frames a second
    upscale: str = ""  # a factor, or WIDTHxHEIGHT
    upscaler: str | None = None  # the file of the upscaler, as ComfyUI names it

    @property
    def options(self) -> list[str]:
        """The options of `svdq submit`."""
        upscale = ["--upscale", self.upscale] if self.upscale else []
        return upscale + ([] if self.interpolate is None else ["--interpolate", str(self.interpolate)])


def rate_of(graph: Graph, end: Node) -> int | None:
    """Return the frames a second of what saves the video of a sampler, before an interpolation."""
    saver = _saver_of(graph, end)
    if saver is None:
        return None
    graph.read(saver)
    try:
        rate = number_of(graph, saver, _SAVERS[saver.type])
        for node in (graph.nodes[each] for each in graph.before(saver)):
            if _is_interpolation(node) and node.inputs.get("source_fps") is not None:
                rate = number_of(graph, node, "source_fps")
            elif _is_interpolation(node):
                times = (number_of(graph, node, name) for name in ("multiplier", "interpolation_factor"))
                rate = None if rate is None else rate / max(1, next(filter(None, times), 1))
    except UnknownValueError as error:
        graph.note(error.args[0], "computes the frames a second, which svdq cannot; give --fps")
        return None
    return None if rate is None else max(1, round(rate))


def afterwards_of(graph: Graph, end: Node, fps: int | None) -> Afterwards:
    """Return how svdq does what nodes do with the frames of a video of `fps`; what cannot be said is left out."""
    saver = _saver_of(graph, end)
    if saver is None:
        return Afterwards()
    between = [*_between(graph, saver)]
    played = quietly(graph, saver.inputs.get(_SAVERS[saver.type]))
    is_played = isinstance(played, int | float) and fps is not None and fps < round(played) <= MAX_FPS
    is_interpolated = is_played and any(map(_is_interpolation, between))
    upscaler = next(filter(None, (_upscaler_of(graph, node) for node in between)), None)
    return Afterwards(
        interpolate=round(played) if is_interpolated else None,
        upscale=_upscale_of(graph, between) if upscaler else "",
        upscaler=upscaler,
    )


def _saver_of(graph: Graph, end: Node) -> Node | None:
    return next((saver for saver in graph.of_types(*_SAVERS) if end.id in graph.before(saver)), None)


def _between(graph: Graph, saver: Node) -> Iterator[Node]:
    """Yield the nodes between a decode and what saves the video, the last first."""
    start = next((saver.inputs[name] for name in _FRAMES if name in saver.inputs), None)
    for node in graph.chain(start, *_FRAMES):
        if "decode" in node.type.lower():
            return
        yield node


def _upscaler_of(graph: Graph, node: Node) -> str | None:
    """Return the file of the model with which a node enlarges frames; None if it does not."""
    loader = graph.origin(node.inputs.get("upscale_model"))
    name = None if loader is None else quietly(graph, loader.inputs.get("model_name"))
    return name if isinstance(name, str) else None


def _upscale_of(graph: Graph, between: list[Node]) -> str:
    """Return the factor of what enlarges frames, or the size that it scales them to; "" if it is not known."""
    factor = 1.0
    for node in between:
        sides = [quietly(graph, node.inputs.get(name)) for name in ("width", "height")]
        by = quietly(graph, node.inputs.get("scale_by"))
        if (name := _upscaler_of(graph, node)) is not None:
            found = _FACTOR.search(name)
            if found is None:
                return ""
            factor *= int(found[1] or found[2])
        elif isinstance(by, int | float):
            factor *= by
        elif all(isinstance(side, int | float) and side > 0 for side in sides):
            return "x".join(f"{side * factor:.0f}" for side in sides if isinstance(side, int | float))
    return f"{factor:g}" if 1 < factor <= MAX_UPSCALE else ""


def _is_interpolation(node: Node) -> bool:
    return any(part in node.type.lower() for part in INTERPOLATIONS)
