"""The client against a server on a real Unix socket: connections, addresses, tokens, and every refusal in words."""

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from command_service import FakeService, event, fake_service, fake_tls_service

from hvd_transformer.errors import UserError
from hvd_transformer.service.remote import client as client_module
from hvd_transformer.service.remote.address import Address
from hvd_transformer.service.remote.client import Busy, Client, Interrupted, NoService, Refused


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SERVER", "TOKEN"):
        monkeypatch.delenv(f"HVD_TRANSFORMER_{name}", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "data" / "hvd-transformer" / "service"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def service(state: Path) -> Iterator[FakeService]:
    with fake_service(state) as made:
        yield made


@pytest.fixture
def client(service: FakeService) -> Iterator[Client]:
    with closing(Client(Address.find(None))) as made:
        yield made


def test_requests_and_answers(service: FakeService, client: Client) -> None:
    service.answers |= {
        "GET jobs/7": {"id": 7},
        "POST jobs/7/cancel": (201, {"done": 1}),
        "DELETE tokens/3": (204, b""),
    }
    assert client.get("jobs/7", state="A", tag=None, user="", limit=3, key=["a", "b"]) == {"id": 7}
    assert client.post("jobs/7/cancel", {"now": False}, {"X-One": "1"}) == {"done": 1}
    assert client.delete("tokens/3") is None
    first, second, _ = service.asked
    assert first.query == {"state": ["A"], "limit": ["3"], "key": ["a", "b"]}
    assert second.body == {"now": False}
    assert (second.headers["Content-Type"], second.headers["X-One"]) == ("application/json", "1")
    assert "Authorization" not in first.headers


def test_a_path_is_quoted(service: FakeService, client: Client) -> None:
    with pytest.raises(Refused):
        client.get("hosts/a b?x=1#y")
    assert service.asked[0].what == "GET hosts/a%20b%3Fx%3D1%23y"


def test_pages_are_followed_over_one_connection(service: FakeService, client: Client) -> None:
    pages = {None: ([1, 2], "b"), "b": ([3], "c"), "c": ([], None)}
    service.answers["GET jobs"] = lambda asked: dict(
        zip(("items", "next"), pages[asked.query.get("cursor", [None])[0]], strict=True)
    )
    assert list(client.items("jobs", state="QUEUED")) == [1, 2, 3]
    assert [asked.query["state"] for asked in service.asked] == [["QUEUED"]] * 3
    assert len(service.connections) == 1


def test_a_connection_that_the_service_has_ended_is_made_again(service: FakeService, client: Client) -> None:
    assert client.get("me") == {"owner": "ann"}
    service.connections[0].shutdown(socket.SHUT_RDWR)
    assert client.get("me") == {"owner": "ann"}
    assert len(service.connections) == len(service.asked) == 2


def test_the_folder_of_another_user(state: Path) -> None:
    state.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(54321)
    try:
        with pytest.raises(
            UserError, match=f"^{state}: is the folder of another user's service; ask its admin"
        ) as error:
            Client(Address.find(str(state))).get("me")
    finally:
        if is_root:
            os.seteuid(0)
        state.chmod(0o700)
    assert not isinstance(error.value, NoService)  # whose database the command would look for


def test_no_service(state: Path, tmp_path: Path) -> None:
    for find, folder in ((None, state), (str(state), state), (str(tmp_path / "absent"), tmp_path / "absent")):
        with pytest.raises(NoService) as error:
            Client(Address.find(find)).get("me")
        assert str(error.value) == f"{folder}: no service is running; start it with hvd-transformer serve"
    with closing(socket.socket(socket.AF_UNIX)) as left_over:
        os.chdir(state)
        left_over.bind("service.sock")
    with pytest.raises(NoService, match=f"^{state}: no service is running"):
        Client(Address.find(None)).get("me")
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(NoService, match=f"^{url}: no service answers: Connection refused"):
            Client(Address.find(url)).get("me")


def test_the_path_of_a_socket_may_be_long(tmp_path: Path) -> None:
    state = tmp_path / ("x" * 120)
    state.mkdir()
    short = tmp_path / "s"
    short.symlink_to(state)
    with fake_service(short):
        assert Client(Address.find(str(state))).get("me") == {"owner": "ann"}


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ((400, {"error": "seed=x: must be\na number"}), "seed=x: must be a number"),
        ((403, {"error": "job 7 is bob's"}), "job 7 is bob's"),
        ((404, {"error": "job 7: no such job"}), "job 7: no such job"),
        ((409, {"error": "job 7 has ended"}), "job 7 has ended"),
        ((500, b"<html>"), "{state}: answers with HTTP status 500 Internal Server Error"),
        ((404, {"detail": "x"}), "{state}: answers with HTTP status 404 Not Found"),
        ((404, []), "{state}: answers with HTTP status 404 Not Found"),
        (
            (401, {"error": "log in, or send a token in the header"}),
            "{state}: needs a token; put one into {config}/hvd-transformer/token (mode 0600) or "
            "$HVD_TRANSFORMER_TOKEN; admins make them with hvd-transformer token add",
        ),
    ],
)
def test_refusals(service: FakeService, client: Client, state: Path, answer: object, line: str) -> None:
    service.answers["POST jobs/7/cancel"] = answer
    with pytest.raises(Refused) as error:
        client.post("jobs/7/cancel", {})
    assert str(error.value) == line.format(state=state, config=os.environ["XDG_CONFIG_HOME"])
    assert isinstance(error.value, UserError)


@pytest.mark.parametrize(
    ("answer", "kind", "line"),
    [
        ((502, b"<html>"), Interrupted, "{state}: answers with HTTP status 502 Bad Gateway"),
        ((504, b"<html>"), Interrupted, "{state}: answers with HTTP status 504 Gateway Timeout"),
        ((503, b"<html>"), Busy, "{state}: answers with HTTP status 503 Service Unavailable"),
        ((503, {"error": "the service is busy: try again"}), Busy, "the service is busy: try again"),
    ],
)
def test_a_service_that_is_away_or_busy(
    service: FakeService, client: Client, state: Path, answer: object, kind: type[UserError], line: str
) -> None:
    """Behind a proxy, a restart of the service is an answer of the proxy's."""
    service.answers["GET me"] = answer
    with pytest.raises(kind) as error:
        client.get("me")
    assert str(error.value) == line.format(state=state)
    service.answers["GET me"] = {"owner": "ann"}
    assert client.get("me") == {"owner": "ann"}


def test_something_else_answers(service: FakeService, client: Client, state: Path) -> None:
    service.answers["GET me"] = b"<html>"
    with pytest.raises(UserError, match=f"^{state}: does not answer like hvd-transformer serve$"):
        client.get("me")


def test_events(service: FakeService, client: Client) -> None:
    service.streams = [
        [b": x\n\n", event("job", id=7, state="RUNNING"), b": ping\n\n", b'event: run\ndata: {"id":', b' "a"}\n\n'],
        [event("hosts")[:-5]],
    ]  # fmt: skip
    assert list(client.events()) == [
        ("open", {}), ("ping", {}), ("job", {"id": 7, "state": "RUNNING"}), ("ping", {}), ("run", {"id": "a"}),
    ]  # fmt: skip
    assert list(client.events()) == [("open", {})]  # one that is cut off is none


def breaking(state: Path, times: int) -> list[dict[str, str]]:
    """A server that ends `times` connections without an answer, then answers; returns the headers that come."""
    seen: list[dict[str, str]] = []
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(state, os.O_PATH | os.O_DIRECTORY)
    listener.bind(f"/proc/self/fd/{folder}/service.sock")  # however long the folder's path is
    os.close(folder)
    listener.listen()

    def serve() -> None:
        with listener:
            for number in range(times + 1):
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as stream:
                    lines = iter(lambda: stream.readline().decode().strip(), "")
                    next(lines)
                    seen.append(dict(line.split(": ", 1) for line in lines))
                    stream.read(int(seen[-1]["Content-Length"]))
                    if number == times:
                        body = json.dumps({"ids": [1]})
                        connection.sendall(
                            f"HTTP/1.1 201 Created\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
                        )

    threading.Thread(target=serve, daemon=True).start()
    return seen


def test_submitting_again_has_the_same_key(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_PAUSES", (0.0, 0.0))
    seen = breaking(state, times=2)
    client = Client(Address.find(None))
    assert client.submit({"folder": "/"}) == {"ids": [1]}
    assert len(seen) == 3
    assert len({headers["Idempotency-Key"] for headers in seen}) == 1


@pytest.mark.parametrize("status", [502, 504])
def test_a_submission_through_a_proxy_is_sent_again(
    service: FakeService, client: Client, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """The proxy cannot tell whether the request has arrived."""
    monkeypatch.setattr(client_module, "_PAUSES", (0.0, 0.0, 0.0))
    answers: list[object] = [(status, b"<html>"), (503, b"<html>"), (201, {"ids": [1]})]
    service.answers["POST jobs"] = lambda asked: answers.pop(0)
    assert client.submit({"folder": "/"}) == {"ids": [1]}
    assert len({asked.headers["Idempotency-Key"] for asked in service.asked}) == 1
    answers[:] = [(503, {"error": "the disk is full"})]
    with pytest.raises(Busy, match="the disk is full"):  # it was refused: nothing has been done
        client.submit({"folder": "/"})


def test_a_submission_waits_for_a_service_that_is_away_once_it_may_have_arrived(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoService):
        Client(Address.find(None)).submit({"folder": "/"})  # nothing can have arrived
    seen, pauses = [breaking(state, times=1)], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            (state / "service.sock").unlink()
        elif len(pauses) == 3:
            seen.append(breaking(state, times=0))

    monkeypatch.setattr(client_module.time, "sleep", sleep)
    assert Client(Address.find(None)).submit({"folder": "/"}) == {"ids": [1]}
    assert len(pauses) == 3
    first, second = seen
    assert second[0]["Idempotency-Key"] == first[0]["Idempotency-Key"]


def test_other_changes_are_not_asked_for_again(state: Path) -> None:
    seen = breaking(state, times=1)
    with pytest.raises(Interrupted, match="the service ended before it answered: "):
        Client(Address.find(None)).post("jobs/7/retry", {})
    assert len(seen) == 1


def test_https_where_there_is_only_http() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"https://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(NoService, match=f"^{url}: does not speak TLS"):
            Client(Address.find(url)).get("me")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=x", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", "-x509", *kind, *names, *files], check=True, capture_output=True)
    monkeypatch.setenv("HVD_TRANSFORMER_TOKEN", "secret")
    with fake_tls_service(certificate, key) as (service, port):
        with pytest.raises(UserError, match=f"^https://localhost:{port}: its certificate is not trusted: self.signed"):
            Client(Address.find(f"https://localhost:{port}")).get("me")
        assert service.asked == []  # and nothing was sent
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with pytest.raises(UserError, match="its certificate is not trusted: .*127.0.0.1"):
            Client(Address.find(f"https://127.0.0.1:{port}")).get("me")
        with closing(Client(Address.find(f"https://localhost:{port}"))) as client:
            assert client.get("me") == {"owner": "ann"}
        assert [asked.headers["Authorization"] for asked in service.asked] == ["Bearer secret"]
