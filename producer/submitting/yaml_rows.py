"""A YAML list of mappings, one row at a time with its line, all values as text. Knows no columns.

As text, for YAML would read 22:00 as 1320.
"""

from collections.abc import Iterator
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.events import SequenceEndEvent, SequenceStartEvent, StreamEndEvent
from yaml.nodes import MappingNode


class _TextLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Knows of no numbers, dates or truth values; only of nothing at all, and of merging mappings."""


_TextLoader.yaml_implicit_resolvers = {
    start: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def yaml_rows(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read rows and the lines that they begin on; what is read is not kept, so that any number of rows may follow.

    Raises:
        yaml.YAMLError: it is not YAML, or not a list of mappings.
    """
    loader = _TextLoader(text)
    try:
        loader.get_event()  # the stream starts
        if loader.check_event(StreamEndEvent):
            return
        loader.get_event()  # the document starts
        if not loader.check_event(SequenceStartEvent):
            raise ConstructorError(None, None, "it is not a list of rows", loader.peek_event().start_mark)
        loader.get_event()
        while not loader.check_event(SequenceEndEvent):
            node = loader.compose_node(None, None)
            if not isinstance(node, MappingNode):
                raise ConstructorError(None, None, "a row is not a mapping such as `photo: a.jpg`", node.start_mark)
            yield node.start_mark.line + 1, loader.construct_document(node)
    finally:
        loader.dispose()
