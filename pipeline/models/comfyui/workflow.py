"""Finds the workflow in a file (JSON, or a picture or video that ComfyUI has written) and reads its nodes."""

import json
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.editor import flatten
from svdq.pipeline.models.comfyui.graph import Graph, Limits, Link, Node, NodeTypes

#: Words of which a workflow in a picture or video has one, with or without escaped quotes: the API's and the editor's.
_MARKS = (b"class_type", b"last_node_id", b"nodes")
_MAX_BYTES = 16_000_000  # of JSON
_CHUNK, _MAX_TRIES = 65_536, 100
_MAX_NESTED = 5  # texts of JSON within JSON
_OPENING = re.compile(r'\{|"(?=\{)')  # of an object, or of a text of one
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # bytes that JSON does not have


def read_workflow(path: Path) -> dict[str, Any]:
    """Return the workflow in a file, in the API format where the file has both; raises InputError if it has none.

    PNG, WebP, mp4 and webm hold the JSON as it is, in whatever the format has for comments.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as opened:
            if opened.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
                opened.seek(0)
                if size > _MAX_BYTES:
                    raise InputError(
                        f"The workflow {str(path)!r} has {size / 1e6:,.0f} MB, and svdq reads {_MAX_BYTES / 1e6:g}; "
                        "give a smaller one."
                    )
                return _of_json(path, opened.read(_MAX_BYTES))
            workflows: list[dict[str, Any]] = []
            if size:
                with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    workflows = _embedded(content)
    except OSError as error:
        raise InputError(f"The workflow {str(path)!r} cannot be read ({error.strerror}); give another.") from error
    if not workflows:
        raise InputError(
            f"The file {str(path)!r} has no workflow inside; give the JSON that ComfyUI saves, or a file that it has "
            "written and nothing has changed since."
        )
    return min(workflows, key=is_editor)


def is_editor(workflow: dict[str, Any]) -> bool:
    """Return whether a workflow is in the editor's format, with positions and links, and not in the API's."""
    return isinstance(workflow.get("nodes"), list)


def _of_json(path: Path, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"The workflow {str(path)!r} is not valid JSON ({error}); save it again.") from error
    workflow = _workflow_in(document)
    if workflow is None:
        raise InputError(
            f"The file {str(path)!r} is no workflow of ComfyUI: it has neither nodes nor a class_type for each node."
        )
    return workflow


def _workflow_in(document: Any, depth: int = 0) -> dict[str, Any] | None:
    """Return the workflow that a document is or holds as `prompt` or `workflow`, which may be texts of JSON."""
    if isinstance(document, str):
        try:
            return None if depth > _MAX_NESTED else _workflow_in(json.loads(document), depth + 1)
        except (ValueError, RecursionError):
            return None
    if not isinstance(document, dict) or depth > _MAX_NESTED:
        return None
    nodes = [each for each in document.values() if isinstance(each, dict) and "class_type" in each]
    if is_editor(document) or (nodes and len(nodes) >= len(document) - 1):
        return document
    inside = (_workflow_in(document.get(name), depth + 1) for name in ("prompt", "output", "workflow", "extra_pnginfo"))
    return next(filter(None, inside), None)


def _embedded(content: mmap.mmap) -> list[dict[str, Any]]:
    """Return the workflows in the bytes of a picture or video, one of each format."""
    found: dict[bool, dict[str, Any]] = {}
    limits, place = Limits(), 0
    marks = {mark: content.find(mark) for mark in _MARKS}
    while len(found) < 2 and (at := min((each for each in marks.values() if each >= 0), default=-1)) >= 0:
        limits.check_time()
        # The text around it, since formats of pictures and videos have bytes that JSON has not before and after.
        start = _text_before(content, at, max(place, at - _MAX_BYTES))
        limit = min(len(content), start + _MAX_BYTES)
        end = _CONTROL.search(content, at, limit)
        place = end.start() if end else limit
        for workflow in _workflows_of(content[start:place].decode(errors="replace"), limits):
            found.setdefault(is_editor(workflow), workflow)
        marks = {mark: at if at < 0 or at >= place else content.find(mark, place) for mark, at in marks.items()}
    return [*found.values()]


def _workflows_of(text: str, limits: Limits) -> Iterator[dict[str, Any]]:
    """Yield the workflows in a text: objects of JSON, or texts of JSON that hold one."""
    place, num_tries = 0, 0
    while num_tries < _MAX_TRIES and (opening := _OPENING.search(text, place)) is not None:
        limits.check_time()
        num_tries += 1
        place = opening.start() + 1
        try:
            document, end = json.JSONDecoder().raw_decode(text, opening.start())
        except (ValueError, RecursionError):
            continue
        if (workflow := _workflow_in(document)) is not None:
            yield workflow
            place, num_tries = end, 0


def _text_before(content: mmap.mmap, mark: int, first: int) -> int:
    """Return where the text begins that goes on to a mark, at `first` at the earliest."""
    place = mark
    while place > first:
        chunk = max(first, place - _CHUNK)
        controls = [each.end() for each in _CONTROL.finditer(content, chunk, place)]
        if controls:
            return controls[-1]
        place = chunk
    return first


def read_graph(workflow: dict[str, Any], types: NodeTypes = NodeTypes()) -> Graph:  # noqa: B008 - it is frozen
    """Return the nodes of a workflow that run: without those that are muted, bypassed, notes or wires only.

    Raises InputError if the workflow is not as ComfyUI writes it.
    """
    limits = Limits()
    if not is_editor(workflow):
        limits.count(len(workflow))
        return Graph(_of_api(workflow), types, limits)
    try:
        return Graph(flatten(workflow, types.widgets, limits), types, limits)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"[:100]
        raise InputError(f"The workflow is not as ComfyUI writes it ({what}); save it again.") from error


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
