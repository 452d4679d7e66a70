"""What an import leaves out or changes, by node, and which nodes it has read."""

from dataclasses import dataclass, field

from svdq.pipeline.models.comfyui.node import Node


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
