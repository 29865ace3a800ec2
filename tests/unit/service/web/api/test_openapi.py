"""The OpenAPI document: it is one, it has every route, and the service's answers are as it says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from web_service import running

from hvd_transformer.service.jobs import Placement
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.access.authentication import session_cookie
from hvd_transformer.service.web.api.openapi import document
from hvd_transformer.service.web.app import ROUTES

DOCUMENT = document(ROUTES, "1.2.3", "hvd_session_0a1b2c3d")

# What OpenAPI 3.1 asks of a document, of those parts that ours has (spec.openapis.org/oas/v3.1.0).
REFERENCE = {
    "type": "object",
    "required": ["$ref"],
    "properties": {"$ref": {"pattern": "^#/components/schemas/[A-Za-z0-9._-]+$"}},
}
CONTENT = {
    "type": "object",
    "propertyNames": {"pattern": "^[a-z]+/[a-z-]+$"},
    "additionalProperties": {
        "type": "object",
        "required": ["schema"],
        "additionalProperties": False,
        "properties": {"schema": {"type": "object"}},
    },
}
PARAMETER = {
    "type": "object",
    "required": ["name", "in", "schema"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "in": {"enum": ["query", "path", "header"]},
        "required": {"type": "boolean"},
        "schema": {"type": "object"},
    },
    "if": {"properties": {"in": {"const": "path"}}},
    "then": {"required": ["required"], "properties": {"required": {"const": True}}},
}
OPERATION = {
    "type": "object",
    "required": ["operationId", "responses"],
    "additionalProperties": False,
    "properties": {
        "operationId": {"type": "string", "pattern": r"^\w+$"},
        "summary": {"type": "string"},
        "description": {"type": "string"},
        "security": {
            "type": "array",
            "items": {
                "type": "object",
                "propertyNames": {"enum": ["token", "session"]},
                "additionalProperties": {"const": []},
            },
        },
        "parameters": {"type": "array", "items": PARAMETER},
        "requestBody": {
            "type": "object",
            "required": ["content"],
            "additionalProperties": False,
            "properties": {"required": {"const": True}, "content": CONTENT},
        },
        "responses": {
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": r"^([1-5]\d\d|default)$"},
            "additionalProperties": {
                "type": "object",
                "required": ["description"],
                "additionalProperties": False,
                "properties": {"description": {"type": "string"}, "content": CONTENT},
            },
        },
    },
}
OPENAPI = {
    "type": "object",
    "required": ["openapi", "info", "paths"],
    "additionalProperties": False,
    "properties": {
        "openapi": {"const": "3.1.0"},
        "info": {"type": "object", "required": ["title", "version"]},
        "paths": {
            "type": "object",
            "propertyNames": {"pattern": "^/"},
            "additionalProperties": {
                "type": "object",
                "propertyNames": {"enum": ["get", "post", "delete"]},
                "additionalProperties": OPERATION,
            },
        },
        "components": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "schemas": {"type": "object", "propertyNames": {"pattern": "^[A-Za-z0-9._-]+$"}},
                "securitySchemes": {"type": "object"},
            },
        },
    },
}


def everything(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a document."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from everything(inner)


def schema_of(method: str, path: str, status: int) -> Draft202012Validator:
    """What an answer must be."""
    operation = DOCUMENT["paths"][path][method.lower()]
    found = operation["responses"].get(str(status), operation["responses"]["default"])["content"]["application/json"]
    return Draft202012Validator({**found["schema"], "components": DOCUMENT["components"]})


def test_it_is_an_openapi_document() -> None:
    Draft202012Validator(OPENAPI).validate(DOCUMENT)
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_its_references_lead_somewhere() -> None:
    schemas = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert {found["$ref"] for found in everything(DOCUMENT) if "$ref" in found} <= schemas


def test_names_of_operations_are_unique() -> None:
    names = [operation["operationId"] for item in DOCUMENT["paths"].values() for operation in item.values()]
    assert len(names) == len(set(names)) == len(ROUTES)


@pytest.mark.parametrize("path", DOCUMENT["paths"])
def test_parameters_of_the_path_are_declared(path: str) -> None:
    for operation in DOCUMENT["paths"][path].values():
        declared = [one["name"] for one in operation["parameters"] if one["in"] == "path"]
        assert declared == re.findall(r"\{(\w+)\}", path)


def test_every_route_that_answers_is_in_it_and_every_route_in_it_answers(tmp_path: Path) -> None:
    """What the server answers is as the document says; an unknown method is refused."""
    with running(tmp_path) as service:
        service.token("revoked")  # by DELETE, which gets the job's number
        token = service.token("root", Role.ADMIN)
        given = {
            "/api/v1/jobs": {"folder": "/"},
            "/api/v1/jobs/bulk": {"ids": [1], "action": "hold"},
            "/api/v1/jobs/{id}/priority": {"priority": 3},
            "/api/v1/jobs/{id}/tags": {"add": ["x"]},
            "/api/v1/hosts": {"hosts": "h3:1"},
            "/api/v1/tokens": {"name": "n", "owner": "o", "role": "view"},
            "/login": {"token": token},
        }
        job = service.submit(token)
        service.make_run(Path(job["output_dir"]).name, {"seed": 1}, [{"step": 1, "loss": 1.0}])
        (Path(job["output_dir"]) / "logs" / "rank-000.log").write_text("line\n")
        service.store.start(job["id"], (Placement("h1", 1, (0,)),), 5.0)
        for path, item in DOCUMENT["paths"].items():
            address = path.format(id=job["id"], run=job["run"], name="h2")
            if path.endswith("/compare"):
                address += f"?runs={job['run']}"
            if path.endswith("/runs/{run}/metrics"):
                address += "?keys=loss"
            if path.endswith("/events"):
                continue
            for method in item:
                body = given.get(path, {}) if method == "post" else None
                answer = service.request(method.upper(), address, body, token=token)
                assert answer.status not in (404, 405, 500), (method, path, answer)
                if answer.headers.get("content-type") == "application/json" and not path.endswith(".json"):
                    schema_of(method, path, answer.status).validate(answer.json)
            unknown = "DELETE" if "delete" not in item else "PUT"
            assert service.request(unknown, address, token=token).status == 405
        assert service.request("GET", "/api/v1/openapi.json", token=token).json == document(
            ROUTES, "1.2.3", session_cookie(service.store.service_id())
        )
