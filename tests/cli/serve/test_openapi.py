"""The OpenAPI document of `/v1/videos`, against real requests and answers."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from svdq.cli.serve import api
from svdq.cli.serve.fields import EXTRAS, FIELDS, LAST_PHOTO, NO_OPS, PHOTO
from tests.cli.serve.servers import Server

pytestmark = pytest.mark.slow


def closed(document: dict[str, Any], name: str) -> Draft202012Validator:
    """A validator of a schema of the document that allows no other fields."""
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        schema.setdefault("additionalProperties", False)
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}})


def test_the_document_has_every_path_and_field_and_fits_the_answers(server: Server, photo_bytes: bytes) -> None:
    from openapi_spec_validator import validate

    document = server.get("/openapi.json").json
    validate(document)
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    routes = [route for route in api.routes() if isinstance(route, Route) and route.path not in api.NOT_OFFERED]
    served = {(method, route.path.replace(":path", "")) for route in routes for method in route.methods or ()}
    assert described == {pair for pair in served if pair[0] != "HEAD"}

    request = closed(document, "VideoRequest")
    assert set(document["components"]["schemas"]["VideoRequest"]["properties"]) == {
        *FIELDS, *EXTRAS, *NO_OPS, PHOTO, LAST_PHOTO,
    }  # fmt: skip
    fields = {"prompt": "", "num_frames": "14", "size": "576x320", "n": 1, "fps": 7, "formats": ["mp4", "gif"]}
    assert request.is_valid(fields | {PHOTO: "data:image/jpeg;base64,AA=="})
    for wrong in ({"frames": 14}, {"num_frames": 0}, {"n": 2}, {"priority": "urgent"}, {"motion_bucket_id": 5000}):
        assert not request.is_valid({PHOTO: "data:…"} | wrong)
        assert server.create(photo_bytes, **wrong).status == 400

    video = closed(document, "Video")
    made = server.create(photo_bytes, family="wan", prompt="a dog", seed=1).json
    video.validate(made)
    video.validate(server.get(f"/v1/videos/{made['id']}").json)
    assert server.ask("DELETE", f"/v1/videos/{made['id']}").status == 200
    closed(document, "Error").validate(server.get("/v1/videos/none").json)
