"""Which service a command talks to, and with which token."""

from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.remote.address import Address
from hvd_transformer.service.remote.client import Client


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SERVER", "TOKEN"):
        monkeypatch.delenv(f"HVD_TRANSFORMER_{name}", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "data" / "hvd-transformer" / "service"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("server", "line"),
    [
        ("ftp://host", "--server ftp://host: must be like https://host:8080, or the service's state folder"),
        ("https://", "--server https://: must be like"),
        ("https://host/api", "--server https://host/api: must be like"),
        ("https://user:secret@host", "--server https://user:secret@host: must be like"),
        ("https://host:port", "--server https://host:port: must be like"),
        ("https://[::1", "--server https://[::1: must be like"),
        ("http://host:8080", "--server http://host:8080: the token would cross the network unencrypted; use https://"),
        ("http://10.0.0.1", "--server http://10.0.0.1: the token would cross the network unencrypted; use https://"),
    ],
)
def test_addresses_that_are_refused(server: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        Address.find(server)
    assert str(error.value).startswith(line)


def test_which_service(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Address.find(None) == Address(state)
    monkeypatch.setenv("HVD_TRANSFORMER_SERVER", "https://head:8080/")
    assert Address.find(None) == Address(None, "https://head:8080")
    assert Address.find(str(tmp_path)) == Address(tmp_path)
    assert Address.find("~/state") == Address(Path.home() / "state")
    assert Address.find("~no-such-user") == Address(Path.cwd() / "~no-such-user")
    for url in ("http://127.0.0.1:8080", "http://localhost", "http://[::1]:80", "https://head"):
        assert Address.find(url) == Address(None, url)
    monkeypatch.setenv("HVD_TRANSFORMER_SERVER", "nonsense://x")
    with pytest.raises(UserError, match=r"^\$HVD_TRANSFORMER_SERVER nonsense://x: must be like"):
        Address.find(None)


def authorization() -> str | None:
    """What is sent to a URL."""
    return Client(Address.find("https://head"))._headers.get("Authorization")


def test_the_token(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert authorization() is None
    file = tmp_path / "config" / "hvd-transformer" / "token"
    file.parent.mkdir(parents=True)
    file.write_text("from-file\n")
    file.chmod(0o640)
    with pytest.raises(UserError, match=f"^{file}: must be yours, and others must not read it; use: chmod 600 {file}$"):
        authorization()
    file.chmod(0o600)
    assert authorization() == "Bearer from-file"
    for wrong in ("two words", "line\nbreak", "ü", "x" * 1001, " "):
        file.write_text(wrong)
        with pytest.raises(UserError, match=f"^{file}: is not a token$"):
            authorization()
    monkeypatch.setenv("HVD_TRANSFORMER_TOKEN", "from-environment")
    assert authorization() == "Bearer from-environment"
    monkeypatch.setenv("HVD_TRANSFORMER_TOKEN", "a\r\nX-Header: b")
    with pytest.raises(UserError, match=r"^\$HVD_TRANSFORMER_TOKEN: is not a token$"):
        authorization()
