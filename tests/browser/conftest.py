"""A browser for all tests of the pages, and a service with data for each."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from browser import chromium
from browser.chromium import Browser
from browser.fake_api import State
from browser.fake_service import FakeServer


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One chromium for the session."""
    if reason := chromium.missing():
        pytest.skip(reason)
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.quit()


@contextmanager
def serving(archived: int = 120, queue_on: bool = True) -> Iterator[FakeServer]:
    server = FakeServer(State(archived, queue_on))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.state.close_streams()
        server.shutdown()
        server.server_close()


@pytest.fixture
def service() -> Iterator[FakeServer]:
    with serving() as server:
        yield server


@pytest.fixture
def another_service() -> Callable[..., AbstractContextManager[FakeServer]]:
    """For services with other data: `archived` runs, or no queue."""
    return serving


Visit = Callable[..., Browser]


@pytest.fixture
def visit(window: Browser, service: FakeServer) -> Iterator[Visit]:
    """Opens pages of `service`, logged in; no script may have failed at the end."""

    def go(path: str = "/", token: str = "admin-token", server: FakeServer | None = None) -> Browser:
        url = (server or service).url
        hash_ = f"#token={token}" if token else ""
        window.driver.get(f"{url}{path}{hash_}")
        return window

    window.screen(chromium.DESK)
    window.driver.get(f"{service.url}/static/icon.svg")
    window.forget()
    window.complaints()
    yield go
    complaints = window.complaints()
    window.driver.get("about:blank")  # a page that stayed open would go on asking
    assert complaints == []
