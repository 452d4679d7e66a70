"""The editor's format as nodes that run: subgraphs and wires are followed, muted and bypassed nodes left out."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from svdq.pipeline.models.comfyui.graph import Limits, Link, Node
from svdq.pipeline.models.comfyui.widgets import CONTROL, TEXTS, WIDGETS

_NEVER, _BYPASS = 2, 4  # modes of nodes
_OF_INPUT = "-1"  # in proxyWidgets: of an input of the subgraph
_INPUTS = -10  # id of the inputs of a subgraph, as the origin of links
_WIRES = ("Reroute", "Reroute (rgthree)", "ReroutePrimitive|pysssss")
_SWITCHES = ("Any Switch (rgthree)",)  # which pass the first of their inputs that is there
_GETTERS = {"GetNode": "SetNode", "easy getNode": "easy setNode"}
#: Nodes that compute nothing.
_VIRTUAL = {
    "Anything Everywhere",
    "Anything Everywhere3",
    *_WIRES,
    *_SWITCHES,
    *_GETTERS,
    *_GETTERS.values(),
    "PrimitiveNode",
    "Note",
    "MarkdownNote",
}
_CONTROLS = ("fixed", "randomize", "increment", "decrement")


@dataclass(frozen=True, kw_only=True)
class _Value:
    """A constant at the end of a link."""

    value: Any


@dataclass(kw_only=True)
class _Scope:
    """The workflow, or a subgraph where it is used."""

    graph: Mapping[str, Any]
    limits: Limits
    prefix: str = ""
    parent: "_Scope | None" = None
    instance: Mapping[str, Any] = field(default_factory=dict)  # the node that the subgraph is in its parent
    nodes: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    links: dict[int, tuple[int, int]] = field(default_factory=dict)  # origin and its slot, by id
    inner: dict[int, "_Scope"] = field(default_factory=dict)  # subgraphs by the id of their node
    followed: dict[int, "Link | _Value | None"] = field(default_factory=dict)  # where links come from

    def __post_init__(self) -> None:
        nodes, implied = self.graph.get("nodes", ()), (self.graph.get("extra") or {}).get("ue_links") or ()
        self.limits.count(len(nodes), len(self.graph.get("links", ())) + len(implied))
        for node in nodes:
            parts = (node.get(name) or () for name in ("inputs", "outputs", "widgets_values", "widgets_values_named"))
            self.limits.count(0, sum(len(each) for each in parts if isinstance(each, list | dict)))
        self.limits.check_time()
        self.nodes = {node["id"]: node for node in self.graph.get("nodes", ())}
        for link in self.graph.get("links", ()):
            if isinstance(link, dict):
                self.links[link["id"]] = (link["origin_id"], link["origin_slot"])
            elif link:
                self.links[link[0]] = (link[1], link[2])
        self._add_implied_links()

    @cached_property
    def shown(self) -> dict[tuple[str, str], Any]:
        """The values that the instance of a subgraph shows, by the place of their widgets inside.

        A place is the id of a node, -1 for an input of the subgraph, and a name: `widgets_values[i]` is of
        `proxyWidgets[i]`, else of the i-th input that is a widget.
        """
        properties, values = self.instance.get("properties") or {}, self.instance.get("widgets_values") or []
        places = [(str(each[0]), str(each[1])) for each in properties.get("proxyWidgets") or ()]
        named = _named(self.instance)
        if not places:
            own = [each["name"] for each in self.instance.get("inputs") or () if each.get("widget")]
            of_widgets = set(_widget_inputs(self))
            defined = [each["name"] for each in self.graph.get("inputs") or () if each["name"] in of_widgets]
            places = [(_OF_INPUT, name) for name in [*named] or (own if len(own) == len(values) else defined)]
        given = values if isinstance(values, list) and len(values) == len(places) else [None] * len(places)
        names = Counter(name for _, name in places)
        found = {
            place: named.get(place[1], value) if names[place[1]] == 1 else value
            for place, value in zip(places, given, strict=True)
        }
        if self.parent is not None:  # whose own instance may show them, too
            for name, value in _promoted(self.parent, self.instance["id"]):
                found[next((place for place in found if place[1] == name), (_OF_INPUT, name))] = value
        return {place: value for place, value in found.items() if value is not None}

    def _add_implied_links(self) -> None:
        """Add the connections that the nodes of cg-use-everywhere make, as the editor has saved them."""
        implied = (self.graph.get("extra") or {}).get("ue_links") or ()
        for number, each in enumerate(implied, start=1):
            node = self.nodes.get(int(each["downstream"]))
            slot = each["downstream_slot"]
            if node is None or slot >= len(inputs := list(node.get("inputs") or ())):
                continue
            if inputs[slot].get("link") is None:
                inputs[slot] = {**inputs[slot], "link": -number}
                self.nodes[node["id"]] = {**node, "inputs": inputs}
                self.links[-number] = (int(each["upstream"]), each["upstream_slot"])


def flatten(workflow: Mapping[str, Any], widgets: Mapping[str, str], limits: Limits) -> dict[str, Node]:
    """Return the nodes of a workflow that run, by id; `widgets` are those of more types of nodes.

    Raises InputError for more than the limits.
    """
    widgets = {**WIDGETS, **widgets}
    subgraphs = {each["id"]: each for each in (workflow.get("definitions") or {}).get("subgraphs") or ()}
    top = _Scope(graph=workflow, limits=limits)
    scopes = [top]
    for scope in scopes:  # which grows
        for node in scope.nodes.values():
            if node["type"] in subgraphs and scope.prefix.count(":") < 20:
                inner = _Scope(
                    graph=subgraphs[node["type"]],
                    limits=limits,
                    prefix=f"{scope.prefix}{node['id']}:",
                    parent=scope,
                    instance=node,
                )
                scope.inner[node["id"]] = inner
                if not _is_off(node):
                    scopes.append(inner)
    setters = {
        (node["type"], _first(node)): (scope, node)
        for scope in scopes
        for node in scope.nodes.values()
        if node["type"] in _GETTERS.values()
    }
    found = {}
    for scope in scopes:
        for key, node in scope.nodes.items():
            if not _is_off(node) and node["type"] not in _VIRTUAL and key not in scope.inner:
                made = _node(scope, node, widgets, setters)
                found[made.id] = made
    return found


def _is_off(node: Mapping[str, Any]) -> bool:
    return node.get("mode", 0) in (_NEVER, _BYPASS)


def _first(node: Mapping[str, Any]) -> Any:
    values = _named(node) or node.get("widgets_values")
    return next(iter(values.values() if isinstance(values, dict) else values or ()), None)


def _node(scope: _Scope, node: Mapping[str, Any], widgets: Mapping[str, str], setters: Mapping[Any, Any]) -> Node:
    inputs = _widgets(node, widgets) | dict(_promoted(scope, node["id"]))
    for each in node.get("inputs") or ():
        if each.get("link") is not None:
            found = _follow(scope, each["link"], setters)
            if isinstance(found, Link):
                inputs[each["name"]] = found
            elif found is not None:
                inputs[each["name"]] = found.value
    models = (node.get("properties") or {}).get("models") or ()
    named = tuple(each for each in models if isinstance(each, dict))
    named_inputs = {str(name): each for name, each in inputs.items()}
    return Node(id=f"{scope.prefix}{node['id']}", type=str(node["type"]), inputs=named_inputs, models=named)


def _named(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a node's widgets as newer editors save them, by name, without the controls of seeds."""
    named = node.get("widgets_values_named")
    given = named.items() if isinstance(named, dict) else ()
    return {name: value for name, value in given if name not in (CONTROL, *_CONTROLS)}


def _widgets(node: Mapping[str, Any], widgets: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a node's widgets by name, as far as the names are known."""
    if named := _named(node):
        return named
    values = node.get("widgets_values") or []
    if isinstance(values, dict):
        return dict(values)
    if any(isinstance(value, dict) and "lora" in value for value in values):  # Power Lora Loader (rgthree)
        entries = [value for value in values if isinstance(value, dict) and "lora" in value]
        return {f"lora_{number}": entry for number, entry in enumerate(entries, 1)}
    if any(
        isinstance(value, list) and value and isinstance(value[0], dict) and "active" in value[0] for value in values
    ):
        return {"loras": next(value for value in values if isinstance(value, list))}  # Lora Loader (LoraManager)
    names = widgets.get(node["type"], "value" if node["type"] in TEXTS else "").split()
    if not names:
        of_inputs = [each["name"] for each in node.get("inputs") or () if each.get("widget")]
        names = of_inputs if len(of_inputs) == len(values) else []
    if CONTROL in names and (place := names.index(CONTROL)) < len(values) and values[place] not in _CONTROLS:
        names.remove(CONTROL)  # widgets that other nodes feed have none
    if not names and values and len(values) <= 2:  # a constant, whatever its node is called
        names = ["value", CONTROL]
    return dict(zip(names, values, strict=False))


def _promoted(scope: _Scope, node_id: int) -> Iterator[tuple[str, Any]]:
    """Yield the widgets of a node in a subgraph whose values its instance has."""
    for place, value in scope.shown.items():
        if place[0] == str(node_id):
            yield place[1], value


def _follow(scope: _Scope, link: int, setters: Mapping[Any, Any], depth: int = 0) -> Link | _Value | None:
    """Return the output or the constant that a link comes from; None if nothing runs there."""
    if link not in scope.links or depth > 200:
        return None
    if link not in scope.followed:
        scope.limits.check_time()
        scope.followed[link] = None  # while it is followed: a circle leads nowhere
        scope.followed[link] = _origin(scope, link, setters, depth)
    return scope.followed[link]


def _origin(scope: _Scope, link: int, setters: Mapping[Any, Any], depth: int) -> Link | _Value | None:
    origin, slot = scope.links[link]
    if origin == _INPUTS:
        return _from_outside(scope, slot, setters, depth)
    node = scope.nodes.get(origin)
    if node is None or node.get("mode", 0) == _NEVER:
        return None
    inputs = node.get("inputs") or ()
    if node.get("mode", 0) == _BYPASS:
        passed = _passed(node, slot)
        return None if passed is None else _follow(scope, passed, setters, depth + 1)
    if origin in scope.inner:
        inner = scope.inner[origin]
        outputs = inner.graph.get("outputs") or ()
        ids = outputs[slot].get("linkIds") if slot < len(outputs) else None
        return _follow(inner, ids[0], setters, depth + 1) if ids else None
    if node["type"] in (*_WIRES, *_SWITCHES, *_GETTERS.values()):
        each = (_follow(scope, given["link"], setters, depth + 1) for given in inputs if given.get("link") is not None)
        return next((found for found in each if found is not None), None)
    if node["type"] in _GETTERS:
        there, setter = setters.get((_GETTERS[node["type"]], _first(node)), (scope, {}))
        given = next((each["link"] for each in setter.get("inputs") or () if each.get("link") is not None), None)
        return None if given is None or _is_off(setter) else _follow(there, given, setters, depth + 1)
    if node["type"] == "PrimitiveNode":
        return _Value(value=_first(node))
    return Link(node=f"{scope.prefix}{origin}", slot=int(slot))


def _passed(node: Mapping[str, Any], slot: int) -> int | None:
    """Return the link that a bypassed node passes to an output: of its input of that type, at best of that slot."""
    outputs, inputs = node.get("outputs") or (), node.get("inputs") or ()
    kind = outputs[slot].get("type") if slot < len(outputs) else None
    ordered = [*inputs[slot : slot + 1], *inputs]
    return next((each["link"] for each in ordered if each.get("type") == kind and each.get("link") is not None), None)


def _from_outside(scope: _Scope, slot: int, setters: Mapping[Any, Any], depth: int) -> Link | _Value | None:
    """Return what an input of a subgraph gets where it is used: a link, or the value of the widget that it is there."""
    assert scope.parent is not None
    names = [each["name"] for each in scope.graph.get("inputs") or ()]
    name = names[slot] if slot < len(names) else None
    inputs = scope.instance.get("inputs") or ()
    given: Mapping[str, Any] = next((each for each in inputs if each.get("name") == name), {})
    if given.get("link") is not None:
        return _follow(scope.parent, given["link"], setters, depth + 1)
    shown = scope.shown
    inside = [(_OF_INPUT, name), *_places_of(scope, slot)]
    value = next((shown[place] for place in inside if place in shown), None)
    return None if value is None else _Value(value=value)


def _places_of(scope: _Scope, slot: int) -> Iterator[tuple[str, str]]:
    """Yield the widgets of a subgraph's nodes that one of its inputs is connected to."""
    for node in scope.nodes.values():
        for each in node.get("inputs") or ():
            if each.get("widget") and scope.links.get(each.get("link")) == (_INPUTS, slot):
                yield str(node["id"]), str(each["widget"].get("name", each["name"]))


def _widget_inputs(scope: _Scope) -> Iterator[str]:
    """Yield the names of a subgraph's inputs that widgets of its nodes are connected to."""
    names = [each["name"] for each in scope.graph.get("inputs") or ()]
    for node in scope.nodes.values():
        for each in node.get("inputs") or ():
            origin, slot = scope.links.get(each.get("link"), (None, 0))
            if origin == _INPUTS and each.get("widget") and slot < len(names):
                yield names[slot]
