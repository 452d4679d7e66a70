"""The nodes of a workflow that run, with their inputs by name, and notes on what an import leaves out."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from svdq.pipeline.errors import InputError

#: A workflow may be a stranger's: subgraphs and switches multiply what a small file says.
MAX_NODES, MAX_PARTS, MAX_S = 10_000, 200_000, 20.0  # parts: links, inputs and values of widgets
MAX_NAME = 1000  # letters of a file's name
_SHOWN = 100  # letters of a node's type in sentences


class Limits:
    """What reading one workflow may take; raises InputError for more."""

    def __init__(self) -> None:
        self._num_nodes = self._num_parts = 0
        self._end_s = time.monotonic() + MAX_S

    def count(self, num_nodes: int, num_parts: int = 0) -> None:
        """Count nodes, and their links, inputs and values."""
        self._num_nodes += num_nodes
        self._num_parts += num_parts
        if self._num_nodes > MAX_NODES or self._num_parts > MAX_PARTS:
            raise InputError(
                f"The workflow has more than {MAX_NODES:,} nodes or {MAX_PARTS:,} links, inputs and values, counting "
                "those of each subgraph wherever it is used; give a smaller one."
            )

    def check_time(self) -> None:
        """Raise InputError if the time is up."""
        if time.monotonic() > self._end_s:
            raise InputError(f"The workflow takes more than {MAX_S:g} s to read; give a smaller one.")


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
        return f"{self.type[:_SHOWN]} ({self.id[:_SHOWN]})"

    def text(self, *names: str) -> str | None:
        """Return the first of some inputs that is a text."""
        return next((each for name in names if isinstance(each := self.inputs.get(name), str)), None)


@dataclass(frozen=True)
class Graph:
    """The nodes of a workflow by id."""

    nodes: Mapping[str, Node]
    limits: Limits = field(default_factory=Limits, compare=False)
    #: Outputs that `value_of` has computed, and the error where it could not: each is computed once.
    computed: dict[Link, Any] = field(default_factory=dict, compare=False)

    def origin(self, value: object) -> Node | None:
        """Return the node that an input comes from; None for a value, or for nothing."""
        self.limits.check_time()
        return self.nodes.get(value.node) if isinstance(value, Link) else None

    def chain(self, value: object, *names: str) -> Iterator[Node]:
        """Yield the node that an input comes from, then from node to node the first of some inputs that is a link."""
        seen: set[str] = set()
        node = self.origin(value)
        while node is not None and node.id not in seen:
            seen.add(node.id)
            yield node
            links = (each for name in names if isinstance(each := node.inputs.get(name), Link))
            node = self.origin(next(links, None))

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


@dataclass(kw_only=True)
class Notes:
    """Sentences about nodes, in the order in which they were found."""

    sentences: list[str] = field(default_factory=list)
    read_ids: set[str] = field(default_factory=set)  # nodes that need no further word

    def read(self, *nodes: Node | None) -> None:
        """Mark nodes as read."""
        self.read_ids |= {node.id for node in nodes if node is not None}

    def add(self, node: Node, what: str) -> None:
        """Add what is different about a node, as a predicate."""
        self.read(node)
        sentence = f"{node} {what}."
        if sentence not in self.sentences:
            self.sentences.append(sentence)
