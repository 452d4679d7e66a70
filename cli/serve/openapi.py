"""The OpenAPI document of `/v1/videos`, made from the parameters of each family's jobs and the object of a video."""

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter
from starlette.routing import BaseRoute, Route

from svdq.cli.serve.bodies import URLENCODED
from svdq.cli.serve.fields import EXTRAS, FIELDS, LAST_PHOTO, NO_OPS, PHOTO, RENAMED, SOUND
from svdq.cli.serve.videos import Video
from svdq.producer import keys
from svdq.producer.job import JOBS
from svdq.producer.submitting.parameters import rules_of

MAX_PAGE = 100  # videos in one page of the list
SCHEMAS = "#/components/schemas/"
_ANY = {"type": "string"}
_TEXT_OR_NUMBER = {"type": ["string", "number"]}
#: Fields of a request that are no parameters of a job, or are written in another way.
_OTHER_FIELDS: Mapping[str, dict[str, Any]] = {
    "family": {"type": "string", "enum": list(JOBS), "description": "the kind of model"},
    "model": {"type": "string", "description": "a model that workers run; leave it out for any"},
    "seconds": _TEXT_OR_NUMBER | {"description": "length; ignored if num_frames is given"},
    **{name: {"type": ["boolean", "string"], "description": "whether the video has sound"} for name in SOUND},
    "size": {"type": "string", "description": "width and height, such as 576x320, or auto", "examples": ["576x320"]},
    "guidance_scale": _TEXT_OR_NUMBER,
    "priority": {"type": "string", "enum": list(keys.PRIORITIES)},
    "name": {"type": "string", "description": "name of the files"},
    "output": {"type": "string", "description": "folder of the files in the storage, or a template of their name, too"},
    "keep_location": {"type": ["boolean", "string"], "description": "whether the files say where the photo was taken"},
    "at": {"type": "string", "description": "when the job is queued, such as 22:00 or an RFC 3339 time"},
    "format": {"type": "string", "description": "formats of the files, separated by spaces, such as mp4 gif"},
    "lora": {
        "type": ["string", "object"],
        "description": "a LoRA of the workers, with its strength: style:0.8, or its name and scale",
        "properties": {"name": _ANY, "local_path": _ANY, "scale": {"type": "number"}, "int_id": {"type": "integer"}},
    },
    "loras": {"type": ["string", "array"], "description": "LoRAs, each as in lora"},
    "formats": {"type": ["string", "array"], "items": _ANY, "description": "formats of the files"},
}
_PHOTO = {
    "anyOf": [
        {"type": "string", "format": "binary"},
        {"type": "string", "description": "a data URL: data:image/jpeg;base64,…"},
        {"type": "object", "properties": {"image_url": _ANY}, "required": ["image_url"]},
    ]
}
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _ANY,
                "type": _ANY,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def _ref(schema: str) -> dict[str, str]:
    return {"$ref": f"{SCHEMAS}{schema}"}


_BODY_TYPES = ("multipart/form-data", "application/json", URLENCODED)
#: By the name of the view: the schemas of bodies, of answers by their type, and of parameters of the query.
_BODIES = {
    "create_video": _ref("VideoRequest"),
    "create_and_wait": _ref("VideoRequest"),
    "remix_video": {"type": "object", "description": "fields of a VideoRequest without photos"},
}
_VIDEO = {"application/json": _ref("Video")}
_FILE: Mapping[str, Any] = {"video/mp4": {}, "image/gif": {}, "application/zip": {}}
_LIST = {"type": "object", "properties": {"data": {"type": "array", "items": _ref("Video")}}, "required": ["data"]}
_ANSWERS: Mapping[str, dict[str, Any]] = {
    **dict.fromkeys(("create_video", "retrieve_video", "remix_video"), _VIDEO),
    "list_videos": {"application/json": _LIST},
    "create_and_wait": dict(_FILE),
    "video_content": {**_FILE, "image/jpeg": {}},
}
_QUERIES: Mapping[str, dict[str, Any]] = {
    "list_videos": {
        "limit": {"type": "integer", "minimum": 0, "maximum": MAX_PAGE, "default": 20},
        "order": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
        "after": {"type": "string", "description": "id of the last video of the page before"},
    },
    "video_content": {"variant": {"type": "string", "enum": ["video", "thumbnail"]}, "format": _ANY},
    "queue": {"model": _ANY},
}


def make_document(routes: Sequence[BaseRoute], hidden: Sequence[str]) -> dict[str, Any]:
    """Describe routes, whose summaries are the docstrings of their views, without those at `hidden` paths."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}")
        if path not in hidden:
            methods = (route.methods or set()) - {"HEAD"}
            paths.setdefault(path, {}).update({method.lower(): _operation(route, path) for method in methods})
    schema = TypeAdapter(Video).json_schema(ref_template=f"{SCHEMAS}{{model}}", mode="serialization")
    schemas = schema.pop("$defs") | {"Video": schema, "VideoRequest": request_schema(), "Error": _ERROR}
    return {
        "openapi": "3.1.0",
        "info": {"title": "svdq", "version": version("svdq")},
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def request_schema() -> dict[str, Any]:
    """Return the JSON schema of the fields of a new video; where families differ, only what they have in common."""
    own = {name: renamed for renamed, name in RENAMED.items()}
    rules: dict[str, list[dict[str, Any]]] = {}
    for family in JOBS:
        for name, rule in rules_of(family).items():
            rules.setdefault(own.get(name, name), []).append(rule)
    properties: dict[str, Any] = {PHOTO: _PHOTO, LAST_PHOTO: _PHOTO}
    for name in FIELDS:
        properties[name] = _OTHER_FIELDS[name] if name in _OTHER_FIELDS else _common(rules[name])
    for name, texts in NO_OPS.items():
        properties[name] = {"enum": [each for text in texts for each in dict.fromkeys((text, _value(text)))]}
    properties |= {name: {"type": ["object", "string"], "description": "an object with more fields"} for name in EXTRAS}
    return {"type": "object", "properties": properties, "required": [PHOTO]}


def _common(rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what several schemas of a field have in common; forms have numbers as texts."""
    first, *others = rules
    kept = ("type", "enum", "items", "description", "minimum", "maximum", "maxLength", "multipleOf", "default")
    found = {
        key: first[key]
        for key in kept
        if first.get(key) is not None and all(rule.get(key) == first[key] for rule in others)
    }
    if found["type"] in ("integer", "number", "boolean"):
        found["type"] = [found["type"], "string"]
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _operation(route: Route, path: str) -> dict[str, Any]:
    names = [part.strip("{}") for part in path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": _ANY} for name in names]
    parameters += [
        {"name": name, "in": "query", "schema": schema} for name, schema in _QUERIES.get(route.name, {}).items()
    ]
    answer = _ANSWERS.get(route.name, {"application/json": {"type": "object"}})
    operation: dict[str, Any] = {
        "operationId": f"{route.name}_{path.rpartition('/')[2]}" if route.name == "create_video" else route.name,
        "summary": (route.endpoint.__doc__ or "").partition("\n")[0],
        "parameters": parameters,
        "responses": {
            "200": _content("the answer", answer),
            "default": _content("why there is none", {"application/json": _ref("Error")}),
        },
    }
    if fields := _BODIES.get(route.name):
        operation["requestBody"] = {
            "required": True,
            "content": _content("", dict.fromkeys(_BODY_TYPES, fields))["content"],
        }
    return operation


def _content(description: str, schemas: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in schemas.items()}}
