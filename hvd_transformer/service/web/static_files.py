"""The pages: a few files of this package, looked up by name, so that no address leads to any other file."""

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from hvd_transformer.service.web.access.security import failure

FOLDER = Path(__file__).parent / "pages"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    "": "text/plain; charset=utf-8",  # LICENSE
}
_INDEX = "index.html"
# Addresses that show pages: one document, whose scripts look at the address.
_PAGES = ("/", "/runs/{run}", "/compare", "/hosts", "/queue")


class _File(NamedTuple):
    plain: bytes
    packed: bytes
    tag: str
    type: str


@cache
def _names() -> dict[str, Path]:
    """The files by the names that addresses have for them."""
    files = (path for path in FOLDER.rglob("*") if path.is_file() and path.suffix in _TYPES)
    return {path.relative_to(FOLDER).as_posix(): path for path in files}


@cache
def _read(path: Path) -> _File:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return _File(content, gzip.compress(content, mtime=0), tag, _TYPES[path.suffix])


async def page(request: Request) -> Response:
    """The document of all pages."""
    return _answer(request, _INDEX)


async def file(request: Request) -> Response:
    """A file of theirs."""
    return _answer(request, request.path_params["name"])


def _answer(request: Request, name: str) -> Response:
    path = _names().get(name)
    if path is None:
        return failure(404, "no such page")
    found = _read(path)
    headers = {"ETag": found.tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if found.tag in (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    headers["Content-Type"] = found.type
    if "gzip" in request.headers.get("accept-encoding", "") and len(found.packed) < len(found.plain):
        return Response(found.packed, headers={**headers, "Content-Encoding": "gzip"})
    return Response(found.plain, headers=headers)


ROUTES = [Route("/static/{name:path}", file), *(Route(path, page) for path in _PAGES)]
