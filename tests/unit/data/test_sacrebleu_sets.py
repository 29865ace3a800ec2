"""`data.test=sacrebleu:…` reads what sacrebleu itself gives for a test set, from an archive that is served here."""

import hashlib
import io
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sacrebleu.dataset import DATASETS
from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

from hvd_transformer.config import load
from hvd_transformer.data.build_once import Stopped
from hvd_transformer.data.parallel_text import PairFiles
from hvd_transformer.errors import UserError

PAIRS = [("Ein Hund &amp; zwei", "A dog and two"), ("drei  Katzen", "three cats")]
FILES = {"de-en": ["test/a-src.de.sgm", "test/a-ref.en.sgm"], "en-de": ["test/a-ref.en.sgm", "test/a-src.de.sgm"]}

MakeSet = Callable[..., FakeSGMLDataset]


def archive() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        for column, name in enumerate(FILES["de-en"]):
            lines = "\n".join(f'<seg id="{number}">{pair[column]}</seg>' for number, pair in enumerate(PAIRS))
            data = f'<doc docid="one" genre="news" origlang="de">\n{lines}\n</doc>\n'.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            packed.addfile(entry, io.BytesIO(data))
    return content.getvalue()


@pytest.fixture
def make_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeSet:
    """A test set "own" of sacrebleu, at an address, with its cache in a folder of its own."""

    def make(address: str, checksum: str | None = None) -> FakeSGMLDataset:
        own = FakeSGMLDataset("own", [address], langpairs=FILES, md5=[checksum] if checksum else None)
        own._outdir, own._rawdir = str(tmp_path / "cache"), str(tmp_path / "cache" / "raw")
        monkeypatch.setitem(DATASETS, "own", own)
        return own

    return make


def read(folder: Path, *words: str) -> dict[str, list[tuple[str, ...]]]:
    for split in ("train", "valid"):
        for language in ("de", "en", "fr"):
            (folder / f"{split}.{language}").write_text(f"{split}\n")
    given = ["task=translation", "data.test=sacrebleu:own", f"data.cache_dir={folder / 'ours'}"]
    config = load(overrides=[*given, *words]).data
    source = PairFiles(config).open(folder, seed=1)
    return {split: [row.texts for row in rows()] for split, rows in source.splits.items()}


def refused(folder: Path, *words: str) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, *words)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_test_set_is_downloaded_once_and_is_what_sacrebleu_gives(tmp_path: Path, make_set: MakeSet) -> None:
    served = tmp_path / "test.tgz"
    served.write_bytes(archive())
    own = make_set(served.as_uri(), hashlib.md5(served.read_bytes()).hexdigest())
    found = read(tmp_path)
    assert found["train"] == [("train", "train")]
    theirs = list(zip(own.source("de-en"), (line.strip() for (line,) in own.references("de-en")), strict=True))
    assert found["test"] == theirs and len(theirs) == len(PAIRS)
    served.unlink()
    assert read(tmp_path)["test"] == theirs
    back = read(tmp_path, "data.source_language=en", "data.target_language=de")
    assert back["test"] == [(target, source) for source, target in theirs]


def test_an_archive_that_was_put_there_by_hand_is_unpacked(tmp_path: Path, make_set: MakeSet) -> None:
    own = make_set((tmp_path / "absent.tgz").as_uri())
    message = refused(tmp_path)
    place = Path(own._rawdir) / "own.absent.tgz"
    assert message.startswith("data.test=sacrebleu:own: cannot be downloaded (")
    assert message.endswith(f"; put {(tmp_path / 'absent.tgz').as_uri()} as {place} by hand")
    place.write_bytes(archive())
    assert len(read(tmp_path)["test"]) == len(PAIRS)


def test_without_a_network_or_with_another_archive_one_line_says_so(tmp_path: Path, make_set: MakeSet) -> None:
    make_set("http://127.0.0.1:1/test.tgz")  # nobody listens on port 1
    assert "cannot be downloaded ([Errno 111] Connection refused); put http://127.0.0.1:1/test.tgz as" in refused(
        tmp_path
    )
    (tmp_path / "test.tgz").write_bytes(archive())
    make_set((tmp_path / "test.tgz").as_uri(), "0" * 32)
    assert "cannot be downloaded (its checksum differs); put file://" in refused(tmp_path)


def test_a_download_stops_on_request(tmp_path: Path, make_set: MakeSet) -> None:
    """Nothing is left of it, which sacrebleu would take for the whole."""
    own = make_set("file:///absent.tgz")
    archive, begun, end = Path(own._rawdir) / "own.absent.tgz", threading.Event(), threading.Event()

    def download(pair: str) -> str:
        archive.parent.mkdir(parents=True)
        archive.write_bytes(b"half")
        begun.set()
        end.wait(20)
        return "none"

    own.get_source_file = download
    for split in ("train", "valid"):
        for language in ("de", "en"):
            (tmp_path / f"{split}.{language}").write_text(f"{split}\n")
    given = ["task=translation", "data.test=sacrebleu:own", f"data.cache_dir={tmp_path / 'ours'}"]
    started = time.monotonic()
    with pytest.raises(Stopped):
        PairFiles(load(overrides=given).data, begun.is_set).open(tmp_path, seed=1)
    assert time.monotonic() - started < 10
    assert not archive.exists()
    end.set()


def test_unknown_sets_and_pairs_are_refused(tmp_path: Path, make_set: MakeSet) -> None:
    make_set("file:///absent")
    assert "not for de-fr; it has de-en, en-de" in refused(tmp_path, "data.target_language=fr")
    message = refused(tmp_path, "data.test=sacrebleu:wmt1066")
    assert message == "data.test=sacrebleu:wmt1066: no test set of sacrebleu; `sacrebleu --list` shows them"


def test_wmt14_is_among_them() -> None:
    assert {"de-en", "en-de", "en-fr"} <= DATASETS["wmt14"].langpairs.keys() & DATASETS["wmt14/full"].langpairs.keys()
