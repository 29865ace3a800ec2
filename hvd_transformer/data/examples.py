"""Samples that are texts, prepared as token files: what translation and classification train on.

```
<cache_dir>/prepared/<name>-<digest of the files and of every setting that matters>/
    source-tokenizer.json  target-tokenizer.json      or vocabulary.json; of one text or a shared one: tokenizer.json
    train-source.bin  train-source-ends.bin  …        token numbers, one sample after the other, and where each ends
    train-label.bin                                   a number a sample
    valid.jsonl  test.jsonl                           the texts as they were read
    index.json                                        number formats, counts, checksums, labels, what was left out
```
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.tokenizers import Tokenizer, load_tokenizer, sha256
from hvd_transformer.data.tokens import TokenFile
from hvd_transformer.errors import UserError


@dataclass(frozen=True)
class Sentences:
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
class Examples:
    """A split's samples: their texts by role ("source", "target" or "text"), and labels where they have some."""

    texts: dict[str, Sentences]
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
    splits: dict[str, Examples]
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
            split: Examples(
                {role: Sentences(files[f"{split}-{role}"], files[f"{split}-{role}-ends"]) for role in roles},
                files.get(f"{split}-label"),
            )
            for split in index["left_out"]
        }
        return PreparedExamples(folder, tokenizers, splits, index["labels"], index["left_out"], index["digest"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError):
        return None
