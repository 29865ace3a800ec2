"""From rows of texts to token files (`data.examples`): tokenizers are learned, samples encoded, the rest counted."""

import builtins
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import Report, ShouldStop, Stopped, build_once, never, silent
from hvd_transformer.data.prepare_text import OrderedMap, learning, prepared_folder
from hvd_transformer.data.prepared import PreparedExamples, load_examples, token_dtype, tokenizer_prefix
from hvd_transformer.data.splits import ExampleSource, RawExample
from hvd_transformer.data.tokenizers import (
    SPECIALS,
    VOCABULARY_KINDS,
    BPETokenizer,
    Tokenizer,
    build_vocabulary,
    sha256,
)
from hvd_transformer.errors import UserError

FORMAT = 1  # of the folder; another number prepares anew
_ROWS = 2000  # encoded at a time
_ENDS, _LABELS = "<i8", "<i4"


class TrainedVocabulary(NamedTuple):
    """What a model was trained with, for other rows: tokenizers by role, and the labels in the order of their
    numbers (None: to be learned from these rows)."""

    tokenizers: dict[str, Tokenizer]
    labels: list[str] | None

    @property
    def identity(self) -> dict[str, Any]:
        return {"tokenizers": [own.digest for own in self.tokenizers.values()], "labels": self.labels}


def prepare_examples(
    config: DataConfig,
    rows: ExampleSource,
    roles: tuple[str, ...],
    *,
    shared: bool = False,
    learned: TrainedVocabulary | None = None,
    map: OrderedMap = builtins.map,
    report: Report = silent,
    should_stop: ShouldStop = never,
) -> PreparedExamples:
    """The rows as token files, made now unless they are there. `roles` name a row's texts; `shared`: one vocabulary.
    Tokenizers and labels are learned from the training split, unless they are given.

    Several processes may call this at once: one works, the others wait. Raises `UserError` for what is wrong with the
    data, `Stopped` where `should_stop` said so.
    """
    settings = {
        "format": FORMAT,
        "rows": rows.identity,
        "roles": list(roles),
        "shared": shared,
        **{key: getattr(config, key) for key in ("sequence_length", "too_long")},
        **(learning(config) if learned is None else learned.identity),
    }
    folder = prepared_folder(config, rows.name, settings)

    def build(aside: Path) -> None:
        if folder.exists():
            report(f"{folder} is damaged: preparing it again")
        _Preparation(config, rows, roles, shared, learned, map, report, should_stop).write(aside, settings)

    return build_once(folder, load_examples, build, should_stop)


class _Column:
    """A file of numbers under way."""

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self.dtype, self.count, self._digest = dtype, 0, hashlib.sha256()
        self._file = (folder / f"{name}.bin").open("wb")

    def add(self, values: NDArray[Any]) -> None:
        data = values.astype(self.dtype).tobytes()
        self._digest.update(data)
        self._file.write(data)
        self.count += len(values)

    def close(self) -> dict[str, Any]:
        self._file.close()
        return {"dtype": self.dtype, "count": self.count, "sha256": self._digest.hexdigest()}


@dataclass
class _Preparation:
    """One preparation under way."""

    config: DataConfig
    rows: ExampleSource
    roles: tuple[str, ...]
    shared: bool
    learned: TrainedVocabulary | None
    map: OrderedMap
    report: Report
    should_stop: ShouldStop

    def write(self, folder: Path, settings: dict[str, Any]) -> None:
        """Fills the folder; `build_once` gives it its name."""
        tokenizers, labels = self.learned or (None, None)
        kinds = sorted({own.kind for own in tokenizers.values()}) if tokenizers else [self.config.tokenizer]
        self.report(f"Preparing {self.rows.name}: tokenizer {', '.join(kinds)}")
        if labels is None:
            labels = self._labels()
        tokenizers = tokenizers or self._make_tokenizers()
        for role, tokenizer in tokenizers.items():
            tokenizer.save(folder, tokenizer_prefix(role, self.roles, self.shared))
        files: dict[str, Any] = {}
        left_out: dict[str, dict[str, int]] = {}
        for split in self.rows.splits:
            found, left_out[split] = self._write_split(split, folder, tokenizers, labels)
            files |= found
            if out := left_out[split]:
                reasons = ", ".join(f"{number:,} {reason}" for reason, number in out.items())
                self.report(f"{self.rows.name}: left out of {split}: {reasons}")
        index = {
            "tokenizers": {role: tokenizer.digest for role, tokenizer in tokenizers.items()},
            "files": files,
            "labels": labels,
            "left_out": left_out,
        }
        index["digest"] = sha256(json.dumps(index, sort_keys=True))  # before the paths, which differ between hosts
        index["settings"] = {"source": self.config.source, **settings}
        (folder / "index.json").write_text(json.dumps(index, indent=2, ensure_ascii=False), encoding="utf-8")

    def _labels(self) -> list[str]:
        """Of the training split: as numbers where they all are some, else by code points."""
        found = {row.label for row in self._read("train") if row.label is not None}
        if not found:
            return []
        if len(found) < 2:
            raise UserError(
                f"data.label_column={self.config.label_column}: the training split has the label {found.pop()} alone; "
                "there must be two or more"
            )
        numeric = all(re.fullmatch(r"-?\d+", label) for label in found)
        return sorted(found, key=int if numeric else str)

    def _make_tokenizers(self) -> dict[str, Tokenizer]:
        if self.shared:
            return dict.fromkeys(self.roles, self._make_tokenizer(range(len(self.roles))))
        return {role: self._make_tokenizer([number]) for number, role in enumerate(self.roles)}

    def _make_tokenizer(self, columns: Iterable[int]) -> Tokenizer:
        """Of these texts of the training split's rows."""
        config, chosen = self.config, list(columns)
        texts = (row.texts[column] for row in self._read("train") for column in chosen)
        if config.tokenizer == BPETokenizer.kind:
            return BPETokenizer.train_on_lines(texts, config.vocab_size, config.min_frequency)
        counts: Counter[str] = Counter()
        for part in self.map(partial(_count, config.tokenizer), _chunks(texts)):
            counts.update(part)
        return build_vocabulary(config.tokenizer, counts, config.vocab_size, config.min_frequency, SPECIALS)

    def _write_split(
        self, split: str, folder: Path, tokenizers: dict[str, Tokenizer], labels: list[str]
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """Streams the split's samples into its files; returns what the index says of them, and what was left out."""
        columns = {}
        for role, tokenizer in tokenizers.items():
            columns[f"{split}-{role}"] = _Column(folder, f"{split}-{role}", token_dtype(tokenizer.vocab_size))
            columns[f"{split}-{role}-ends"] = _Column(folder, f"{split}-{role}-ends", _ENDS)
        if labels:
            columns[f"{split}-label"] = _Column(folder, f"{split}-label", _LABELS)
        numbers = {label: number for number, label in enumerate(labels)}
        left_out: Counter[str] = Counter()
        encode = partial(_encode, list(tokenizers.values()))
        kept_raw = split != "train" or len(self.rows.splits) == 1  # the training split's are for its evaluation alone
        raw = (folder / f"{split}.jsonl").open("w", encoding="utf-8") if kept_raw else None
        for chunk, encoded in self.map(encode, _chunks(self._read(split))):
            kept = [
                (row, texts) for row, texts in zip(chunk, encoded, strict=True) if self._keeps(row, texts, left_out)
            ]
            if raw is not None:
                raw.writelines(json.dumps(row.texts, ensure_ascii=False) + "\n" for row, _ in kept)
            for column, role in enumerate(tokenizers):
                texts = [tokenizers[role].shorten(texts[column], self.config.sequence_length) for _, texts in kept]
                tokens, ends = columns[f"{split}-{role}"], columns[f"{split}-{role}-ends"]
                ends.add(np.cumsum([len(text) for text in texts], dtype=np.int64) + tokens.count)
                tokens.add(np.concatenate(texts) if texts else np.empty(0, np.uint32))
            if labels:
                for row, _ in kept:
                    if row.label not in numbers:
                        alone = f"is in the {split} split alone; the training split has {', '.join(labels)}"
                        unknown = f"is none of the model's, which are {', '.join(labels)}"
                        raise UserError(f"{row.place}: the label {row.label} {unknown if self.learned else alone}")
                columns[f"{split}-label"].add(np.array([numbers[str(row.label)] for row, _ in kept]))
        if raw is not None:
            raw.close()
        if not columns[f"{split}-{self.roles[0]}-ends"].count:
            raise UserError(f"data.source={self.config.source}: the {split} split has no sample that can be used")
        return {name: column.close() for name, column in columns.items()}, dict(left_out)

    def _keeps(self, row: RawExample, texts: list[NDArray[Any]], left_out: Counter[str]) -> bool:
        """Whether the sample is used; if not it is counted."""
        limit = self.config.sequence_length
        if not all(len(text) for text in texts) or not all(text.strip() for text in row.texts):
            left_out["empty"] += 1
            return False
        longest = max(map(len, texts))
        if longest <= limit or self.config.too_long == "cut":
            return True
        if self.config.too_long == "error":
            raise UserError(
                f"{row.place}: {longest} tokens, more than data.sequence_length={limit}; raise it, or "
                "data.too_long=drop or cut"
            )
        left_out[f"of more than {limit} tokens"] += 1
        return False

    def _read(self, split: str) -> Iterator[RawExample]:
        for number, row in enumerate(self.rows.splits[split]()):
            if number % _ROWS == 0 and self.should_stop():
                raise Stopped
            yield row


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, _ROWS)):
        yield chunk


def _count(kind: str, texts: list[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(VOCABULARY_KINDS[kind].count(text))
    return counts


def _encode(tokenizers: list[Tokenizer], rows: list[RawExample]) -> tuple[list[RawExample], list[list[NDArray[Any]]]]:
    """Each row's texts as token numbers."""
    columns = [
        tokenizer.encode_lines([row.texts[column] for row in rows]) for column, tokenizer in enumerate(tokenizers)
    ]
    return rows, [list(texts) for texts in zip(*columns, strict=True)]
