"""The OpenAPI document, made of the routes and of the models of what they take and answer."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from hvd_transformer.service.web.api import models
from hvd_transformer.service.web.api.routes import Route

_REFERENCE = "#/components/schemas/{model}"
_ID = re.compile(r"\{(\w+)\}")


def document(routes: Sequence[Route], version: str, cookie: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes. `cookie`: the name of the session's."""
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "hvd-transformer", "version": version, "description": "The training service's interface."},
        "paths": paths,
        "components": {
            "schemas": schemas.definitions,
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer"},
                "session": {"type": "apiKey", "in": "cookie", "name": cookie},
            },
        },
    }


class _Schemas:
    """The schemas of all models that the routes name."""

    def __init__(self, routes: Sequence[Route]) -> None:
        wanted: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(models.Failure, "serialization"): None}
        for route in routes:
            for model in (route.query, route.body):
                if model is not None:
                    wanted[model, "validation"] = None
            if route.answer is not None:
                wanted[route.answer, "serialization"] = None
        self._of, found = models_json_schema(list(wanted), ref_template=_REFERENCE)
        self.definitions: dict[str, Any] = found["$defs"]

    def of(self, model: type[BaseModel], mode: JsonSchemaMode) -> dict[str, Any]:
        """The reference to a model's schema."""
        return self._of[model, mode]

    def parameters(self, query: type[BaseModel]) -> list[dict[str, Any]]:
        """A query's fields as parameters; the query itself is no schema of the document."""
        schema = self.definitions[self.of(query, "validation")["$ref"].rpartition("/")[2]]
        return [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
            for name, field in schema["properties"].items()
        ]


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "integer" if name == "id" else "string"},
        }
        for name in _ID.findall(route.path)
    ]
    parameters += [{"name": name, "in": "header", "schema": {"type": "string"}} for name in route.headers]
    if route.query is not None:
        parameters += schemas.parameters(route.query)
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "description": "Anybody." if route.role is None else f"Role: {route.role.value}.",
        "security": [] if route.role is None else [{"token": []}, {"session": []}],
        "parameters": parameters,
        "responses": {
            str(route.status): _success(route, schemas),
            "default": _json("The request was refused.", schemas.of(models.Failure, "serialization")),
        },
    }
    if route.body is not None:
        schema = schemas.of(route.body, "validation")
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _success(route: Route, schemas: _Schemas) -> dict[str, Any]:
    phrase = HTTPStatus(route.status).phrase
    if route.text:
        return {"description": phrase, "content": {route.text.partition(";")[0]: {"schema": {"type": "string"}}}}
    if route.answer is not None:
        return _json(phrase, schemas.of(route.answer, "serialization"))
    return {"description": phrase}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}
