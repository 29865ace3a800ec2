"""Prepared data as training sees it: memory-mapped token files and encoded examples."""

import hashlib
import json
import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.tokenizers import Tokenizer, sha256
from hvd_transformer.errors import UserError


def token_dtype(vocab_size: int) -> str:
    """The smallest little-endian number format that holds every token of the vocabulary."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


@dataclass
class TokenFile:
    """`len(tokens)` and `tokens[start:stop]` of a file that need not fit into memory.

    A slice is a read-only array (T,) of the stored format that maps the file, no copy.
    """

    path: Path
    dtype: str
    count: int
    sha256: str
    _mapped: NDArray[Any] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, span: slice) -> NDArray[Any]:
        if self._mapped is None:
            self._mapped = self._open()
        return self._mapped[span]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": None}  # another process maps the file itself

    @property
    def num_bytes(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize

    def is_whole(self) -> bool:
        """Whether the file is there with the size that the index tells."""
        return self.path.is_file() and self.path.stat().st_size == self.num_bytes

    def verify(self) -> None:
        """Reads the whole file. Raises `UserError` where its checksum is not the index's."""
        self._check_size()
        digest = hashlib.sha256()
        with self.path.open("rb") as file:
            while chunk := file.read(2**20):
                digest.update(chunk)
        if digest.hexdigest() != self.sha256:
            raise UserError(f"{self.path}: damaged, its checksum differs; remove its folder to prepare it again")

    def _open(self) -> NDArray[Any]:
        self._check_size()
        if not self.count:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        with self.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):  # windows come in shuffled order: reading ahead would be in vain
            mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, dtype=self.dtype)

    def _check_size(self) -> None:
        if not self.is_whole():
            size = self.path.stat().st_size if self.path.is_file() else "no"
            damage = f"damaged, {size} bytes instead of {self.num_bytes}"
            raise UserError(f"{self.path}: {damage}; remove its folder to prepare it again")


@dataclass(frozen=True)
class TokenSequences:
    """One text of every sample of a split: `sentences[i]` are its token numbers (T,)."""

    tokens: TokenFile
    ends: TokenFile

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> NDArray[Any]:
        start = int(self.ends[index - 1 : index][0]) if index else 0
        return self.tokens[start : int(self.ends[index : index + 1][0])]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Of every one, in tokens (N,)."""
        return np.diff(self.ends[:], prepend=0)


@dataclass(frozen=True)
class EncodedExamples:
    """A split's samples: their texts by role ("source", "target" or "text"), and labels where they have some."""

    texts: dict[str, TokenSequences]
    labels: TokenFile | None

    def __len__(self) -> int:
        return len(next(iter(self.texts.values())))

    def checksums(self) -> list[str]:
        """Of its files."""
        files = [file for texts in self.texts.values() for file in (texts.tokens, texts.ends)]
        return [file.sha256 for file in (*files, self.labels) if file is not None]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Of each sample's longest text (N,)."""
        longest: NDArray[np.int64] = np.max([texts.lengths for texts in self.texts.values()], axis=0)
        return longest


@dataclass(frozen=True)
class PreparedExamples:
    """`train`, `valid` and, where there is one, `test`; or one split to evaluate. `digest` is the same wherever
    tokenizers and samples are.

    `labels`: the classes' names, in the order of their numbers. `left_out`: by split, how many for which reason.
    `label_counts`: the training split's samples of each label, where that split is not among these.
    """

    folder: Path
    tokenizers: dict[str, Tokenizer]
    splits: dict[str, EncodedExamples]
    labels: list[str]
    left_out: dict[str, dict[str, int]]
    digest: str
    label_counts: list[int] | None = None

    def report(self) -> list[str]:
        """Lines for who prepared it."""
        sizes = [f"{split}: {len(examples):,} samples" for split, examples in self.splits.items()]
        vocabularies = [
            f"vocabulary of {role}: {tokenizer.vocab_size:,} ({tokenizer.kind})"
            for role, tokenizer in self.tokenizers.items()
        ]
        labels = [f"labels: {', '.join(self.labels)}"] if self.labels else []
        return [f"folder: {self.folder}", *sizes, *vocabularies, *labels]

    @property
    def split_digests(self) -> dict[str, str]:
        """The same for the same samples."""
        return {split: sha256(" ".join(examples.checksums())) for split, examples in self.splits.items()}

    def raw_texts(self, split: str) -> list[list[str]]:
        """Every sample's texts as they were read. The training split's are kept where it is evaluated alone."""
        with (self.folder / f"{split}.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def tokenizer_prefix(role: str, roles: Iterable[str], shared: bool) -> str:
    """What its file's name begins with."""
    return "" if shared or len(list(roles)) == 1 else f"{role}-"


def load_examples(folder: Path) -> PreparedExamples | None:
    """What is in the folder; None where it is not whole."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        files = {
            name: TokenFile(folder / f"{name}.bin", entry["dtype"], entry["count"], entry["sha256"])
            for name, entry in index["files"].items()
        }
        roles, shared = index["settings"]["roles"], index["settings"]["shared"]
        tokenizers = {role: load_tokenizer(folder, tokenizer_prefix(role, roles, shared)) for role in roles}
        if {role: tokenizer.digest for role, tokenizer in tokenizers.items()} != index["tokenizers"]:
            return None
        if not all(file.is_whole() for file in files.values()):
            return None
        splits = {
            split: EncodedExamples(
                {role: TokenSequences(files[f"{split}-{role}"], files[f"{split}-{role}-ends"]) for role in roles},
                files.get(f"{split}-label"),
            )
            for split in index["left_out"]
        }
        return PreparedExamples(folder, tokenizers, splits, index["labels"], index["left_out"], index["digest"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None


@dataclass(frozen=True)
class PreparedData:
    """A prepared corpus: `train`, `valid` and, where there is one, `test`; or one split to evaluate.

    `digest` is the same wherever tokenizer and tokens are the same, whatever the paths.
    """

    folder: Path
    tokenizer: Tokenizer
    splits: dict[str, TokenFile]
    digest: str

    @property
    def split_digests(self) -> dict[str, str]:
        """The same for the same tokens."""
        return {split: tokens.sha256 for split, tokens in self.splits.items()}

    def report(self) -> list[str]:
        """Lines for who prepared it."""
        sizes = [f"{split}: {len(tokens):,} tokens" for split, tokens in self.splits.items()]
        return [
            f"folder: {self.folder}", *sizes, f"vocabulary: {self.tokenizer.vocab_size:,} ({self.tokenizer.kind})"
        ]  # fmt: skip
