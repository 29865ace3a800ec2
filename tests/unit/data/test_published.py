"""Downloads from a server of our own: whole, missing, cut short, and what is left behind."""

import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import published
from hvd_transformer.data.published import Published
from hvd_transformer.data.text_corpus import open_corpus
from hvd_transformer.errors import UserError

FILES = {split: f"wiki.{split}.tokens" for split in ("train", "valid", "test")}
LINES = {"train": 30, "valid": 20, "test": 10}
TEXTS = {split: f"a line of {split}\n" * count for split, count in LINES.items()}


def archive() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as zipped:
        for split, name in FILES.items():
            zipped.writestr(f"tiny/{name}", TEXTS[split])
    return content.getvalue()


@pytest.fixture
def server(monkeypatch):
    """Answers each path with (announced size, bytes), 404 where there is none."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    answers: dict[str, tuple[int, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path not in answers:
                self.send_error(404)
                return
            size, data = answers[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield answers, f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.fixture
def open_tiny(server, monkeypatch, tmp_path):
    _, address = server

    def open_tiny(md5=None):
        addresses = (
            (f"{address}/tiny.zip",),
            tuple(f"{address}/{split}.txt" for split in FILES),
        )
        monkeypatch.setitem(published.TEXTS, "wikitext2", Published("Tiny", FILES, LINES, addresses, md5 or {}))
        return open_corpus(DataConfig(source="wikitext2", cache_dir=str(tmp_path)))

    return open_tiny


def check(corpus, folder):
    assert {split: span.path.read_text() for split, span in corpus.spans.items()} == TEXTS
    assert sorted(path.name for path in folder.iterdir()) == ["wikitext2", "wikitext2.lock"]
    assert sorted(path.name for path in (folder / "wikitext2").iterdir()) == sorted(FILES.values())


def test_archive_is_fetched_once(server, open_tiny, tmp_path):
    data = archive()
    server[0]["/tiny.zip"] = (len(data), data)
    check(open_tiny(), tmp_path)
    server[0].clear()
    check(open_tiny(), tmp_path)


@pytest.mark.parametrize("first", ["gone", "no archive", "short", "wrong checksum", "flipped bit"])
def test_the_next_address_is_taken(server, open_tiny, tmp_path, first):
    answers, _ = server
    data = archive()
    if first == "no archive":
        answers["/tiny.zip"] = (6, b"<html>")
    if first == "short":
        answers["/tiny.zip"] = (len(data), data[:-50])
    if first == "wrong checksum":
        answers["/tiny.zip"] = (len(data), data)
    if first == "flipped bit":
        at = data.index(b"a line of train")
        answers["/tiny.zip"] = (len(data), data[:at] + b"b" + data[at + 1 :])
    for split, text in TEXTS.items():
        answers[f"/{split}.txt"] = (len(text), text.encode())
    md5 = {"tiny.zip": hashlib.md5(b"other").hexdigest()} if first == "wrong checksum" else {}
    check(open_tiny(md5), tmp_path)


def test_no_address_works(server, open_tiny, tmp_path):
    for split, text in TEXTS.items():
        server[0][f"/{split}.txt"] = (len(text), text.encode())
    server[0]["/test.txt"] = (12, b"one line not")
    with pytest.raises(UserError) as error:
        open_tiny()
    message = str(error.value)
    assert message.startswith("Tiny cannot be downloaded (http://127.0.0.1")
    assert "the server answered 404" in message
    assert "wiki.test.tokens has 0 lines, not the published 10" in message
    assert message.endswith(f"put {', '.join(FILES.values())} into {tmp_path / 'wikitext2'} by hand")
    assert [path.name for path in tmp_path.iterdir()] == ["wikitext2.lock"]


def test_a_download_that_stands_still_ends(server, open_tiny, monkeypatch):
    monkeypatch.setattr(published, "STALL_SECONDS", 0.5)
    stuck = threading.Event()
    monkeypatch.setattr("torchtext.utils.download_from_url", lambda *_, **__: stuck.wait(20))
    server[0]["/tiny.zip"] = (4, b"1234")
    with pytest.raises(UserError, match="the download stalled for 0 s after 0 bytes"):
        open_tiny()
    stuck.set()


def test_published_data_sets_are_torchtexts():
    from torchtext.datasets.language_modeling import PennTreebank

    assert [list(addresses) for addresses in published.TEXTS["penntreebank"].addresses] == [PennTreebank.urls]
