"""Constants of a workflow: the value of an input, through primitives, switches and arithmetic."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

from svdq.pipeline.models.comfyui.graph import Graph, Link, Node
from svdq.pipeline.models.comfyui.widgets import CONTROL
from svdq.pipeline.models.model_file import ScheduleName
from svdq.pipeline.models.sigmas import sigmas_of

_MAX_DEPTH = 50
_MAX_TEXT, _MAX_NUMBER = 100_000, 2**64  # letters of a text, and the size of a number
_MAX_EXPRESSION = 1000  # letters
#: The outputs of WanVideoScheduler, which passes its settings on.
_OF_SCHEDULER = ("sigmas", "steps", "shift", "scheduler", "start_step", "end_step")
#: Nodes that pass a value on.
_PASSING = (
    "PreviewAny",
    "ShowText|pysssss",
    "Display Any",
    "Primitive",
    "easy convertAnything",
    "CM_FloatTo",
    "LTXFloatTo",
)
_FIXED = "scale dimensions"  # a way of ResizeImageMaskNode to resize


class UnknownValueError(Exception):
    """A value that only ComfyUI can compute, such as the size of a photo; its argument is the node."""


def value_of(graph: Graph, value: Any, depth: int = 0) -> Any:
    """Return the constant that an input is; raises UnknownValueError if it is none."""
    origin = graph.origin(value)
    if origin is None:
        return None if isinstance(value, Link) else value
    assert isinstance(value, Link)
    if value not in graph.computed:
        graph.computed[value] = UnknownValueError(origin)  # while it is computed: what depends on itself has no value
        try:
            graph.computed[value] = _within_bounds(origin, _compute(graph, origin, value.slot, depth))
        except UnknownValueError as error:
            graph.computed[value] = error
    found = graph.computed[value]
    if isinstance(found, UnknownValueError):
        raise UnknownValueError(*found.args)
    return found


def _within_bounds(node: Node, found: Any) -> Any:
    """Return a value unless it is longer or larger than any that a video needs: nodes can double it again and again."""
    if (isinstance(found, str) and len(found) > _MAX_TEXT) or (isinstance(found, int) and abs(found) > _MAX_NUMBER):
        raise UnknownValueError(node)
    return found


def _compute(graph: Graph, origin: Node, slot: int, depth: int) -> Any:
    """Compute an output of a node; raises UnknownValueError if it is no constant."""
    if depth > _MAX_DEPTH:
        raise UnknownValueError(origin)
    inputs = {name: each for name, each in origin.inputs.items() if name not in (CONTROL, "output_type")}

    def of(name: str) -> Any:
        return value_of(graph, inputs.get(name), depth + 1)

    if origin.type == "StringConcatenate":
        return str(of("delimiter") or "").join(str(of(name) or "") for name in ("string_a", "string_b"))
    if {"a", "b", "operation"} <= inputs.keys() and (sign := _OF_NAMES.get(str(of("operation")))):  # easy mathInt
        found = _computed(origin, f"a {sign} b", {name: of(name) for name in ("a", "b")})
        return int(found) if origin.type.endswith("Int") else found
    if isinstance(text := inputs.get("expression", inputs.get("value") if "a" in inputs else None), str):
        return _computed(origin, text, {name.rpartition(".")[2]: of(name) for name in inputs if inputs[name] != text})
    if origin.type in ("GetImageSize", "ResolutionSelector"):
        return _size_of(graph, origin, depth)[slot]
    if origin.type.startswith("WanVideoScheduler"):
        if (name := _OF_SCHEDULER[slot : slot + 1]) and name[0] in inputs:
            return of(name[0])
        raise UnknownValueError(origin)
    if origin.type == "WanMoEScheduler" and slot < 4:  # the others are noise levels
        return moe_schedule(graph, origin)[slot]
    if "isfloatX" in inputs:  # mxSlider
        return of("Xf" if inputs["isfloatX"] else "Xi")
    if "seed" in inputs and "seed" in origin.type.lower():  # such as Seed (rgthree), which has buttons, too
        return of("seed")
    has_links = any(isinstance(each, Link) for each in inputs.values())
    if len(inputs) == 1 and "Loader" not in origin.type and (not has_links or origin.type.startswith(_PASSING)):
        return of(next(iter(inputs)))  # a constant, or a node that passes one on
    raise UnknownValueError(origin)


def moe_schedule(graph: Graph, node: Node) -> tuple[float, int, int, int]:
    """Return the first outputs of a WanMoEScheduler: shift, steps, and of them the first expert's and the second's.

    The shift is the smallest multiple of `interval` with which the second expert begins at the `boundary` or above.
    """
    boundary, interval, denoise = (number_of(graph, node, name) for name in ("boundary", "interval", "denoise"))
    high, low = (int(number_of(graph, node, name) or 0) for name in ("steps_high", "steps_low"))
    scheduler = value_of(graph, node.inputs.get("scheduler"))
    is_known = scheduler in get_args(ScheduleName) and 0 < min(high, low) <= max(high, low) < 100
    if not (is_known and denoise in (None, 1) and boundary and interval and interval >= 0.01):
        raise UnknownValueError(node)
    for number in range(1, int(100 / interval) + 1):
        if sigmas_of(scheduler, high + low, number * interval)[high] >= boundary:
            return round(number * interval, 2), high + low, high, low
    raise UnknownValueError(node)


def _size_of(graph: Graph, node: Node, depth: int) -> tuple[Any, ...]:
    """Return width and height of a picture that has a fixed size, whatever the photo; may raise UnknownValueError."""
    if node.type == "ResolutionSelector":
        shape = str(value_of(graph, node.inputs.get("aspect_ratio"), depth + 1)).partition(" ")[0].split(":")
        pixels = float(value_of(graph, node.inputs.get("megapixels"), depth + 1)) * 1024 * 1024
        step = int(value_of(graph, node.inputs.get("multiple"), depth + 1) or 8)
        sides = [float(each) for each in shape]
        scale = math.sqrt(pixels / math.prod(sides))
        return tuple(round(side * scale / step) * step for side in sides)
    resized = graph.origin(node.inputs.get("image"))
    is_fixed = resized is not None and resized.type in ("ResizeImageMaskNode", "EmptyImage")
    if resized is not None and is_fixed and resized.inputs.get("resize_type", _FIXED) == _FIXED:
        names = [name for side in ("width", "height") for name in resized.inputs if name.endswith(side)]
        if len(names) == 2:
            return tuple(value_of(graph, resized.inputs[name], depth + 1) for name in names)
    raise UnknownValueError(node)


#: Outputs of nodes that bundle inputs of the same names, as far as they are read; the first is the bundle.
_BUNDLES = {
    r"Context.*\(rgthree\)": (
        *("base_ctx", "model", "clip", "vae", "positive", "negative", "latent", "images", "seed"),
        *("steps", "step_refiner", "cfg", "ckpt_name", "sampler", "scheduler"),
    ),
    r"easy pipe(In|Out)": ("pipe", "model", "pos", "neg", "latent", "vae", "clip", "image", "seed"),
}


def _from_bundle(graph: Graph, node: Node, name: str) -> Any:
    """Return the input that an output of a bundle is: of the node itself, or of the bundles that it continues."""
    seen: set[str] = set()
    left = [node]
    while left:
        each = left.pop()
        if each.inputs.get(name) is not None:
            return each.inputs[name]
        if each.id not in seen:
            seen.add(each.id)
            before = [value for key, value in each.inputs.items() if key.startswith(("base_ctx", "ctx_", "pipe"))]
            left += [origin for value in reversed(before) if (origin := graph.origin(value)) is not None]
    return None


def without_switches(graph: Graph) -> Graph:
    """Return a graph in which inputs come from what its switches choose, and from what contexts and pipes bundle."""

    def chosen(value: Any) -> Any:
        seen = set()
        while (node := graph.origin(value)) is not None and value not in seen:
            seen.add(value)
            names = next((names for kind, names in _BUNDLES.items() if re.fullmatch(kind, node.type)), ())
            if 0 < value.slot < len(names):
                value = _from_bundle(graph, node, names[value.slot])
            elif node.type == "ComfySwitchNode":
                try:
                    branch = "on_true" if value_of(graph, node.inputs.get("switch")) else "on_false"
                except UnknownValueError:
                    branch = "on_false"
                value = node.inputs.get(branch)
            else:
                break
        return value

    nodes = {
        key: replace(node, inputs={name: chosen(each) for name, each in node.inputs.items()})
        for key, node in graph.nodes.items()
    }
    return Graph(nodes, limits=graph.limits)


def number_of(graph: Graph, node: Node, name: str, default: float | None = None) -> float | None:
    """Return an input of a node that is a number; the default if it has none, or a text."""
    found = value_of(graph, node.inputs.get(name))
    if isinstance(found, str):
        try:
            found = float(found)
        except ValueError:
            return default
    return found if isinstance(found, int | float) and math.isfinite(found) else default


_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_OF_NAMES = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/", "modulo": "%"}


def _rounded(number: float, digits: int | None = None) -> float:
    return round(number) if digits is None else round(number, max(-20, min(20, digits)))


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each for each in (abs, math.ceil, float, math.floor, int, max, min)
} | {"round": _rounded}


def _computed(node: Node, text: str, names: Mapping[str, Any]) -> Any:
    """Compute an expression of +, -, *, / and a few functions, as ComfyMathExpression has it."""

    def compute(part: ast.AST) -> Any:
        return _within_bounds(node, compute_part(part))

    def compute_part(part: ast.AST) -> Any:
        if isinstance(part, ast.Expression):
            return compute(part.body)
        if isinstance(part, ast.Constant) and isinstance(part.value, int | float):
            return part.value
        if isinstance(part, ast.Name) and isinstance(names.get(part.id), int | float):
            return names[part.id]
        if isinstance(part, ast.BinOp) and type(part.op) in _OPERATORS:
            return _OPERATORS[type(part.op)](compute(part.left), compute(part.right))
        if isinstance(part, ast.UnaryOp) and type(part.op) in _OPERATORS:
            return _OPERATORS[type(part.op)](compute(part.operand))
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id in _FUNCTIONS:
            return _FUNCTIONS[part.func.id](*map(compute, part.args))
        raise UnknownValueError(node)

    if len(text) > _MAX_EXPRESSION:
        raise UnknownValueError(node)
    try:
        return compute(ast.parse(text.strip(), mode="eval"))
    except (ArithmeticError, SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise UnknownValueError(node) from error
