"""A workflow as the nodes that run, with their inputs by name: of the API format or of the editor's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from svdq.pipeline.models.comfyui.editor import flatten
from svdq.pipeline.models.comfyui.node import Link, Node
from svdq.pipeline.models.comfyui.workflow_file import is_editor


@dataclass(frozen=True)
class Graph:
    """The nodes of a workflow by id."""

    nodes: Mapping[str, Node]

    def origin(self, value: object) -> Node | None:
        """Return the node that an input comes from; None for a value, or for nothing."""
        return self.nodes.get(value.node) if isinstance(value, Link) else None

    def before(self, node: Node) -> set[str]:
        """Return the ids of a node and of all that it depends on."""
        found: set[str] = set()
        left = [node]
        while left:
            if (each := left.pop()).id not in found:
                found.add(each.id)
                left += [origin for value in each.inputs.values() if (origin := self.origin(value)) is not None]
        return found

    def of_types(self, *types: str) -> Iterator[Node]:
        """Yield the nodes of some types, in the order of the file."""
        return (node for node in self.nodes.values() if node.type in types)


def read_graph(workflow: Mapping[str, Any]) -> Graph:
    """Return the nodes of a workflow that run: without those that are muted, bypassed, notes or wires only."""
    return Graph(flatten(workflow) if is_editor(dict(workflow)) else _of_api(workflow))


def _of_api(workflow: Mapping[str, Any]) -> dict[str, Node]:
    found = {str(key): node for key, node in workflow.items() if isinstance(node, dict) and "class_type" in node}

    def value(given: Any) -> Any:
        if isinstance(given, list) and len(given) == 2 and str(given[0]) in found and isinstance(given[1], int):
            return Link(node=str(given[0]), slot=given[1])
        return given

    def inputs_of(node: Mapping[str, Any]) -> dict[str, Any]:
        given = node.get("inputs")
        return {name: value(each) for name, each in given.items()} if isinstance(given, dict) else {}

    return {
        key: Node(id=key, type=str(node["class_type"]), inputs=inputs_of(node), models=())
        for key, node in found.items()
    }
