"""What happens to each request of the API: who sends it, whether it may, what it says; then its handler runs."""

import gzip
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar, get_origin

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.job_table import QueueFull
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.access.authentication import Authentication, User
from hvd_transformer.service.web.access.security import failure
from hvd_transformer.service.web.api.routes import Call, Handler, Route
from hvd_transformer.service.web.api.run_table import RunTable
from hvd_transformer.service.web.event_stream import EventStream
from hvd_transformer.service.web.parts import Service
from hvd_transformer.service.web.pool import Pool

_Model = TypeVar("_Model", bound=BaseModel)
_NOBODY = User("", Role.VIEW)
_PACKED_BYTES, _PACKED_LEVEL = 2000, 4  # from so many bytes on; curves become a third in a millisecond


class Endpoints:
    """Makes Starlette's endpoints of the routes."""

    def __init__(
        self, service: Service, authentication: Authentication, events: EventStream, pool: Pool, turns: Pool
    ) -> None:
        """`turns`: the threads of the routes that take turns."""
        self._service, self._authentication, self._events = service, authentication, events
        self._pool, self._turns = pool, turns
        self._table = RunTable(service.store, service.runs)

    def of(self, handler: Handler, route: Route) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of a route and its handler."""

        async def endpoint(request: Request) -> Response:
            body = await request.body()
            pool = self._turns if route.takes_turns else self._pool
            return await pool.run(partial(self._answer, handler, route, request, body))

        return endpoint

    def _answer(self, handler: Handler, route: Route, request: Request, body: bytes) -> Response:
        try:
            call = self._check(route, request, body)
        except UserError as error:
            return _refusal(error, 422)
        try:
            answer = handler(call)
        except UserError as error:
            return _refusal(error, route.refused)
        if isinstance(answer, Response):
            return answer
        if answer is None:
            return Response(status_code=204)
        return _json(answer, route.status, request)

    def _check(self, route: Route, request: Request, body: bytes) -> Call:
        user = _NOBODY
        if route.role is not None:
            user = self._authentication.user(request)
            if not user.may(route.role):
                raise HTTPException(403, f"needs the role {route.role.value}; yours is {user.role.value}")
        if route.needs_queue and self._service.queue is None:
            raise HTTPException(
                409, "this service shows runs and has no queue: start it with hosts or --engine (serve --help)"
            )
        return Call(
            service=self._service,
            table=self._table,
            authentication=self._authentication,
            events=self._events,
            request=request,
            user=user,
            path=request.path_params,
            query=None if route.query is None else parse_query(route.query, request),
            body=None if route.body is None else _parse_body(route.body, request, body),
        )


def _json(answer: BaseModel, status: int, request: Request) -> Response:
    body, headers = answer.model_dump_json().encode(), {"Vary": "Accept-Encoding"}
    if len(body) >= _PACKED_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = gzip.compress(body, _PACKED_LEVEL, mtime=0), "gzip"
    return Response(body, status, headers, "application/json")


def _refusal(error: UserError, status: int) -> Response:
    """A fault of the database, such as a full disk, is not the client's."""
    if isinstance(error, QueueFull):
        status = HTTPStatus.TOO_MANY_REQUESTS
    return failure(503 if isinstance(error.__cause__, sqlite3.Error) else status, str(error))


def _parse_body(model: type[_Model], request: Request, body: bytes) -> _Model:
    # No form of another site can send this type.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(400, "Content-Type: must be application/json")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise UserError(_in_words(error, model)) from None


def parse_query(model: type[_Model], request: Request) -> _Model:
    """The parameters behind the path's `?`. Raises `UserError`."""
    values: dict[str, Any] = {}
    for key, value in request.query_params.multi_items():
        known = model.model_fields.get(key)
        if known is not None and get_origin(known.annotation) is list:
            values.setdefault(key, []).append(value)
        elif key in values:
            raise UserError(f"{key}: given twice")
        else:
            values[key] = value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise UserError(_in_words(error, model)) from None


def _in_words(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing that is wrong. The value itself is not repeated: it may be a secret in the wrong place."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        known = [field.alias or name for name, field in model.model_fields.items()]
        return f"{where[:100]}: unknown field; known: {', '.join(known) or 'none'}"
    return f"{where}: {first['msg']}" if where else str(first["msg"])
