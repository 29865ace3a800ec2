"""basic_english in native code: `words.cpp` counts and encodes in threads what `WordTokenizer` does in processes.

The results are the same, byte for byte. The library is compiled for `WORTH_COMPILING` bytes of text, which take Python
about as long as the compiler, and kept in the folder `kernels` of `data.cache_dir`; once it is there, it is used for
texts of any size. Without a compiler Python does the work.
"""

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.text_files import Piece
from hvd_transformer.data.tokenizers import WordTokenizer
from hvd_transformer.native_library import CannotCompile, NativeLibrary

WORTH_COMPILING = 8 * 2**20  # bytes of text
PART_BYTES = 2**20  # at least, of what a thread works on at a time
LIBRARY = NativeLibrary(Path(__file__).with_name("words.cpp"))
Map = Callable[..., Iterator[Any]]

_MOST_WORDS = 2**18  # of a table for counting that is kept, about 10 MB
_LIMIT = 0x20000  # no letter from here on has a lower case
_PLAIN, _HAS_SIGMA, _INVALID = range(3)
_P, _N, _C = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
_TEXT: list[Any] = [ctypes.c_char_p, _N]
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "examine": (ctypes.c_int32, _TEXT),
    "table_new": (_P, []),
    "table_free": (None, [_P]),
    "table_words": (_N, [_P]),
    "table_bytes": (_N, [_P]),
    "table_add": (None, [_P, _P, _P, _P, _N]),
    "table_get": (None, [_P, _P, _P, _P]),
    "count_words": (None, [_P, *_TEXT, _P, _C]),
    "encode_words_16": (_N, [_P, *_TEXT, _P, _C, _P]),
    "encode_words_32": (_N, [_P, *_TEXT, _P, _C, _P]),
}


def is_native(folder: Path, size: int, report: Callable[[str], None]) -> bool:
    """Whether the library of this folder does the work for so many bytes of text. Reports why it cannot."""
    if size < WORTH_COMPILING and not LIBRARY.is_kept(folder):
        return False
    library = _library(folder)
    if isinstance(library, str):
        report(f"Python splits the text into words, which takes longer: {library}")
    return not isinstance(library, str)


def count_words(folder: Path, mapped: Map, pieces: Iterable[Piece]) -> Counter[str]:
    """The number of occurrences of each word. `mapped` may work on several parts of a piece at once, in threads."""
    library = _library(folder)
    assert not isinstance(library, str), library
    table, counter = WordTable(library), _Counter(folder, library)
    for words in mapped(counter, parts(pieces)):
        if words is not None:
            table.add(words)
    for kept in counter.tables:
        table.add(kept.words())
    found = table.words()
    del table
    return Counter(found.as_dict())


class _Counter:
    """Counts words of parts into `tables`, as many as there are threads at work: most words are in them already. Gives
    back those of a table that has become large. Pickled without tables: another process gives back every part's."""

    def __init__(self, folder: Path, library: ctypes.CDLL) -> None:
        self.folder, self.library = folder, library
        self.tables: list[WordTable] = []  # that no thread is using

    def __call__(self, piece: Piece) -> "Words | None":
        text = _checked(self.library, piece)
        try:
            table = self.tables.pop()
        except IndexError:
            table = WordTable(self.library)
        table.count(text)
        if len(table) > _MOST_WORDS:
            return table.words()
        self.tables.append(table)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_count, self.folder)


class WordEncoder:
    """Encodes pieces of text by the library of a folder. Pickled without its table, which a process makes once."""

    def __init__(self, folder: Path, tokenizer: WordTokenizer, dtype: str) -> None:
        self.folder, self.tokenizer, self.dtype = folder, tokenizer, dtype

    def __call__(self, piece: Piece) -> NDArray[Any]:
        """The token numbers of one of the `parts` (T,)."""
        if self._table is None:  # another host, without a compiler
            return self.tokenizer.encode(piece.text()).astype(self.dtype)
        return self._table.encode(_checked(self._table.library, piece), self.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _encoder, (self.folder, self.tokenizer, self.dtype)

    @cached_property
    def _table(self) -> "WordTable | None":
        library = _library(self.folder)
        if isinstance(library, str):
            return None
        table = WordTable(library)
        table.add(Words.of(self.tokenizer.numbers))
        return table


@lru_cache(maxsize=1)  # the tokenizer is the same object, too
def _encoder(folder: Path, tokenizer: WordTokenizer, dtype: str) -> WordEncoder:
    return WordEncoder(folder, tokenizer, dtype)


class Words(NamedTuple):
    """Words with a number each: all bytes of UTF-8, the end of each word in them, the numbers."""

    text: NDArray[np.uint8]
    ends: NDArray[np.uint64]
    numbers: NDArray[np.uint64]

    @classmethod
    def of(cls, numbers: Mapping[str, int]) -> "Words":
        """Build from a dictionary of words and their numbers."""
        words = [word.encode("utf-8", "surrogatepass") for word in numbers]
        ends = np.cumsum(np.fromiter(map(len, words), np.uint64, len(words)), dtype=np.uint64)
        values = np.fromiter(numbers.values(), np.uint64, len(words))
        return cls(np.frombuffer(b"".join(words), np.uint8), ends, values)

    def as_dict(self) -> dict[str, int]:
        """The numbers by word."""
        text, ends = self.text.tobytes(), self.ends.tolist()
        words = (text[start:end].decode() for start, end in zip([0, *ends], ends, strict=False))
        return dict(zip(words, self.numbers.tolist(), strict=True))


class WordTable:
    """Words with a number each in the memory of the library. Texts are valid UTF-8, as `_checked` gives them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._lower = lower_case()
        self._address = library.table_new()

    def __del__(self) -> None:
        self.library.table_free(self._address)

    def __len__(self) -> int:
        return int(self.library.table_words(self._address))

    def add(self, words: Words) -> None:
        """Add the numbers to those of the same words; new ones start with 0."""
        self.library.table_add(self._address, *(array.ctypes.data for array in words), len(words.ends))

    def words(self) -> Words:
        """A copy of all of it, in the order in which the words came."""
        count, size = len(self), self.library.table_bytes(self._address)
        words = Words(np.empty(size, np.uint8), np.empty(count, np.uint64), np.empty(count, np.uint64))
        self.library.table_get(self._address, *(array.ctypes.data for array in words))
        return words

    def count(self, text: bytes) -> None:
        """Add 1 to the number of a word for each time that it occurs."""
        self.library.count_words(self._address, text, len(text), self._lower.ctypes.data, _LIMIT)

    def encode(self, text: bytes, dtype: str) -> NDArray[Any]:
        """The numbers of the words (T,) in 16 or 32 bit; 0 for unknown ones."""
        numbers = np.empty(len(text), dtype)
        encode = self.library.encode_words_16 if numbers.itemsize == 2 else self.library.encode_words_32
        count = encode(self._address, text, len(text), self._lower.ctypes.data, _LIMIT, numbers.ctypes.data)
        return numbers[:count]


@lru_cache
def lower_case() -> NDArray[np.uint32]:
    """The lower case of the code points below `_LIMIT`, by Python's version of Unicode; 0 for white space."""
    codes = np.arange(_LIMIT, dtype="<u4")
    codes[0xD800:0xE000] = ord("a")  # surrogates are not in UTF-8
    codes[[ord("Σ"), ord("İ")]] = ord("i")  # the one is left to Python, the other's second letter to the library
    text = codes.tobytes().decode("utf-32-le")
    table = np.frombuffer(text.lower().encode("utf-32-le"), "<u4").astype(np.uint32)
    table[[space.start() for space in re.finditer(r"\s", text)]] = 0
    return table


@lru_cache
def _library(folder: Path) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        library = LIBRARY.load(folder)
    except CannotCompile as error:
        return str(error)
    for name, (result, types) in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    return library


def parts(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Smaller pieces, so that all threads work to the end. No token and no lower case depends on what is behind a line
    feed; where there is none, as in text8, nothing is cut."""
    for piece in pieces:
        start = 0
        while start < len(piece.data):
            end = piece.data.find(b"\n", start + PART_BYTES) + 1 or len(piece.data)
            yield Piece(piece.path, piece.start + start, piece.data[start:end])
            start = end


def _count(folder: Path, piece: Piece) -> Words:
    library = _library(folder)
    if isinstance(library, str):  # another host, without a compiler
        return Words.of(WordTokenizer.count(piece.text()))
    table = WordTable(library)
    table.count(_checked(library, piece))
    return table.words()


def _checked(library: ctypes.CDLL, piece: Piece) -> bytes:
    """The piece as valid UTF-8, its lines with a Σ in lower case: it is the only letter whose lower case depends on
    those around it. Raises `UserError`."""
    kind = library.examine(piece.data, len(piece.data))
    if kind == _PLAIN:
        return piece.data
    text = piece.text()  # raises if it is `_INVALID`
    assert kind == _HAS_SIGMA
    return "\n".join(line.lower() if "Σ" in line else line for line in text.split("\n")).encode()
