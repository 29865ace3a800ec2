"""Preparation by `hvd-transformer prepare`, as a user starts it: to its end, or killed and resumed."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from click import ClickException
from tokenizers import Tokenizer

from benchmarks.documents.corpus import END, documents, lines
from benchmarks.documents.watched import Watched, watch
from benchmarks.settings import BIN, ENVIRONMENT

PROCESSES = 2
DTYPE = np.dtype("<u2")
_BLOCK = 2**24  # numbers read at a time
_CHECKED = 200  # documents decoded at a place


@dataclass(frozen=True)
class Preparation:
    """Of the documents in a folder, by the tokenizer of another, into a cache of its own."""

    source: Path
    tokenizer: Path
    cache: Path

    def run(self, kill_when: Callable[[], bool] | None = None) -> Watched:
        """Prepares what is not yet prepared, or until it is killed."""
        command = [str(BIN / "hvd-transformer"), "prepare", f"data.source={self.source}", "data.text_column=text"]
        command += [f"data.tokenizer={self.tokenizer}", "data.split=[0.9,0.1]", f"data.cache_dir={self.cache}"]
        command += [f"data.workers={PROCESSES}"]
        return watch(command, {**os.environ, **ENVIRONMENT}, kill_when)

    @property
    def written(self) -> int:
        """Tokens of the training split that an unfinished preparation has written, saved or not."""
        files = list(self.cache.glob("prepared/.*.tmp/train.bin"))
        return files[0].stat().st_size // DTYPE.itemsize if files else 0

    @property
    def tokens(self) -> Path:
        """The finished training split."""
        (file,) = self.cache.glob("prepared/*/train.bin")
        return file

    @property
    def entry(self) -> dict[str, Any]:
        """Its number of tokens and checksum, as the index has them."""
        index = json.loads(self.tokens.with_name("index.json").read_text(encoding="utf-8"))
        assert np.dtype(index["dtype"]) == DTYPE
        entry: dict[str, Any] = index["splits"]["train"]
        return entry

    def check(self, shards: list[Path], place: int) -> int:
        """The number of documents, each of which must have its end. Those around a token, decoded, must be those of the
        shards, as must the last ones. Raises `ClickException`."""
        numbers = np.memmap(self.tokens, DTYPE, "r")
        tokenizer = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
        ends = np.concatenate(
            [
                start + np.flatnonzero(numbers[start : start + _BLOCK] == tokenizer.token_to_id(END))
                for start in range(0, len(numbers), _BLOCK)
            ]
        )
        total = sum(1 for _ in lines(shards))
        if len(ends) != total or ends[-1] != len(numbers) - 1:
            raise ClickException(f"{self.tokens}: has the ends of {len(ends)} documents instead of {total}")
        middle = int(np.searchsorted(ends, place))
        for first in (max(0, middle - _CHECKED // 2), max(0, total - _CHECKED)):
            bounds = [-1 if first == 0 else int(ends[first - 1]), *map(int, ends[first : first + _CHECKED])]
            texts = [tokenizer.decode(numbers[start + 1 : end].tolist()) for start, end in pairwise(bounds)]
            if texts != list(documents(shards, first, len(texts))):
                raise ClickException(f"{self.tokens}: documents {first} to {first + len(texts) - 1} are others")
        return total


def kill_and_resume(preparation: Preparation, shards: list[Path], share: float) -> dict[str, Any]:
    """Prepares all documents, but kills all processes when about this share is done, and starts again. The figures of
    both runs; `written` is what the file had at the kill, `kept` what the second start found. Raises `ClickException`
    where that begins anew, or the file is wrong."""
    wanted = share * _expected_tokens(preparation.tokenizer, shards)
    killed = preparation.run(kill_when=lambda: preparation.written >= wanted)
    written = preparation.written
    resumed = preparation.run()
    if (found := re.search(r"resumes after ([\d,]+) tokens", resumed.output)) is None:
        raise ClickException(f"the second start began anew:\n{resumed.output}")
    kept, total = int(found[1].replace(",", "")), int(preparation.entry["tokens"])
    return {
        "documents": preparation.check(shards, kept),
        "tokens": total,
        "written": written,
        "kept": kept,
        "killed": killed.figures(written),
        "resumed": resumed.figures(total - kept),
    }


def _expected_tokens(tokenizer: Path, shards: list[Path]) -> float:
    """About how many tokens all documents have, by the first ones."""
    model = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tokens = sum(len(model.encode(text).ids) for text in documents(shards, 0, _CHECKED))
    size = sum(len(line) for line in islice(lines(shards), _CHECKED))
    return tokens * sum(shard.stat().st_size for shard in shards) / size
