"""Finds the workflow in a file (JSON, or a picture or video that ComfyUI has written) and reads its nodes."""

import json
import mmap
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from svdq.pipeline.errors import InputError
from svdq.pipeline.models.comfyui.editor import flatten
from svdq.pipeline.models.comfyui.graph import Graph, Limits, Link, Node

#: Strings of which a workflow in a picture or video has one: the API format's and the editor's.
_MARKS = (b'"class_type"', b'"last_node_id"', b'"nodes"')
_MAX_BYTES = 64_000_000  # of JSON
_CHUNK, _MAX_TRIES = 65_536, 100
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
                return _of_json(path, opened.read(_MAX_BYTES))
            found: list[Any] = []
            if size:
                with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    found = _embedded(content)
    except OSError as error:
        raise InputError(f"The workflow {str(path)!r} cannot be read ({error.strerror}); give another.") from error
    workflows = [each for document in found if (each := _workflow_in(document)) is not None]
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
    except ValueError as error:
        raise InputError(f"The workflow {str(path)!r} is not valid JSON ({error}); save it again.") from error
    workflow = _workflow_in(document)
    if workflow is None:
        raise InputError(
            f"The file {str(path)!r} is no workflow of ComfyUI: it has neither nodes nor a class_type for each node."
        )
    return workflow


def _workflow_in(document: Any) -> dict[str, Any] | None:
    """Return the workflow that a document is or holds as `prompt` or `workflow`, which may be texts of JSON."""
    if isinstance(document, str):
        try:
            document = json.loads(document)
        except ValueError:
            return None
    if not isinstance(document, dict):
        return None
    nodes = [each for each in document.values() if isinstance(each, dict) and "class_type" in each]
    if is_editor(document) or (nodes and len(nodes) >= len(document) - 1):
        return document
    inside = (_workflow_in(document.get(name)) for name in ("prompt", "output", "workflow", "extra_pnginfo"))
    return next(filter(None, inside), None)


def _embedded(content: mmap.mmap) -> list[Any]:
    """Return the JSON objects with a workflow in the bytes of a picture or video."""
    found, place = [], 0
    while (mark := min((at for each in _MARKS if (at := content.find(each, place)) >= 0), default=-1)) >= 0:
        # The text around it, since formats of pictures and videos have bytes that JSON has not before and after.
        start, place = _text_before(content, mark), mark + 1
        end = _CONTROL.search(content, mark)
        text = content[start : min(end.start() if end else len(content), start + _MAX_BYTES)].decode(errors="replace")
        for opening in islice(re.finditer("{", text), _MAX_TRIES):
            try:
                document, length = json.JSONDecoder().raw_decode(text, opening.start())
            except ValueError:
                continue
            found.append(document)
            place = max(place, start + len(text[:length].encode()))
            break
    return found


def _text_before(content: mmap.mmap, mark: int) -> int:
    """Return where the text begins that goes on to a mark."""
    place = mark
    while place > 0:
        chunk = max(0, place - _CHUNK)
        controls = [each.end() for each in _CONTROL.finditer(content, chunk, place)]
        if controls:
            return controls[-1]
        place = chunk
    return 0


def read_graph(workflow: Mapping[str, Any]) -> Graph:
    """Return the nodes of a workflow that run: without those that are muted, bypassed, notes or wires only."""
    limits = Limits()
    if is_editor(dict(workflow)):
        return Graph(flatten(workflow, limits), limits=limits)
    limits.count(len(workflow))
    return Graph(_of_api(workflow), limits=limits)


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
