"""A node of a workflow, and the connection of an input to the output of another node."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Link:
    """Output `slot` of a node, as the input of another one."""

    node: str
    slot: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node that runs."""

    id: str  # in a subgraph, with the ids of the nodes around it: 129:86
    type: str
    inputs: Mapping[str, Any]  # values of widgets and `Link`s, by name
    models: tuple[Mapping[str, Any], ...]  # files that the editor says it needs: name, url, directory

    def __str__(self) -> str:
        return f"{self.type} ({self.id})"

    def text(self, *names: str) -> str | None:
        """Return the first of some inputs that is a text."""
        return next((each for name in names if isinstance(each := self.inputs.get(name), str)), None)
