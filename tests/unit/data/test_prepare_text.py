"""Preparation gives the tokens of one pass over the whole text, whoever works and whatever interrupts."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import command
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtext.data.utils import get_tokenizer

from hvd_transformer.comm.process_map import _LazyMap, process_map
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import corpus_pieces, prepare_text
from hvd_transformer.data.build_once import ALONE, PrepareContext, Stopped
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.pretrained_tokenizer import PretrainedTokenizer
from hvd_transformer.data.text_corpus import open_corpus
from hvd_transformer.data.text_files import read_pieces
from hvd_transformer.data.tokenizers import BPETokenizer
from hvd_transformer.errors import UserError

COMMAND = Path(sys.executable).with_name("hvd-transformer")
KINDS = ("basic_english", "char", "bpe")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> dict[str, str]:
    """Some 100 kB of words, blanks and odd characters, as text by split, with its folder."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    words = ["one", "Two,", "three.", "<unk>", "  ", "été", "日本", "😀", "don't", "(x)", "\n", "\n\n   ", "\t"]
    texts = {"folder": str(folder)}
    for split, count in {"train": 20000, "valid": 2000, "test": 1000}.items():
        texts[split] = " ".join(generator.choices(words, k=count)) + "\n"
        (folder / f"{split}.txt").write_text(texts[split], encoding="utf-8")
    return texts


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(corpus_pieces, "PIECE_BYTES", 4096)
    monkeypatch.setattr(prepare_text, "_GROUP_BYTES", 1)


def configure(corpus, cache, **settings) -> DataConfig:
    return DataConfig(source=corpus["folder"], cache_dir=str(cache), **settings)


def prepare(config: DataConfig, context: PrepareContext = ALONE) -> PreparedData:
    return prepare_text.prepare_corpus(config, open_corpus(config, context), None, context)


def everything(prepared) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prepared.folder.iterdir() if path.name != "index.json"}


def run(*words: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run([COMMAND, "prepare", *words], capture_output=True, text=True, timeout=60, **kwargs)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_whole_text(corpus, tmp_path, small_pieces, kind):
    prepared = prepare(configure(corpus, tmp_path, tokenizer=kind))
    assert list(prepared.splits) == ["train", "valid", "test"]
    for split, tokens in prepared.splits.items():
        assert hashlib.sha256(tokens.path.read_bytes()).hexdigest() == tokens.sha256
        assert tokens[:].tolist() == prepared.tokenizer.encode(corpus[split]).tolist()
        if kind == "basic_english":
            lines = corpus[split].split("\n")
            assert len(tokens) == sum(len(get_tokenizer("basic_english")(line)) for line in lines)
        else:
            assert prepared.tokenizer.decode(tokens[:]) == corpus[split]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_whoever_works(corpus, tmp_path, small_pieces, kind):
    alone = prepare(configure(corpus, tmp_path / "0", tokenizer=kind))
    for processes in (1, 2, 3) if kind == "basic_english" else (2,):
        with process_map(processes) as mapped:
            shared = prepare(configure(corpus, tmp_path / str(processes), tokenizer=kind), PrepareContext(mapped))
            if processes > 1:
                assert isinstance(mapped, _LazyMap)
                assert mapped.mapped is not None  # processes did start
        assert everything(shared) == everything(alone)
        assert shared.digest == alone.digest


def test_vocabulary_is_the_training_splits(tmp_path):
    for split, text in {"train": "a b a", "valid": "a c", "test": "d"}.items():
        (tmp_path / f"{split}.txt").write_text(text)
    config = DataConfig(source=str(tmp_path), cache_dir=str(tmp_path / "cache"), tokenizer="basic_english")
    prepared = prepare(config)
    assert prepared.tokenizer.tokens == ["<unk>", "a", "b"]
    assert {split: tokens[:].tolist() for split, tokens in prepared.splits.items()} == {
        "train": [1, 2, 1],
        "valid": [1, 0],
        "test": [0],
    }


def test_one_file_with_two_shares_has_no_test_split(tmp_path):
    (tmp_path / "my text!.txt").write_text("a line\n" * 100)
    config = DataConfig(
        source=str(tmp_path / "my text!.txt"), split=[0.9, 0.1], tokenizer="char", cache_dir=str(tmp_path)
    )
    prepared = prepare(config)
    assert {split: len(tokens) for split, tokens in prepared.splits.items()} == {"train": 630, "valid": 70}
    assert prepared.folder.name.startswith("my-text-")


def test_wide_vocabularies_take_32_bits(tmp_path):
    characters = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x13000)]))
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(characters, encoding="utf-8")
    prepared = prepare(DataConfig(source=str(tmp_path), tokenizer="char", cache_dir=str(tmp_path / "c")))
    assert prepared.tokenizer.vocab_size > 65536
    assert prepared.splits["valid"].dtype == "<u4"
    assert prepared.tokenizer.decode(prepared.splits["valid"][:]) == characters


def test_found_again_and_keyed_by_all_that_matters(corpus, tmp_path):
    messages = []
    config, context = configure(corpus, tmp_path, tokenizer="char"), PrepareContext(report=messages.append)
    first = prepare(config, context)
    assert len(messages) == 1
    assert prepare(config, context).folder == first.folder
    assert len(messages) == 1
    folders = {first.folder}
    changes = {"vocab_size": 5, "min_frequency": 3, "tokenizer": "basic_english"}
    for key, value in changes.items():
        folders.add(prepare(configure(corpus, tmp_path, **{"tokenizer": "char", key: value})).folder)
    moved = Path(shutil.copytree(corpus["folder"], tmp_path / "moved"))
    same = prepare(DataConfig(source=str(moved), tokenizer="char", cache_dir=str(tmp_path)))
    folders.add(same.folder)
    assert same.digest == first.digest  # the same on another host, wherever the text lies there
    (moved / "train.txt").write_text("other text")
    other = prepare(DataConfig(source=str(moved), tokenizer="char", cache_dir=str(tmp_path)))
    folders.add(other.folder)
    assert len(folders) == 6
    assert other.digest != first.digest


def test_the_tokenizer_is_the_one_that_was_given(tmp_path):
    """Two folders with one tokenizer.json share the tokens, but not their chat templates."""
    (tmp_path / "text.txt").write_text("ab ba " * 100)
    np.array([0, 1] * 100, np.uint16).tofile(tmp_path / "tokens.bin")
    model = Tokenizer(models.WordLevel({"ab": 0, "ba": 1}, "ab"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for source in ("text.txt", "tokens.bin"):
        config = DataConfig(source=str(tmp_path / source), cache_dir=str(tmp_path / "cache"), split=[0.5, 0.5])
        folders = []
        for template in ("one", "two"):
            files = {"tokenizer.json": model.to_str(), "tokenizer_config.json": json.dumps({"chat_template": template})}
            prepared = prepare_text.prepare_corpus(
                config, open_corpus(config, ALONE), PretrainedTokenizer(files), ALONE
            )
            assert prepared.tokenizer.chat_template == template
            folders.append(prepared.folder)
        assert folders[0] == folders[1]


@pytest.mark.parametrize("damage", ["shorter", "gone", "index", "tokenizer"])
def test_damaged_files_are_prepared_again(corpus, tmp_path, damage):
    config = configure(corpus, tmp_path, tokenizer="char")
    first = prepare(config)
    whole = everything(first)
    if damage == "shorter":
        os.truncate(first.folder / "valid.bin", 10)
    elif damage == "gone":
        (first.folder / "test.bin").unlink()
    elif damage == "index":
        (first.folder / "index.json").write_text("{")
    else:
        path = first.folder / "vocabulary.json"
        path.write_text(path.read_text().replace('"o"', '"q"'))
    messages = []
    again = prepare(config, PrepareContext(report=messages.append))
    assert "is damaged: preparing it again" in messages[0]
    assert everything(again) == whole
    assert again.digest == first.digest


def learned_from(monkeypatch) -> list[str]:
    """What byte pairs are learned from, once something is prepared."""
    texts, train = [], BPETokenizer.train

    def recording(given, *args, **kwargs):
        texts.extend(given)
        return train(texts, *args, **kwargs)

    monkeypatch.setattr(BPETokenizer, "train", recording)
    return texts


@pytest.mark.parametrize("kilobytes", [8, 40])
def test_byte_pairs_are_learned_from_a_sample_of_everywhere(corpus, tmp_path, monkeypatch, kilobytes):
    texts, messages = learned_from(monkeypatch), []
    config = configure(corpus, tmp_path, vocab_size=300, tokenizer_sample_mb=kilobytes / 1024)
    prepare(config, PrepareContext(report=messages.append))
    whole = corpus["train"]
    assert f"byte pairs are learned from 0.0 of {len(whole.encode()) / 2**20:.1f} MiB, spread over" in messages[1]
    size = sum(len(text.encode()) for text in texts)
    assert 0.8 * kilobytes < size / 1024 < kilobytes + 4.1  # one piece more
    places = [whole.index(text) / len(whole) for text in texts]
    assert places == sorted(places)
    assert max(np.diff([0, *places, 1])) < 2 / len(texts)  # evenly, from beginning to end


def test_a_sample_as_large_as_the_text_is_the_text(corpus, tmp_path, monkeypatch):
    """The size of the sample is part of what a folder depends on only where it has an effect."""
    texts, messages = learned_from(monkeypatch), []
    first = prepare(configure(corpus, tmp_path, vocab_size=300), PrepareContext(report=messages.append))
    assert "".join(texts) == corpus["train"] and len(messages) == 1
    for sample in (None, 1.0):
        again = prepare(configure(corpus, tmp_path, vocab_size=300, tokenizer_sample_mb=sample))
        assert again.folder == first.folder
    folders = {
        prepare(configure(corpus, tmp_path, vocab_size=300, tokenizer_sample_mb=size)).folder for size in (0.01, 0.02)
    }
    assert len({*folders, first.folder}) == 3


def test_no_one_is_left_waiting_when_asked_to_stop(corpus, tmp_path, small_pieces):
    with pytest.raises(Stopped):
        prepare(configure(corpus, tmp_path, tokenizer="char"), PrepareContext(should_stop=lambda: True))
    assert [path.suffix for path in (tmp_path / "prepared").iterdir()] == [".lock"]


def test_memory_stays_bounded(corpus, tmp_path, small_pieces, monkeypatch):
    """No more pieces are taken from the text than a map asks for."""
    taken, done, most = [0], [0], [0]

    def counting_pieces(span, piece_bytes):
        for piece in read_pieces(span, piece_bytes):
            taken[0] += 1
            most[0] = max(most[0], taken[0] - done[0])
            yield piece

    def one_by_one(function, items):
        for item in items:
            yield function(item)
            done[0] += 1

    monkeypatch.setattr(corpus_pieces, "read_pieces", counting_pieces)
    prepare(configure(corpus, tmp_path, tokenizer="basic_english"), PrepareContext(one_by_one))
    assert taken[0] > 40
    assert most[0] == 1


def test_command_prints_what_was_made(corpus, tmp_path):
    words = (f"data.source={corpus['folder']}", f"data.cache_dir={tmp_path}", "data.tokenizer=char")
    result = run(*words)
    assert (result.returncode, result.stderr) == (0, "")
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    prepared = prepare(configure(corpus, tmp_path, tokenizer="char"))
    assert lines["folder"] == str(prepared.folder)
    for split, tokens in prepared.splits.items():
        assert lines[split] == f"{len(tokens):,} tokens"
    assert lines["vocabulary"] == f"{prepared.tokenizer.vocab_size:,} (char)"
    assert float(lines["seconds"]) < 60
    index = json.loads((prepared.folder / "index.json").read_text())
    assert index["splits"]["train"]["tokens"] == len(prepared.splits["train"])


def test_two_commands_at_once(corpus, tmp_path):
    command = [COMMAND, "prepare", f"data.source={corpus['folder']}", f"data.cache_dir={tmp_path}"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sum("Preparing" in output for output in outputs) == 1
    folders = [line for output in outputs for line in output.splitlines() if line.startswith("folder: ")]
    assert len(folders) == 2
    assert folders[0] == folders[1]


def test_kill_leaves_nothing_half_written(tmp_path):
    generator = random.Random(1)
    for split, lines in {"train": 60000, "valid": 4000, "test": 4000}.items():
        text = "".join(f"{generator.random()} some words of a line\n" for _ in range(lines))
        (tmp_path / f"{split}.txt").write_text(text)
    cache = tmp_path / "cache"
    config = DataConfig(source=str(tmp_path), cache_dir=str(cache), tokenizer="bpe", vocab_size=500)
    words = ("data.tokenizer=bpe", "data.vocab_size=500", "data.workers=2")
    command = [COMMAND, "prepare", f"data.source={tmp_path}", f"data.cache_dir={cache}", *words]
    interrupted = 0
    for delay in (0.0, 0.1, 0.25, 0.4):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            process.stdout.readline()  # it has begun
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        names = [path.name for path in (cache / "prepared").iterdir()]
        whole = [name for name in names if not name.startswith(".") and not name.endswith(".lock")]
        interrupted += any(name.endswith(".tmp") for name in names)
        assert all((cache / "prepared" / name / "index.json").exists() for name in whole)
    assert interrupted
    prepared = prepare(config)
    for tokens in prepared.splits.values():
        assert hashlib.sha256(tokens.path.read_bytes()).hexdigest() == tokens.sha256
    names = sorted(path.name for path in prepared.folder.parent.iterdir())
    assert names == [prepared.folder.name, f"{prepared.folder.name}.lock"]


def make_bad(kind: str, folder: Path) -> tuple[list[str], str]:
    """The words of a wrong command, and what its one line on stderr must say."""
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("some words of a line\n")
    words = [f"data.source={folder}", f"data.cache_dir={folder / 'cache'}", "data.tokenizer=basic_english"]
    if kind == "missing":
        return [*words, f"data.source={folder / 'nowhere'}"], "nowhere: no such file or folder"
    if kind == "unknown source":
        return [*words, "data.source=python-dosc"], "did you mean python-docs?"
    if kind == "empty folder":
        (folder / "empty").mkdir()
        return [
            *words,
            f"data.source={folder / 'empty'}",
        ], "empty: the folder is empty; it must hold train.txt"
    if kind == "no valid file":
        (folder / "valid.txt").unlink()
        return words, "no file of the valid split; accepted names: valid.txt"
    if kind == "empty split":
        (folder / "test.txt").write_text("")
        return words, "test.txt: the test split is empty"
    if kind == "blank split":
        (folder / "test.txt").write_text(" \n\n")
        return words, "test.txt: the test split has no token"
    if kind == "invalid utf-8":
        (folder / "valid.txt").write_bytes("é words\n".encode() + b"caf\xe9 au lait\n")
        return words, "valid.txt: not valid UTF-8 at byte 12 "
    if kind == "vocabulary of one":
        return [*words, "data.min_frequency=2"], "data.min_frequency=2: leaves a vocabulary of nothing but <unk>"
    assert kind == "cache is a file"
    return [*words, f"data.cache_dir={folder / 'train.txt'}"], "data.cache_dir must be a writable folder"


BAD = ("missing", "unknown source", "empty folder", "no valid file", "empty split", "blank split")
BAD += ("invalid utf-8", "vocabulary of one", "cache is a file")


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, kind):
    words, message = make_bad(kind, tmp_path)
    result = command("hvd-transformer", "prepare", *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    cache = tmp_path / "cache" / "prepared"
    is_later = kind in ("blank split", "invalid utf-8")  # the training split is done, and kept
    left = {".lock", ".tmp"} if is_later else {".lock"}
    assert not cache.exists() or {path.suffix for path in cache.iterdir()} == left


@pytest.mark.parametrize("kind", KINDS)
def test_invalid_utf8_in_any_tokenizer(tmp_path, kind):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_bytes(b"some words\n" * 900)
    (tmp_path / "train.txt").write_bytes(b"some words\n" * 900 + b"\xc3(")
    config = DataConfig(source=str(tmp_path), tokenizer=kind, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match="train.txt: not valid UTF-8 at byte 9900 "):
        prepare(config)
