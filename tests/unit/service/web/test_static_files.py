"""The pages' files as browsers get them."""

import gzip
import re
from collections.abc import Iterator

import pytest
from web_service import Running, running

from hvd_transformer.service.web.static_files import FOLDER

SUFFIXES = {".html", ".js", ".css", ".svg", ""}
FILES = sorted(
    path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in SUFFIXES and path.is_file()
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.mark.parametrize("path", ["/", "/runs/0123456789ab", "/compare", "/hosts", "/queue", "/queue?state=HELD"])
def test_each_page_is_the_one_document(service: Running, path: str) -> None:
    answer = service.request("GET", path)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert answer.body == (FOLDER / "index.html").read_bytes()


def test_each_file_is_served_with_its_type(service: Running) -> None:
    types = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "html": "text/html"}
    for name in FILES:
        answer = service.request("GET", f"/static/{name}")
        assert answer.status == 200, name
        assert answer.body == (FOLDER / name).read_bytes()
        assert answer.headers["content-type"].partition(";")[0] == types.get(name.rpartition(".")[2], "text/plain")


def test_a_file_that_the_browser_has_is_not_sent_again(service: Running) -> None:
    first = service.request("GET", "/static/index.html")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = service.request("GET", "/static/index.html", headers={"If-None-Match": known})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert service.request("GET", "/static/index.html", headers={"If-None-Match": '"other"'}).status == 200


def test_files_are_packed_for_who_can_unpack_them(service: Running) -> None:
    name = max(FILES, key=lambda name: (FOLDER / name).stat().st_size)
    plain = service.request("GET", f"/static/{name}")
    packed = service.request("GET", f"/static/{name}", headers={"Accept-Encoding": "br, gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 2


def test_the_document_names_every_module_that_each_page_needs() -> None:
    """They arrive together: otherwise a browser learns of a module when the one that imports it has arrived."""
    modules, unread = set(), ["app.js"]
    while unread:
        name = unread.pop()
        imported = set(re.findall(r'from "\./([\w/]+\.js)";', _code(name)))
        unread += imported - modules
        modules |= imported
    named = re.findall(r'<link rel="modulepreload" href="/static/([\w/]+\.js)">', _code("index.html"))
    assert sorted(named) == sorted(modules)


def _code(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def test_the_document_needs_nothing_that_its_policy_forbids() -> None:
    """No inline script or style, and nothing from elsewhere."""
    text = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)", text)
    assert not re.search(r"<style|\sstyle=|\son\w+=", text)
    assert not re.search(r"""(src|href)=["'](https?:)?//""", text)


def test_the_head_of_a_file(service: Running) -> None:
    answer = service.request("HEAD", "/static/index.html")
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.headers["content-length"]) == (FOLDER / "index.html").stat().st_size
    assert service.request("POST", "/static/index.html", {}).status == 405
