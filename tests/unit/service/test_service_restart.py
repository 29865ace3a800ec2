"""What outlives the service's process: browsers stay logged in, earlier links do not work again."""

import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hvd_transformer.service.service import Options, TrainingService
from hvd_transformer.service.web.listening import Listening


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A tracker of run directories; gives the link that it prints."""
    service = TrainingService(Options(folder / "state", folder / "runs", Listening(folder / "state" / "service.sock")))
    thread = threading.Thread(target=service.run, name="service")
    thread.start()
    try:
        yield service.link()
    finally:
        service.stop()
        thread.join(20)
        service.close()
        assert not thread.is_alive()


def ask(link: str, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
    """The status, the session's cookie if one is set, and the document."""
    with closing(http.client.HTTPConnection(urlsplit(link).netloc, timeout=10)) as connection:
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        cookie = (answer.getheader("set-cookie") or "").partition(";")[0]
        return answer.status, cookie, json.loads(answer.read() or b"null")


def token_in(link: str) -> str:
    return urlsplit(link).fragment.removeprefix("token=")


def test_a_restart_logs_no_browser_out(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        _, cookie, _ = ask(first, "POST", "/login", {"token": token_in(first)})
        _, _, before = ask(first, "GET", "/api/v1/me", headers={"Cookie": cookie})
    with serving(tmp_path) as second:
        status, _, after = ask(second, "GET", "/api/v1/me", headers={"Cookie": cookie})
        assert (status, after["owner"], after["role"]) == (200, before["owner"], "admin")
        assert ask(second, "POST", "/login", {"token": token_in(first)})[0] == 401
        headers = {"Cookie": cookie, "X-CSRF": before["csrf"]}
        (link,) = ask(second, "GET", "/api/v1/tokens", headers=headers)[2]["items"]
        assert ask(second, "DELETE", f"/api/v1/tokens/{link['id']}", headers=headers)[0] == 204
        assert ask(second, "GET", "/api/v1/me", headers={"Cookie": cookie})[0] == 401
        assert ask(second, "GET", "/api/v1/me", headers={"Authorization": f"Bearer {token_in(second)}"})[0] == 401
