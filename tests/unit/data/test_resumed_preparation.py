"""A preparation that was ended resumes where it was, and makes the files of one that was not."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import DOCUMENTS, own_tokenizer, write, write_shards

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import corpus_pieces, prepare_text
from hvd_transformer.data.build_once import ALONE, PLACES, PrepareContext, Stopped
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.text_corpus import open_corpus
from hvd_transformer.data.tokenizers import BPETokenizer
from hvd_transformer.errors import UserError

SOURCES = ("text.txt", "*.jsonl", "*.jsonl.gz", "*.parquet")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(corpus_pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(prepare_text, "_GROUP_BYTES", 1)
    monkeypatch.setattr(prepare_text, "SAVED_BYTES", 2500)


def make(source: str, root: Path) -> Path:
    if source == "text.txt":
        (root / source).write_text("".join(DOCUMENTS), encoding="utf-8")
        return root / source
    write_shards(root / "data", source[1:])
    return root / "data" / source


def prepare(source: Path, cache: Path, context: PrepareContext = ALONE, tokenizer: str = "bpe") -> PreparedData:
    size = 300 if tokenizer == "bpe" else None
    config = DataConfig(source=str(source), cache_dir=str(cache), tokenizer=tokenizer, vocab_size=size)
    return prepare_text.prepare_corpus(config, open_corpus(config, context), None, context)


def everything(prepared: PreparedData) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prepared.folder.iterdir()}


class EndingMap:
    """A map that counts what it encodes; before the piece of number `last`, it does something else."""

    def __init__(self, last: int | None = None, act: Callable[[], None] = lambda: None) -> None:
        self.encoded, self.last, self.act = 0, last, act

    def __call__(self, function: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            if getattr(function, "func", None) is prepare_text._encode_all:
                if self.encoded == self.last:
                    self.act()
                self.encoded += 1
            yield function(item)


def kill() -> None:
    raise KeyboardInterrupt


def stop() -> None:
    raise Stopped


@pytest.mark.parametrize("tokenizer", ["bpe", "basic_english", "char"])
@pytest.mark.parametrize("source", SOURCES)
def test_what_was_done_is_not_done_again(source: str, tokenizer: str, tmp_path: Path, monkeypatch) -> None:
    path = make(source, tmp_path)
    whole = EndingMap()
    wanted = everything(prepare(path, tmp_path / "whole", PrepareContext(whole), tokenizer))
    learned: list[None] = []
    train = BPETokenizer.train
    monkeypatch.setattr(BPETokenizer, "train", lambda *a, **k: (learned.append(None), train(*a, **k))[1])
    ended, done = 0, 0
    for last in (7, 9, None):
        mapped = EndingMap(last, kill if last == 7 else stop)
        messages: list[str] = []
        try:
            prepared = prepare(path, tmp_path / "cache", PrepareContext(mapped, messages.append), tokenizer)
        except (KeyboardInterrupt, Stopped):
            ended += 1
        done += mapped.encoded
        assert (len(messages) == 2 and "resumes after" in messages[1]) == (last != 7)
    assert ended == 2 and mapped.last is None
    assert whole.encoded <= done <= whole.encoded + 2 * 4  # of a piece more or less in 2500 bytes
    assert everything(prepared) == wanted
    assert len(learned) == (tokenizer == "bpe")
    assert sorted(path.name for path in prepared.folder.parent.iterdir()) == [
        prepared.folder.name, f"{prepared.folder.name}.lock"
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["other bytes", "shorter", "gone", "places", "tokenizer"])
def test_damaged_progress_is_not_used(damage: str, tmp_path: Path) -> None:
    path = make("*.jsonl.gz", tmp_path)
    wanted = everything(prepare(path, tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        prepare(path, tmp_path / "cache", PrepareContext(EndingMap(9, kill)))
    (aside,) = (tmp_path / "cache" / "prepared").glob(".*.tmp")
    file = aside / "train.bin"
    if damage == "other bytes":
        file.write_bytes(b"\x00" + file.read_bytes()[1:])
    elif damage == "shorter":
        os.truncate(file, 100)
    elif damage == "gone":
        file.unlink()
    elif damage == "places":
        (aside / PLACES).write_text("{")
    else:
        (aside / "tokenizer.json").write_text("{}")
    mapped = EndingMap()
    assert everything(prepare(path, tmp_path / "cache", PrepareContext(mapped))) == wanted
    assert mapped.encoded > 15


def test_finished_splits_are_kept(tmp_path: Path) -> None:
    path = make("*.parquet", tmp_path)
    whole = EndingMap()
    wanted = everything(prepare(path, tmp_path / "whole", PrepareContext(whole)))
    last = whole.encoded - 1  # of the test split
    with pytest.raises(KeyboardInterrupt):
        prepare(path, tmp_path / "cache", PrepareContext(EndingMap(last, kill)))
    mapped = EndingMap()
    assert everything(prepare(path, tmp_path / "cache", PrepareContext(mapped))) == wanted
    assert mapped.encoded == 1


@pytest.mark.parametrize(("shard", "what"), [(0, "changed"), (4, "vanished")])
def test_a_shard_that_changes_meanwhile(shard: int, what: str, tmp_path: Path) -> None:
    """What was done is kept: with the file as it was, it goes on."""
    path = make("*.jsonl.gz", tmp_path)
    wanted = everything(prepare(path, tmp_path / "whole"))
    file = sorted(path.parent.iterdir())[shard]
    data, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)

    def change() -> None:
        file.unlink()
        if what == "changed":
            file.write_bytes(data)

    config = DataConfig(source=str(path), cache_dir=str(tmp_path / "cache"), tokenizer="char")
    last = 1 if what == "changed" else 7
    with pytest.raises(UserError, match=rf"^{file}: {what} while it was prepared; restore it to resume$"):
        prepare_text.prepare_corpus(config, open_corpus(config), None, PrepareContext(EndingMap(last, change)))
    if what == "changed":
        with pytest.raises(UserError, match=rf"^{file}: changed since .*tmp was prepared; restore it, or remove"):
            prepare_text.prepare_corpus(config, open_corpus(config), None, ALONE)
    file.write_bytes(data)
    os.utime(file, ns=times)
    messages: list[str] = []
    prepared = prepare_text.prepare_corpus(config, open_corpus(config), None, PrepareContext(report=messages.append))
    assert "resumes after" in messages[1]
    assert len(wanted["train.bin"]) and len(prepared.splits["train"]) > 1000


@pytest.mark.parametrize("what", ["changed", "vanished"])
def test_a_shard_that_changed_since(what: str, tmp_path: Path) -> None:
    path = make("*.parquet", tmp_path)
    prepared = prepare(path, tmp_path / "cache")
    file = sorted(path.parent.iterdir())[2]
    data, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.unlink()
    if what == "changed":
        write(file, DOCUMENTS[:9])
    for tokenizer in ("bpe", "char"):
        message = rf"^{file}: {what} since {prepared.folder} was prepared; restore it, or remove that folder$"
        with pytest.raises(UserError, match=message):
            prepare(path, tmp_path / "cache", tokenizer=tokenizer)
    file.write_bytes(data)
    os.utime(file, ns=times)
    messages: list[str] = []
    again = prepare(path, tmp_path / "cache", PrepareContext(report=messages.append))
    assert (again.folder, messages) == (prepared.folder, [])
    write(path.parent / "t.parquet", DOCUMENTS)  # added
    assert len(prepare(path, tmp_path / "cache").splits["train"]) > len(prepared.splits["train"])


@pytest.mark.parametrize("source", ["*.jsonl.gz", "*.parquet"])
def test_a_start_with_prepared_shards_reads_none(source: str, tmp_path: Path) -> None:
    """Their sizes and times are compared: other bytes are not seen."""
    path = make(source, tmp_path)
    prepared = prepare(path, tmp_path / "cache")
    for file in path.parent.iterdir():
        status = file.stat()
        file.write_bytes(b"x" * status.st_size)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert prepare(path, tmp_path / "cache").digest == prepared.digest


def make_splits(root: Path, ending: str) -> Path:
    for stem, number in (("train", 5), ("valid", 2), ("test", 1)):
        write_shards(root / "data", ending, number=number, stem=stem)
    return root / "data"


def prepare_own(source: Path, cache: Path, tokenizer: Path, context: PrepareContext = ALONE) -> PreparedData:
    config = DataConfig(source=str(source), cache_dir=str(cache))
    return prepare_text.prepare_corpus(config, open_corpus(config), PretrainedTokenizer.open(tokenizer), context)


def fail(file: Path, row: int, cache: Path, tokenizer: Path, context: PrepareContext = ALONE) -> str:
    """The error of a preparation with a null in this row of a file."""
    write(file, [*DOCUMENTS[:row], None, *DOCUMENTS[row:]])
    with pytest.raises(UserError, match=rf"^{file}.*must be a text") as error:
        prepare_own(file.parent, cache, tokenizer, context)
    return str(error.value)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize(
    ("bad", "row", "least"),
    [
        ("train-00002-of-00005", 0, 3),
        ("train-00004-of-00005", 100, 9),  # after pieces of it that are not used
        ("valid-00001-of-00002", 100, 15),
    ],
)
def test_what_was_done_before_a_bad_file_is_kept(bad: str, row: int, least: int, ending: str, tmp_path: Path) -> None:
    """The mended file and those after it are encoded: the result is that of a preparation that never failed."""
    folder, tokenizer, cache = make_splits(tmp_path, ending), own_tokenizer(tmp_path / "own"), tmp_path / "cache"
    file, repeated = folder / f"{bad}{ending}", EndingMap()
    told = fail(file, row, cache, tokenizer)
    with pytest.raises(UserError) as again:  # without a change, at once
        prepare_own(folder, cache, tokenizer, PrepareContext(repeated))
    assert str(again.value) == told and repeated.encoded <= 1
    write(file, DOCUMENTS[:90])
    whole, mended, messages = EndingMap(), EndingMap(), list[str]()
    wanted = everything(prepare_own(folder, tmp_path / "whole", tokenizer, PrepareContext(whole)))
    prepared = prepare_own(folder, cache, tokenizer, PrepareContext(mended, messages.append))
    assert everything(prepared) == wanted
    assert "resumes after" in messages[1]
    assert least <= whole.encoded - mended.encoded < whole.encoded
    assert not list(prepared.folder.parent.glob(".*.tmp"))


@pytest.mark.parametrize("change", ["good file", "tokenizer", "token file", "in use"])
def test_what_was_done_is_not_used_where_something_else_differs(change: str, tmp_path: Path) -> None:
    folder, tokenizer, cache = make_splits(tmp_path, ".jsonl"), own_tokenizer(tmp_path / "own"), tmp_path / "cache"
    bad = folder / "train-00002-of-00005.jsonl"
    fail(bad, 0, cache, tokenizer)
    write(bad, DOCUMENTS[:90])
    (aside,) = (cache / "prepared").glob(".*.tmp")
    lock = aside.with_name(f"{aside.name[1:-4]}.lock").open()
    if change == "good file":
        write(folder / "train-00000-of-00005.jsonl", DOCUMENTS[7:19])
    elif change == "tokenizer":
        tokenizer.rename(tmp_path / "first")
        own_tokenizer(tokenizer)
        (tokenizer / "tokenizer_config.json").write_text('{"eos_token": "[PAD]"}')
    elif change == "token file":
        (aside / "train.bin").write_bytes(b"x" * (aside / "train.bin").stat().st_size)
    else:
        fcntl.flock(lock, fcntl.LOCK_EX)
    whole, mended = EndingMap(), EndingMap()
    wanted = everything(prepare_own(folder, tmp_path / "whole", tokenizer, PrepareContext(whole)))
    assert everything(prepare_own(folder, cache, tokenizer, PrepareContext(mended))) == wanted
    assert mended.encoded == whole.encoded
    assert aside.exists() == (change == "in use")
    lock.close()


def test_nothing_is_left_where_nothing_was_done(tmp_path: Path) -> None:
    """At the first piece of all, and in the only file."""
    folder, tokenizer, cache = make_splits(tmp_path, ".jsonl"), own_tokenizer(tmp_path / "own"), tmp_path / "cache"
    fail(folder / "train-00000-of-00005.jsonl", 0, cache, tokenizer)
    text = tmp_path / "text.txt"
    text.write_bytes("".join(DOCUMENTS).encode() + b"\xff")
    with pytest.raises(UserError, match=rf"^{text}: not valid UTF-8 at byte"):
        prepare_own(text, cache, tokenizer)
    assert {path.suffix for path in (cache / "prepared").iterdir()} == {".lock"}


# Writes the most memory that a command had. In a small process: what was just forked counts as large as its parent.
_PEAK = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[2:]).returncode
open(sys.argv[1], "w").write(str(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
sys.exit(code)
"""


@pytest.mark.slow
def test_kill_9_of_the_command(tmp_path: Path) -> None:
    """Some 400 MB of text in shards, killed twice: the same files, in bounded memory."""
    generator = random.Random(0)
    words = ["".join(generator.choices("etaoinshrdlu", k=generator.randint(1, 9))) for _ in range(3000)]
    texts = [" ".join(generator.choices(words, k=600)) for _ in range(2000)]
    for shard in range(60):
        write(tmp_path / "data" / f"{shard}.jsonl.gz", texts[shard:] + texts[:shard])
    command = [Path(sys.executable).with_name("hvd-transformer"), "prepare", f"data.source={tmp_path}/data/*.jsonl.gz"]
    command += ["data.tokenizer=char", "data.workers=2", "data.split=[0.9,0.1]"]
    killed = tmp_path / "killed"
    for number in range(2):
        with subprocess.Popen([*command, f"data.cache_dir={killed}"], stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and _saved(killed) <= number:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    indices = []
    for cache in (killed, tmp_path / "whole"):
        peak = tmp_path / "peak"
        done = subprocess.run(
            [sys.executable, "-c", _PEAK, peak, *command, f"data.cache_dir={cache}"], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert ("resumes after" in done.stdout) == (cache == killed)
        (index,) = cache.glob("prepared/*/index.json")
        indices.append(json.loads(index.read_text()))
        assert int(peak.read_text()) < 2**19  # kB, of the largest of its processes
    assert indices[0] == indices[1]


def _saved(cache: Path) -> int:
    """How many times 64 MiB of text were written for sure."""
    places = next(cache.glob(f"prepared/.*/{PLACES}"), None)
    if places is None:
        return 0
    return sum(entry["count"] for *_, (entry, _) in json.loads(places.read_text()).values()) // (60 * 10**6)


def test_a_plain_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens would be those of a vocabulary that was learned from another text."""
    file, learn = tmp_path / "one.txt", prepare_text.learn_tokenizer
    file.write_text("aaa\n" * 50)

    def change(*given: Any, **named: Any) -> Any:
        found = learn(*given, **named)
        file.write_text("xyz\n" * 60)
        return found

    monkeypatch.setattr(prepare_text, "learn_tokenizer", change)
    config = DataConfig(source=str(file), cache_dir=str(tmp_path / "cache"), tokenizer="char")
    with pytest.raises(UserError, match=rf"^{file}: changed while it was prepared; restore it to resume$"):
        prepare_text.prepare_corpus(config, open_corpus(config), None, ALONE)
