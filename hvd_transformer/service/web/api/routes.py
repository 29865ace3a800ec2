"""What a route is: its path, who may use it, what it takes and what it answers."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from hvd_transformer.service.jobs import LONGEST_NUMBER
from hvd_transformer.service.storage.tokens import Role
from hvd_transformer.service.web.access.authentication import Authentication, User
from hvd_transformer.service.web.api.run_table import RunTable
from hvd_transformer.service.web.event_stream import EventStream
from hvd_transformer.service.web.parts import Service

BASE = "/api/v1"


@dataclass(frozen=True)
class Call:
    """One request, checked: `path` are the values of the route's path, `query` and `body` of its models."""

    service: Service
    table: RunTable
    authentication: Authentication
    events: EventStream
    request: Request
    user: User
    path: dict[str, Any] = field(default_factory=dict)
    query: Any = None
    body: Any = None

    @property
    def number(self) -> int:
        """The `{id}` in the path. Raises `HTTPException` 404 if it is no number."""
        text: str = self.path["id"]
        if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER):
            raise HTTPException(404, "not the number of anything")
        return int(text)


Handler = Callable[[Call], BaseModel | Response | None]


@dataclass(frozen=True)
class Route:
    """`role`: who may use it; None: anybody. `handler` runs in a thread of the pool; None: `App` has it.

    `refused`: the status where `handler` raises `UserError`. `text`: the media type of an answer that is no JSON.
    `takes_turns`: one such request at a time does its work, for seconds; the others wait apart from all other requests.
    """

    method: str
    path: str
    role: Role | None
    handler: Handler | None
    summary: str
    answer: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    status: int = 200
    refused: int = 422
    needs_queue: bool = False
    takes_turns: bool = False
    text: str = ""
    headers: tuple[str, ...] = ()  # of the request, beside those that all have

    @property
    def operation(self) -> str:
        """A name that no other route has: method and path in one word."""
        return re.sub(r"\W+", "_", f"{self.method.lower()}{self.path.removeprefix(BASE)}").strip("_")
