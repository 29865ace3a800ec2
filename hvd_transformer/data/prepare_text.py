"""From `data.*` to token files: the text is cut in pieces, counted, encoded, and written as one folder.

```
<cache_dir>/prepared/<name>-<digest of the source and of every setting that matters>/
    tokenizer.json or vocabulary.json
    train.bin  valid.bin  test.bin      token numbers, 16 or 32 bit, little endian
    index.json                          number format, counts, checksums, settings
```
"""

import builtins
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import Report, ShouldStop, Stopped, build_once, never, silent
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.prepared import PreparedData, TokenFile, token_dtype
from hvd_transformer.data.text_corpus import Corpus, open_corpus
from hvd_transformer.data.text_files import Piece, TextSpan, read_pieces
from hvd_transformer.data.tokenizers import VOCABULARY_KINDS, BPETokenizer, Tokenizer, build_vocabulary, sha256
from hvd_transformer.errors import UserError

FORMAT = 1  # of the folder; another number prepares anew
REPORT_SECONDS = 10.0

A = TypeVar("A")
B = TypeVar("B")


class OrderedMap(Protocol):
    """The builtin `map`, or one that works on several items at once and gives the results in order."""

    def __call__(self, function: Callable[[A], B], items: Iterable[A], /) -> Iterator[B]: ...


def prepare(
    config: DataConfig,
    map: OrderedMap = builtins.map,
    report: Report = silent,
    should_stop: ShouldStop = never,
) -> PreparedData:
    """The corpus as token files, made now unless they are there.

    Memory is bounded by a few pieces and the vocabulary's counts. Several processes may call this at once:
    one works, the others wait. Raises `UserError` for what is wrong with the data, `Stopped` where
    `should_stop` said so.
    """
    return prepare_corpus(config, open_corpus(config, report, should_stop), None, map, report, should_stop)


def prepare_corpus(
    config: DataConfig,
    corpus: Corpus,
    tokenizer: Tokenizer | None,
    map: OrderedMap = builtins.map,
    report: Report = silent,
    should_stop: ShouldStop = never,
) -> PreparedData:
    """The same of this corpus. Without a `tokenizer` it is learned from the training split."""
    settings = {"format": FORMAT, "corpus": corpus.identity} | (
        learning(config) if tokenizer is None else {"tokenizer": tokenizer.digest}
    )
    folder = prepared_folder(config, corpus.name, settings)

    def build(aside: Path) -> None:
        if folder.exists():
            report(f"{folder} is damaged: preparing it again")
        _Preparation(config, corpus, tokenizer, map, report, should_stop).write(aside, settings)

    return build_once(folder, _load, build, should_stop)


def prepared_folder(config: DataConfig, name: str, settings: dict[str, Any]) -> Path:
    """Where the token files of these settings are, or will be."""
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:60] or "text"
    return Path(config.cache_dir).expanduser().absolute() / "prepared" / f"{name}-{key}"


def learning(config: DataConfig) -> dict[str, Any]:
    """What a tokenizer depends on beside the text."""
    return {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "min_frequency")}


def _load(folder: Path) -> PreparedData | None:
    """What is in the folder; None where it is not whole."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        splits = {
            split: TokenFile(folder / f"{split}.bin", index["dtype"], entry["tokens"], entry["sha256"])
            for split, entry in index["splits"].items()
        }
        tokenizer = load_tokenizer(folder)
        if tokenizer.digest != index["tokenizer"]["sha256"]:
            return None
        if not all(tokens.is_whole() for tokens in splits.values()):
            return None
        return PreparedData(folder, tokenizer, splits, index["digest"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None


@dataclass
class _Preparation:
    """One preparation under way."""

    config: DataConfig
    corpus: Corpus
    tokenizer: Tokenizer | None  # None: to be learned
    map: OrderedMap
    report: Report
    should_stop: ShouldStop

    def write(self, folder: Path, settings: dict[str, Any]) -> None:
        """Fills the folder; `build_once` gives it its name."""
        megabytes = sum(span.size for span in self.corpus.spans.values()) / 1e6
        kind = self.tokenizer.kind if self.tokenizer else self.config.tokenizer
        self.report(f"Preparing {self.corpus.name}: {megabytes:.1f} MB of text, tokenizer {kind}")
        tokenizer = self.tokenizer or self._make_tokenizer()
        tokenizer.save(folder)
        index: dict[str, Any] = {
            "format": FORMAT,
            "dtype": token_dtype(tokenizer.vocab_size),
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": {
                "kind": tokenizer.kind,
                "file": tokenizer.file_name,
                "sha256": tokenizer.digest,
            },
            "splits": {
                split: self._write_split(split, span, tokenizer, folder / f"{split}.bin")
                for split, span in self.corpus.spans.items()
            },
        }
        index["digest"] = sha256(json.dumps(index, sort_keys=True))  # before the paths, which differ between hosts
        index["settings"] = {"source": self.config.source, **settings}
        (folder / "index.json").write_text(json.dumps(index, indent=2, ensure_ascii=False), encoding="utf-8")

    def _make_tokenizer(self) -> Tokenizer:
        config, train = self.config, self.corpus.spans["train"]
        if config.tokenizer == BPETokenizer.kind:
            texts = (piece.text() for piece in self._pieces(train, "learning byte pairs"))
            return BPETokenizer.train(texts, config.vocab_size, config.min_frequency)
        counts: Counter[str] = Counter()
        count = partial(_count, config.tokenizer)
        for part in self.map(count, self._pieces(train, "counting tokens")):
            counts.update(part)
        if not counts:
            raise UserError(f"{train.path}: the train split has no token; it must hold text")
        return build_vocabulary(config.tokenizer, counts, config.vocab_size, config.min_frequency)

    def _write_split(self, split: str, span: TextSpan, tokenizer: Tokenizer, path: Path) -> dict[str, Any]:
        """Streams the split's tokens into its file, piece by piece."""
        dtype = token_dtype(tokenizer.vocab_size)
        digest, count = hashlib.sha256(), 0
        with path.open("wb") as file:
            for tokens in self.map(partial(_encode, tokenizer, dtype), self._pieces(span, f"encoding {split}")):
                data = tokens.tobytes()
                digest.update(data)
                file.write(data)
                count += len(tokens)
        if not count:
            raise UserError(f"{span.path}: the {split} split has no token; it must hold text")
        return {"tokens": count, "sha256": digest.hexdigest()}

    def _pieces(self, span: TextSpan, phase: str) -> Iterator[Piece]:
        """The span's pieces, with a line on how far it is every ten seconds."""
        reported = time.monotonic()
        for piece in read_pieces(span):
            if self.should_stop():
                raise Stopped
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                self.report(f"{self.corpus.name}: {phase}, {100 * (piece.start - span.start) / span.size:.0f} %")
            yield piece


def _count(kind: str, piece: Piece) -> Counter[str]:
    return VOCABULARY_KINDS[kind].count(piece.text())


def _encode(tokenizer: Tokenizer, dtype: str, piece: Piece) -> NDArray[np.unsignedinteger[Any]]:
    return tokenizer.encode(piece.text()).astype(dtype)
