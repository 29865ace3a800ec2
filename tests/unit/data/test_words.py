"""Native words against Python's and torchtext's, and the prepared files of both, byte for byte."""

import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torchtext.data.utils import get_tokenizer

from hvd_transformer.comm.process_map import process_map
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data import corpus_pieces, prepare_text, words
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.text_corpus import open_corpus
from hvd_transformer.data.text_files import Piece
from hvd_transformer.data.tokenizers import WordTokenizer
from hvd_transformer.data.words import LIBRARY, WordEncoder, Words, WordTable, count_words, is_native, parts
from hvd_transformer.errors import UserError

ODD = st.sampled_from(
    ["<br />", '<b"R /">', "<br/>", "<br", " />", "ΑΣ", "Σ", "aΣ'b", "İ", "Ⱥ", "K", "ß", "ſ", "日本", "😀", "𐐀", "\0"]
    + ["Word", "of8Bytes", "Seventeen9Letters"]
    + list("aAzZ09 \n\t\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2003\u2028\u200b\u3000.,'\"()!?;:-_<>/é\u0307\u00ad")
)
TEXTS = st.lists(ODD | st.characters(exclude_categories=["Cs"]), max_size=60).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the library has been compiled."""
    found = tmp_path_factory.mktemp("cache") / "kernels"
    LIBRARY.load(found)
    return found


def pieces(text: bytes) -> list[Piece]:
    return [Piece(Path("text"), 0, text)]


@given(text=TEXTS)
@example(text="one two\n" * 3)
@example(text='A"Σ" Σ\nΟΔΥΣΣΕΥΣ. ΣΑΣ\u00ad\nΣ')
def test_words_are_pythons_and_torchtexts(folder, text):
    split = get_tokenizer("basic_english")
    reference = [word for line in text.split("\n") for word in split(line)]
    counts = count_words(folder, map, pieces(text.encode()))
    assert counts == Counter(reference) == WordTokenizer.count(text)
    known = sorted(counts.keys() - {"<unk>"})[::2]  # the others are unknown
    tokenizer = WordTokenizer(["<unk>", *known])
    (ids,) = map(WordEncoder(folder, tokenizer, "<u2"), parts(pieces(text.encode()))) if text else ([],)
    assert list(ids) == tokenizer.encode(text).tolist()


def test_every_character(folder):
    codes = [code for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    text = "".join(f"x{chr(code)}Y{chr(code)} " for code in codes)
    assert count_words(folder, map, pieces(text.encode())) == WordTokenizer.count(text)
    rest = "".join(map(chr, range(0x20000, 0x110000)))
    assert rest.lower() == rest and rest.split() == [rest]  # as the library assumes


def test_a_large_vocabulary(folder):
    generator = random.Random(0)
    numbers = [generator.randrange(10**6) ** 3 for _ in range(10**5)]  # of one to 18 digits
    text = " ".join(map(str, numbers * 2))
    counts = count_words(folder, map, pieces(text.encode()))
    assert counts == Counter(map(str, numbers * 2))
    tokens = sorted(counts, key=int)
    (ids,) = map(WordEncoder(folder, WordTokenizer(["<unk>", *tokens]), "<u4"), parts(pieces(text.encode())))
    assert [tokens[number - 1] for number in ids[: len(numbers)]] == list(map(str, numbers))


@pytest.mark.parametrize("most", [0, 300, 10**6])
def test_tables_are_kept_while_they_are_small(folder, monkeypatch, most):
    monkeypatch.setattr(words, "PART_BYTES", 1000)
    monkeypatch.setattr(words, "_MOST_WORDS", most)
    made: list[WordTable] = []
    monkeypatch.setattr(words, "WordTable", lambda library: made.append(WordTable(library)) or made[-1])
    text = "\n".join(f"{number} {number + 1} {number % 7}" for number in range(3000))
    assert len(list(parts(pieces(text.encode())))) > 20
    with process_map(2) as mapped:
        counts = count_words(folder, mapped.in_threads, pieces(text.encode()))
    assert counts == WordTokenizer.count(text)
    *kept, largest = sorted(map(len, made[1:]))  # the first one is the sum
    assert (len(kept) > 5) == (most < 10**6) and (most == 10**6 or largest < most + 400)


def test_words_come_back(folder):
    numbers = {"b": 3, "": 0, "été 😀": 2**40, "a" * 100: 1}
    assert Words.of(numbers).as_dict() == numbers
    library = words._library(folder)
    assert not isinstance(library, str)
    table = WordTable(library)
    assert table.words().as_dict() == {}
    for _ in range(2):
        table.add(Words.of(numbers))
    assert list(table.words().as_dict().items()) == [(word, 2 * number) for word, number in numbers.items()]


SMALL = st.sampled_from([b"a", b" ", b"\n", b"\xe2", b"\x82", b"\xac", b"\xf0", b"\x9f", b"\xed\xa0", b"\xc0", b"\xf4"])


@given(text=st.binary(max_size=12) | st.lists(SMALL, max_size=12).map(b"".join))
def test_invalid_text_is_refused_in_the_same_words(folder, text):
    (piece,) = pieces(text)
    try:
        expected = WordTokenizer.count(piece.text())
    except UserError as error:
        with pytest.raises(UserError) as raised:
            count_words(folder, map, [piece])
        assert str(raised.value) == str(error)
    else:
        assert count_words(folder, map, [piece]) == expected


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    parts = ["one", "Two,", "three.", "<unk>", "  ", "ÉTÉ", "日本", "don't", "ΟΔΟΣ", "<br />", "\n", "\r\n", "\n\n   "]
    parts += [str(number) for number in range(200)]
    for split, count in {"train": 20000, "valid": 2000, "test": 1000}.items():
        (folder / f"{split}.txt").write_text(" ".join(generator.choices(parts, k=count)), encoding="utf-8")
    return folder


def prepare(corpus: Path, cache: Path, context: PrepareContext, **settings: Any) -> PreparedData:
    config = DataConfig(source=str(corpus), cache_dir=str(cache), tokenizer="basic_english", **settings)
    return prepare_text.prepare_corpus(config, open_corpus(config, context), None, context)


def on_another_host(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """What a map over MPI ranks does."""
    for item in items:
        sent = pickle.loads(pickle.dumps((function, item)))
        yield pickle.loads(pickle.dumps(sent[0](sent[1])))


def without_a_compiler(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """The same, where that host has no library."""
    for item in items:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(words, "_library", lambda _: "there is no C++ compiler")
            result = list(on_another_host(function, [item]))
        yield from result


@pytest.mark.parametrize("settings", [{}, {"vocab_size": 100, "min_frequency": 90}])
def test_files_are_those_of_python(corpus, tmp_path, folder, monkeypatch, settings):
    monkeypatch.setattr(corpus_pieces, "PIECE_BYTES", 16384)
    monkeypatch.setattr(words, "PART_BYTES", 3000)
    expected = prepare(corpus, tmp_path, PrepareContext(), **settings)
    assert not (tmp_path / "kernels").exists()
    with process_map(2) as in_threads:
        for mapped in (map, in_threads, on_another_host, without_a_compiler):
            words._encoder.cache_clear()
            shutil.rmtree(folder.parent / "prepared", ignore_errors=True)
            with pytest.MonkeyPatch.context() as patch:
                if mapped != without_a_compiler:
                    for name in ("count", "encode"):
                        patch.setattr(WordTokenizer, name, None)
                found = prepare(corpus, folder.parent, PrepareContext(mapped), **settings)
            assert found.folder.name == expected.folder.name
            files = [{path.name: path.read_bytes() for path in own.folder.iterdir()} for own in (found, expected)]
            assert files[0] == files[1]


def test_a_compiler_is_called_for_large_texts_only(tmp_path, monkeypatch):
    told: list[str] = []
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert not is_native(tmp_path, words.WORTH_COMPILING - 1, told.append)
    assert not told
    assert not is_native(tmp_path, words.WORTH_COMPILING, told.append)
    assert told == ["Python splits the text into words, which takes longer: CXX=/nowhere/g++ is not a command"]
    monkeypatch.delenv("CXX")
    other = tmp_path / "kernels"
    assert is_native(other, words.WORTH_COMPILING, told.append)
    assert len(list(other.iterdir())) == 1
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert is_native(other, 1, told.append)
