"""Published data sets: downloads from a local server, names, and what is left behind by a failure."""

import gzip
import hashlib
import io
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hvd_transformer.config import load
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import published
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.parallel_text import PairFiles
from hvd_transformer.data.published import PAIRS, Published, source_path
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
    assert {split: own.spans[0].path.read_text() for split, own in corpus.splits.items()} == TEXTS
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


def found(folder: Path, source: str) -> Path:
    config = load(overrides=[f"data.source={source}", f"data.cache_dir={folder / 'cache'}"]).data
    return source_path(config, PAIRS, ALONE)


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multi30k").mkdir()
    assert found(tmp_path, "multi30k") == tmp_path / "multi30k"


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.source=multi3k: .*no known name, did you mean multi30k\?"):
        found(tmp_path, "multi3k")
    folder = tmp_path / "cache" / "wmt14"
    with pytest.raises(UserError) as caught:
        found(tmp_path, "wmt14")
    wanted = f"put train.{{de,en}}, valid.{{de,en}} and test.{{de,en}} into {folder} by hand"
    more = "its test sets are at https://statmt.org/wmt14/test-full.tgz, or data.test=sacrebleu:wmt14 downloads them"
    assert str(caught.value) == f"data.source=wmt14: cannot be downloaded by a program; {wanted}; {more}"
    folder.mkdir(parents=True)
    (folder / "train.de").write_text("a\n")
    assert found(tmp_path, "wmt14") == folder


def test_multi30k_is_fetched_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    counts = {"train": 29000, "val": 1014, "test_2016_flickr": 1000}

    def fake(address: str, folder: Path, should_stop: object) -> Path:
        asked.append(address)
        name = address.rpartition("/")[2]
        (folder / name).write_bytes(gzip.compress(b"a b\n" * counts[name.partition(".")[0]]))
        return folder / name

    monkeypatch.setattr(published, "_download", fake)
    folder = found(tmp_path, "multi30k")
    rows = PairFiles(load().data).open(folder, seed=1)
    assert {split: sum(1 for _ in rows.splits[split]()) for split in rows.splits} == {
        "train": 29000, "valid": 1014, "test": 1000
    }  # fmt: skip
    assert len(asked) == 6
    assert found(tmp_path, "multi30k") == folder
    assert len(asked) == 6


def test_a_download_of_other_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, reason in (
        (gzip.compress(b"a\n"), "has 1 lines, not the published 29000"),
        (b"no gzip", "is damaged"),
    ):

        def fake(address: str, folder: Path, should_stop: object, content: bytes = content) -> Path:
            path = folder / address.rpartition("/")[2]
            path.write_bytes(content)
            return path

        monkeypatch.setattr(published, "_download", fake)
        with pytest.raises(UserError, match=reason) as caught:
            found(tmp_path, "multi30k")
        assert "into " in str(caught.value) and str(caught.value).endswith("by hand")
        assert not (tmp_path / "cache" / "multi30k").exists()
