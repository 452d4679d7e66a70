"""Constants of a workflow: the value of an input, through primitives, switches and arithmetic."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from svdq.pipeline.models.comfyui.graph import Graph, Link, Node
from svdq.pipeline.models.comfyui.widgets import CONTROL

_MAX_DEPTH = 50
_MAX_TEXT, _MAX_NUMBER = 100_000, 2**64  # letters of a text, and the size of a number
_MAX_EXPRESSION = 1000  # letters
#: Nodes that pass a value on.
_PASSING = re.compile(r"PreviewAny|ShowText\|pysssss|Display Any|Primitive|easy convertAnything|\w+FloatTo")
_FIXED = "scale dimensions"  # a way of ResizeImageMaskNode to resize


class UnknownValueError(Exception):
    """A value that only ComfyUI can compute, such as the size of a photo; its argument is the node."""


def value_of(graph: Graph, value: Any) -> Any:
    """Return the constant that an input is; raises UnknownValueError if it is none."""
    origin = graph.origin(value)
    if origin is None:
        return None if isinstance(value, Link) else value
    assert isinstance(value, Link)
    if value not in graph.computed:
        graph.computed[value] = UnknownValueError(origin)  # while it is computed: what depends on itself has no value
        graph.computing.append(value)
        try:
            graph.computed[value] = _within_bounds(origin, _compute(graph, origin, value.slot))
        except UnknownValueError as error:
            graph.computed[value] = error
        graph.computing.pop()
    found = graph.computed[value]
    if isinstance(found, UnknownValueError):
        raise UnknownValueError(*found.args)
    return found


def _within_bounds(node: Node, found: Any) -> Any:
    """Return a value unless it is longer or larger than any that a video needs: nodes can double it again and again."""
    is_long = isinstance(found, str) and len(found) > _MAX_TEXT
    if is_long or (isinstance(found, int | float) and not abs(found) <= _MAX_NUMBER):  # also NaN
        raise UnknownValueError(node)
    return found


def _compute(graph: Graph, origin: Node, slot: int) -> Any:
    """Compute an output of a node; raises UnknownValueError if it is no constant."""
    if len(graph.computing) > _MAX_DEPTH:
        raise UnknownValueError(origin)
    inputs = {name: each for name, each in origin.inputs.items() if name not in (CONTROL, "output_type")}

    def of(name: str) -> Any:
        return value_of(graph, inputs.get(name))

    if origin.type == "StringConcatenate":
        return str(of("delimiter") or "").join(str(of(name) or "") for name in ("string_a", "string_b"))
    if {"a", "b", "operation"} <= inputs.keys() and (sign := _OF_NAMES.get(str(of("operation")))):  # easy mathInt
        found = _computed(origin, f"a {sign} b", {name: of(name) for name in ("a", "b")})
        return int(found) if origin.type.endswith("Int") else found
    if isinstance(text := inputs.get("expression", inputs.get("value") if "a" in inputs else None), str):
        return _computed(origin, text, {name.rpartition(".")[2]: of(name) for name in inputs if inputs[name] != text})
    outputs = _SIZES.get(origin.type) or graph.types.outputs.get(origin.type)
    if outputs is not None and 0 <= slot < len(found := outputs(graph, origin)):
        return found[slot]
    if "isfloatX" in inputs:  # mxSlider
        return of("Xf" if inputs["isfloatX"] else "Xi")
    if "seed" in inputs and "seed" in origin.type.lower():  # such as Seed (rgthree), which has buttons, too
        return of("seed")
    has_links = any(isinstance(each, Link) for each in inputs.values())
    if len(inputs) == 1 and "Loader" not in origin.type and (not has_links or _PASSING.match(origin.type)):
        return of(next(iter(inputs)))  # a constant, or a node that passes one on
    raise UnknownValueError(origin)


def _selected_size(graph: Graph, node: Node) -> Sequence[int]:
    """Return width and height by ResolutionSelector: sides of a ratio, with so many megapixels."""
    try:
        shape = str(value_of(graph, node.inputs.get("aspect_ratio"))).partition(" ")[0].split(":")
        width, height = (float(each) for each in shape)
        scale = math.sqrt(number_or(graph, node, "megapixels", 1.0) * 1024 * 1024 / (width * height))
        step = whole_of(graph, node, "multiple") or 8
        return round(width * scale / step) * step, round(height * scale / step) * step
    except (ArithmeticError, ValueError) as error:
        raise UnknownValueError(node) from error


def _size_of_picture(graph: Graph, node: Node) -> Sequence[Any]:
    """Return width and height by GetImageSize, of a picture that has a fixed size whatever the photo."""
    resized = graph.origin(node.inputs.get("image"))
    is_fixed = resized is not None and resized.type in ("ResizeImageMaskNode", "EmptyImage")
    if resized is not None and is_fixed and resized.inputs.get("resize_type", _FIXED) == _FIXED:
        names = [name for side in ("width", "height") for name in resized.inputs if name.endswith(side)]
        if len(names) == 2:
            return [value_of(graph, resized.inputs[name]) for name in names]
    raise UnknownValueError(node)


_SIZES = {"ResolutionSelector": _selected_size, "GetImageSize": _size_of_picture}


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
    bundles = _BUNDLES | dict(graph.types.bundles)

    def chosen(value: Any) -> Any:
        seen = set()
        while (node := graph.origin(value)) is not None and value not in seen:
            seen.add(value)
            names = next((names for kind, names in bundles.items() if re.fullmatch(kind, node.type)), ())
            if 0 < value.slot < len(names):
                value = _from_bundle(graph, node, names[value.slot])
            elif node.type == "ComfySwitchNode":
                branch = "on_true" if quietly(graph, node.inputs.get("switch")) else "on_false"
                value = node.inputs.get(branch)
            else:
                break
        return value

    nodes = {
        key: replace(node, inputs={name: chosen(each) for name, each in node.inputs.items()})
        for key, node in graph.nodes.items()
    }
    return replace(graph, nodes=nodes, computed={})


def quietly(graph: Graph, value: Any) -> Any:
    """Return the constant that an input is; None if it is none."""
    try:
        return value_of(graph, value)
    except UnknownValueError:
        return None


def number_of(graph: Graph, node: Node, name: str) -> float | None:
    """Return an input of a node that is a number; None if it has none, or a text."""
    found = value_of(graph, node.inputs.get(name))
    if isinstance(found, str):
        try:
            found = float(found)
        except ValueError:
            return None
    if not isinstance(found, int | float) or found != found or abs(found) == math.inf:
        return None
    return max(-_MAX_NUMBER, min(found, _MAX_NUMBER))


def number_or(graph: Graph, node: Node, name: str, default: float) -> float:
    """Return an input of a node that is a number; the default if it has none."""
    found = number_of(graph, node, name)
    return default if found is None else found


def whole_of(graph: Graph, node: Node, name: str, default: int = 0) -> int:
    """Return an input of a node that is a whole number."""
    return int(number_or(graph, node, name, default))


def quiet_number(graph: Graph, node: Node, name: str) -> float | None:
    """Return an input of a node that is a number; None if it is none, or cannot be computed."""
    try:
        return number_of(graph, node, name)
    except UnknownValueError:
        return None


def text_of(graph: Graph, node: Node, name: str) -> str:
    """Return an input of a node as text."""
    return str(value_of(graph, node.inputs.get(name)) or "")


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
