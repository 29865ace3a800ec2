"""The HTTP interface and the pages as one ASGI application."""

from collections.abc import Collection
from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.sessions import Sessions
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web import static_files
from hvd_transformer.service.web.access.authentication import Authentication, session_cookie
from hvd_transformer.service.web.access.security import LimitedBody, SameOrigin, SecurityHeaders, canonical, failure
from hvd_transformer.service.web.api import host_routes, job_routes, models, prometheus, run_routes, token_routes
from hvd_transformer.service.web.api.endpoint import Endpoints
from hvd_transformer.service.web.api.openapi import document
from hvd_transformer.service.web.api.routes import BASE, Call, Route
from hvd_transformer.service.web.connection import Room
from hvd_transformer.service.web.event_response import EventResponse
from hvd_transformer.service.web.event_stream import EventStream
from hvd_transformer.service.web.parts import Service
from hvd_transformer.service.web.pool import Pool

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def health(call: Call) -> Response | models.Health:
    problem = call.service.problem()
    return models.Health(status="ok") if problem is None else failure(503, problem)


def openapi(call: Call) -> Response:
    cookie = session_cookie(call.service.store.service_id())
    return JSONResponse(document(ROUTES, call.service.version, cookie))


_EVENTS = Route(
    "GET",
    f"{BASE}/events",
    Role.VIEW,
    None,
    "News as Server-Sent Events: job, run, hosts, waits (reasons and estimates) and resync. Last-Event-ID resumes.",
    text="text/event-stream",
    headers=("Last-Event-ID",),
)
ROUTES = [
    *run_routes.ROUTES,
    *job_routes.ROUTES,
    *host_routes.ROUTES,
    _EVENTS,
    *token_routes.ROUTES,
    Route("GET", f"{BASE}/openapi.json", Role.VIEW, openapi, "This document.", text="application/json"),
    *prometheus.ROUTES,
    Route("GET", "/health", None, health, "Whether the service works: 503 and why, if not.", models.Health),
]


class App:
    """The application, of one event loop."""

    def __init__(self, service: Service, names: Collection[str] = LOOPBACK, behind_proxy: bool = False) -> None:
        """`names`: under which the service is reached. `behind_proxy`: a proxy with TLS stands before it."""
        self._pool, self._turns = Pool(), Pool(threads=2)
        sessions = Sessions(service.store.database)
        cookie = session_cookie(service.store.service_id())
        self._authentication = Authentication(service.tokens, sessions, cookie, behind_proxy=behind_proxy)
        self._events = EventStream(service.store, service.runs, self._pool)
        endpoints = Endpoints(service, self._authentication, self._events, self._pool, self._turns)
        routes: list[BaseRoute] = [
            StarletteRoute(
                route.path,
                self._stream if route.handler is None else endpoints.of(route.handler, route),
                methods=[route.method],
            )
            for route in ROUTES
        ]
        inner = Starlette(
            routes=[*routes, *static_files.ROUTES],
            exception_handlers={HTTPException: _refused, UserError: _wrong, Exception: _failed},
        )
        inner.router.redirect_slashes = False
        schemes = ("https", "http") if behind_proxy else None
        self._app: ASGIApp = SecurityHeaders(SameOrigin(LimitedBody(inner), [*map(canonical, names)], schemes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def end_streams(self) -> None:
        """End the requests that would last for ever."""
        self._events.close()

    def close(self) -> None:
        """End the threads."""
        self._pool.close()
        self._turns.close()

    async def _stream(self, request: Request) -> Response:
        await request.body()
        find_user = partial(self._authentication.user, request)
        await self._pool.run(find_user)
        room: Room = request.state.room
        if room.streams >= room.most_streams:
            raise HTTPException(503, "too many listen to events: close some pages", {"Retry-After": "60"})

        async def is_still_allowed() -> bool:
            try:
                await self._pool.run(find_user)
            except HTTPException as error:
                return error.status_code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
            return True

        return EventResponse(self._events.read(request.headers.get("last-event-id"), is_still_allowed), room)


def create_app(service: Service, names: Collection[str] = LOOPBACK, behind_proxy: bool = False) -> App:
    """The application of a service."""
    return App(service, names, behind_proxy)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failure(error.status_code, error.detail, dict(error.headers or {}))


async def _wrong(request: Request, error: Exception) -> Response:
    return failure(422, str(error))


async def _failed(request: Request, error: Exception) -> Response:
    return failure(500, f"{type(error).__name__} in the service: see its log")
