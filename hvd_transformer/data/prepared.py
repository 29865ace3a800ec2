"""Prepared data as training reads it, a corpus of token files or encoded examples, and how their files are written."""

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.build_once import ShouldStop, Stopped
from hvd_transformer.data.compressed import blocks
from hvd_transformer.data.length_order import LengthOrder
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.token_file import MixedTokens, TokenFile, Tokens
from hvd_transformer.data.tokenizers import Tokenizer, sha256

INDEX = "index.json"


def token_dtype(vocab_size: int) -> str:
    """The smallest little-endian number format that holds every token of the vocabulary."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


class TokenWriter:
    """Writes `<folder>/<name>.bin`, the file of a `TokenFile`, array by array."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.dtype, self.count, self._digest = dtype, 0, hashlib.sha256()
        self._file: BinaryIO = (folder / f"{name}.bin").open("wb")

    @classmethod
    def resume(cls, folder: Path, name: str, entry: dict[str, Any], should_stop: ShouldStop) -> "TokenWriter | None":
        """Go on after what `checkpoint` returned; None if the file is not what it was then. Raises `Stopped`."""
        writer = cls.__new__(cls)
        writer.dtype, writer.count, writer._digest = entry["dtype"], entry["count"], hashlib.sha256()
        size = writer.count * np.dtype(writer.dtype).itemsize
        try:
            writer._file = (folder / f"{name}.bin").open("r+b")
        except FileNotFoundError:
            return None
        for data in blocks(writer._file, size):
            if should_stop():  # at each block: a slow disk takes long for a large file
                writer._file.close()
                raise Stopped
            writer._digest.update(data)
        if writer._digest.hexdigest() != entry["sha256"]:
            writer._file.close()
            return None
        writer._file.seek(size)
        writer._file.truncate()
        return writer

    def add(self, values: NDArray[Any]) -> None:
        """Append numbers (T,)."""
        data = np.ascontiguousarray(values, self.dtype).data
        self._digest.update(data)
        self._file.write(data)
        self.count += len(values)

    def checkpoint(self) -> dict[str, Any]:
        """Write all to the disk and return the entry in the index so far."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self.entry()

    def close(self) -> dict[str, Any]:
        """Close the file and return its entry in the index."""
        self._file.close()
        return self.entry()

    def entry(self) -> dict[str, Any]:
        """The entry in the index so far."""
        return {"dtype": self.dtype, "count": self.count, "sha256": self._digest.hexdigest()}


def file_entry(path: Path, dtype: str, count: int) -> dict[str, Any]:
    """The entry in the index of a file that was written otherwise."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(2**20):
            digest.update(data)
    return {"dtype": dtype, "count": count, "sha256": digest.hexdigest()}


@dataclass(frozen=True)
class TokenSequences:
    """One text per sample of a split: `texts[i]` is an array of token numbers (T,)."""

    tokens: TokenFile
    ends: TokenFile

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> NDArray[Any]:
        start = int(self.ends[index - 1 : index][0]) if index else 0
        return self.tokens[start : int(self.ends[index : index + 1][0])]

    def lengths(self, start: int, stop: int) -> NDArray[np.int64]:
        """Number of tokens of some texts [stop - start]."""
        return np.diff(self.ends[start:stop], prepend=self.ends[start - 1 : start] if start else 0)


@dataclass(frozen=True)
class EncodedExamples:
    """The samples of a split: their texts by role ("source", "target" or "text"), their labels if they have any, and
    the files of `length_order`, by the length of a sample's longest text. All of it is mapped."""

    texts: dict[str, TokenSequences]
    labels: TokenFile | None
    order: TokenFile
    histogram: TokenFile

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())))

    @property
    def digest(self) -> str:
        """Equal for equal samples."""
        files = [file for texts in self.texts.values() for file in (texts.tokens, texts.ends)]
        return sha256(" ".join(file.sha256 for file in (*files, self.labels) if file is not None))

    @cached_property
    def lengths(self) -> LengthOrder:
        """The samples by the number of tokens of their longest text."""
        return LengthOrder.sorted_before(self.order[:], self.histogram[:])


@dataclass(frozen=True)
class PreparedExamples:
    """Encoded examples: the splits "train", "valid" and possibly "test", or one split to evaluate.

    `labels`: the names of the classes, in the order of their numbers. `left_out`: per split, the number of samples left
    out for each reason. `label_counts`: the training samples of each label, if known.
    `digest` depends on tokenizers and samples alone, not on paths.
    """

    folder: Path
    tokenizers: dict[str, Tokenizer]
    splits: dict[str, EncodedExamples]
    labels: list[str]
    left_out: dict[str, dict[str, int]]
    digest: str
    label_counts: list[int] | None = None

    def report(self) -> list[str]:
        """Lines that describe the data to whoever prepared it."""
        sizes = [f"{split}: {len(examples):,} samples" for split, examples in self.splits.items()]
        vocabularies = [
            f"vocabulary of {role}: {tokenizer.vocab_size:,} ({tokenizer.kind})"
            for role, tokenizer in self.tokenizers.items()
        ]
        labels = [f"labels: {', '.join(self.labels)}"] if self.labels else []
        return [f"folder: {self.folder}", *sizes, *vocabularies, *labels, *left_out_lines(self.left_out)]

    @property
    def split_digests(self) -> dict[str, str]:
        """A digest per split; equal samples give equal digests."""
        return {split: examples.digest for split, examples in self.splits.items()}

    def raw_texts(self, split: str) -> Iterator[list[str]]:
        """The texts of each sample as they were read, one after the other. Those of the training split are kept only
        if it is the single split, to be evaluated."""
        with (self.folder / f"{split}.jsonl").open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def left_out_lines(left_out: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What was left out of each split (`PreparedExamples.left_out`), in words."""
    reasons = {split: ", ".join(f"{n:,} {reason}" for reason, n in found.items()) for split, found in left_out.items()}
    return [f"left out of {split}: {of_split}" for split, of_split in reasons.items() if of_split]


def read_examples(folder: Path, index: dict[str, Any]) -> PreparedExamples | None:
    """The encoded examples of this folder; None or an exception if it is damaged."""
    files = {name: TokenFile(folder / f"{name}.bin", **entry) for name, entry in index["files"].items()}
    roles, shared = index["settings"]["roles"], index["settings"]["shared"]
    tokenizers = {role: load_tokenizer(folder, tokenizer_prefix(role, roles, shared)) for role in roles}
    same = {role: tokenizer.digest for role, tokenizer in tokenizers.items()} == index["tokenizers"]
    if not same or not all(file.is_whole() for file in files.values()):
        return None
    splits = {
        split: EncodedExamples(
            {role: TokenSequences(files[f"{split}-{role}"], files[f"{split}-{role}-ends"]) for role in roles},
            files.get(f"{split}-label"),
            files[f"{split}-order"],
            files[f"{split}-lengths"],
        )
        for split in index["left_out"]
    }
    return PreparedExamples(
        folder, tokenizers, splits, index["labels"], index["left_out"], index["digest"], index["label_counts"]
    )


def tokenizer_prefix(role: str, roles: Collection[str], shared: bool) -> str:
    """The prefix of the tokenizer's file name for this role; empty if there is a single tokenizer."""
    return "" if shared or len(roles) == 1 else f"{role}-"


@dataclass(frozen=True)
class PreparedData:
    """A prepared corpus: the splits "train", "valid" and possibly "test", or one split to evaluate.

    `digest` depends on tokenizer and tokens alone, not on paths.
    """

    folder: Path
    tokenizer: Tokenizer
    splits: Mapping[str, Tokens | MixedTokens]
    digest: str
    has_documents: bool = False  # whether each document is followed by an end token

    @property
    def split_digests(self) -> dict[str, str]:
        """A digest per split; equal tokens give equal digests."""
        return {split: tokens.sha256 for split, tokens in self.splits.items()}

    def report(self) -> list[str]:
        """Lines that describe the data to whoever prepared it."""
        sizes = [f"{split}: {len(tokens):,} tokens" for split, tokens in self.splits.items()]
        vocabulary = f"vocabulary: {self.tokenizer.vocab_size:,} ({self.tokenizer.kind})"
        return [f"folder: {self.folder}", *sizes, vocabulary]


def read_corpus(folder: Path, index: dict[str, Any]) -> PreparedData | None:
    """The prepared corpus of this folder; None or an exception if it is damaged."""
    splits = {
        split: TokenFile(folder / f"{split}.bin", index["dtype"], entry["tokens"], entry["sha256"])
        for split, entry in index["splits"].items()
    }
    tokenizer = load_tokenizer(folder)
    same = tokenizer.digest == index["tokenizer"]["sha256"]
    if not same or not all(tokens.is_whole() for tokens in splits.values()):
        return None
    has_documents = bool(index["settings"]["corpus"].get("columns"))
    return PreparedData(folder, tokenizer, splits, index["digest"], has_documents)
