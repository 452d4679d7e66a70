"""The nodes of a workflow that run, with their inputs by name, and notes on what an import leaves out."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The noise levels of a sampler: a schedule of ComfyUI by its name or a list, and the part of it that counts."""

    node: Node  # which makes it
    name: str = ""
    steps: int = 20
    levels: tuple[float, ...] | None = None  # in place of a name; without the 0 at the end
    start: int = 0
    end: int | None = None  # None: to the last step
    shift: float | None = None  # where the node has it itself
    boundary: float | None = None  # the noise level at which a sampler with two models changes to the second
    denoise: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A sampler: the steps of a schedule that one model does."""

    node: Node
    model: Any  # the input, as those below
    positive: Any
    negative: Any
    latents: Any
    path: tuple[Node, ...]  # the nodes that the latents come from, the nearest first, up to the sampler before
    cfg: float
    sampler: str
    schedule: Schedule
    seed: int | None = None
    adds_noise: bool = True
    keeps_noise: bool = False  # whether noise is left after the last of its steps


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A type of nodes that encode the photo, or begin the latents of a video: the names of their inputs."""

    width: str = "width"
    height: str = "height"
    frames: str = "length"
    photo: str = "start_image"
    last_photo: str = ""
    #: Inputs of which svdq has none, with the values that change nothing.
    neutral: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NodeTypes:
    """What is known of types of nodes besides ComfyUI's own."""

    #: The names of their widgets, in order, where the editor saves values alone.
    widgets: Mapping[str, str] = field(default_factory=dict)
    #: Outputs that are inputs of the same names, by a pattern of the type; the first output is the bundle itself.
    bundles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Compute the first outputs; raise UnknownValueError if they are no constants.
    outputs: Mapping[str, "Callable[[Graph, Node], Sequence[Any]]"] = field(default_factory=dict)
    samplers: Mapping[str, "Callable[[Graph, Node], Sequence[Stage]]"] = field(default_factory=dict)
    #: Read the noise levels of an output, by its number.
    schedules: Mapping[str, "Callable[[Graph, Node, int], Schedule]"] = field(default_factory=dict)
    guiders: frozenset[str] = frozenset()  # nodes with a `cfg` that SamplerCustomAdvanced guides by
    encoders: Mapping[str, Encoder] = field(default_factory=dict)

    def __or__(self, other: "NodeTypes") -> "NodeTypes":
        both = {each.name: getattr(self, each.name) | getattr(other, each.name) for each in fields(self)}
        return NodeTypes(**both)


@dataclass(kw_only=True)
class Notes:
    """What was read of a workflow."""

    sentences: list[str] = field(default_factory=list)  # about nodes, in the order in which they were found
    read_ids: set[str] = field(default_factory=set)  # nodes that need no further word


@dataclass(frozen=True)
class Graph:
    """The nodes of a workflow by id, and what was found out about them."""

    nodes: Mapping[str, Node]
    types: NodeTypes = field(default=NodeTypes(), compare=False)
    limits: Limits = field(default_factory=Limits, compare=False)
    notes: Notes = field(default_factory=Notes, compare=False)
    #: Outputs that `value_of` has computed, and the error where it could not: each is computed once.
    computed: dict[Link, Any] = field(default_factory=dict, compare=False)
    computing: list[Link] = field(default_factory=list, compare=False)  # outputs that wait for each other

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

    def nearest(self, values: Iterable[object]) -> Iterator[Node]:
        """Yield all nodes that some inputs depend on, breadth first."""
        seen: set[str] = set()
        left = [*values]
        for value in left:  # which grows
            if (node := self.origin(value)) is not None and node.id not in seen:
                seen.add(node.id)
                yield node
                left += node.inputs.values()

    def before(self, node: Node) -> set[str]:
        """Return the ids of a node and of all that it depends on."""
        return {node.id, *(each.id for each in self.nearest(node.inputs.values()))}

    def of_types(self, *types: str) -> Iterator[Node]:
        """Yield the nodes of some types, in the order of the file."""
        return (node for node in self.nodes.values() if node.type in types)

    def read(self, *nodes: Node | None) -> None:
        """Mark nodes as read."""
        self.notes.read_ids.update(node.id for node in nodes if node is not None)

    def note(self, node: Node, what: str) -> None:
        """Add what is different about a node, as a predicate."""
        self.read(node)
        if (sentence := f"{node} {what}.") not in self.notes.sentences:
            self.notes.sentences.append(sentence)
