"""Where the service may listen, and what is refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.web.listening import Listening

SOCKET = Path("/nowhere/service.sock")
TLS = {"certificate": Path("c.pem"), "key": Path("k.pem")}
NAMED = {"public_hosts": ("train.example",)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"port": 65535},
        {"address": "localhost"},
        {"address": "127.1.2.3"},
        {"address": "::1"},
        {"address": "192.0.2.1", **TLS},
        {"address": "0.0.0.0", **TLS, **NAMED},
        {"address": "::", "behind_proxy": True, **NAMED},
        {"behind_proxy": True, "public_hosts": ("train.example", "192.0.2.7", "2001:db8::1")},
    ],
)
def test_what_is_allowed(options: dict[str, Any]) -> None:
    Listening(SOCKET, **options).check()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"address": "192.0.2.1"}, "--address 192.0.2.1: tokens would cross the network unencrypted"),
        ({"address": "0.0.0.0"}, "--address 0.0.0.0: tokens would cross the network unencrypted"),
        ({"address": "head.example"}, "--address head.example: tokens would cross"),
        ({"address": "127.0.0.1.example"}, "--address 127.0.0.1.example: tokens would cross"),
        ({"address": "192.0.2.1", **NAMED}, "--address 192.0.2.1: tokens would cross"),
        ({"address": "::", **TLS}, "--address ::: needs --public-host NAME"),
        ({"behind_proxy": True}, "--behind-proxy: needs --public-host NAME"),
        ({"behind_proxy": True, **NAMED, **TLS}, "--behind-proxy: the proxy has the certificate"),
        ({"certificate": Path("c.pem")}, "--certificate and --key: give both or neither"),
        ({"key": Path("k.pem")}, "--certificate and --key: give both or neither"),
        ({"port": 65536}, "--port 65536: must be from 0"),
        ({"public_hosts": ("https://train.example",)}, "--public-host https://train.example: must be a host name"),
        ({"public_hosts": ("train.example:80",)}, "--public-host train.example:80: must be a host name"),
        ({"public_hosts": ("*",)}, "--public-host *: must be a host name"),
        ({"public_hosts": ("",)}, "--public-host : must be a host name"),
    ],
)
def test_what_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        Listening(SOCKET, **options).check()
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://127.0.0.1:80"),
        ({"address": "::1"}, "http://[::1]:80"),
        ({"address": "192.0.2.1", **TLS}, "https://192.0.2.1:80"),
        ({"address": "::", **TLS, **NAMED}, "https://train.example:80"),
        ({"behind_proxy": True, **NAMED}, "https://train.example"),
    ],
)
def test_the_address_for_browsers(options: dict[str, Any], url: str) -> None:
    assert Listening(SOCKET, **options).url(80) == url


def test_the_names_that_requests_may_have() -> None:
    names = Listening(SOCKET, address="0:0:0:0:0:0:0:1", public_hosts=("Train.Example.",)).names
    assert set(names) == {"localhost", "127.0.0.1", "::1", "train.example"}


def test_an_unreadable_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("nothing")
    for key, line in (("none.pem", "--key "), ("c.pem", "--certificate ")):
        with pytest.raises(UserError) as error:
            Listening(SOCKET, certificate=tmp_path / "c.pem", key=tmp_path / key).tls()
        assert str(error.value).startswith(line)
        assert "\n" not in str(error.value)
