"""Prepare examples as token files: tokenizers and labels are learned, samples encoded, unusable ones counted.

```
<cache_dir>/prepared/<name>-<digest of the source and of every setting that matters>/
    [<role>-]tokenizer.json or vocabulary.json
    <split>-<role>.bin  <split>-<role>-ends.bin     token numbers of all samples, and where each sample ends
    <split>-label.bin                               numbers of the labels, if there are any
    <split>-order.bin  <split>-lengths.bin          the samples by length: see length_order
    <split>.jsonl                                   the raw texts of splits that are evaluated
    index.json
```
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import ALONE, PrepareContext, Stopped
from hvd_transformer.data.example_encoder import Encoded, Encoder, TextEncoder
from hvd_transformer.data.learn_tokenizer import evenly, report_sample, sample_bytes, tokenizer_settings, total
from hvd_transformer.data.length_order import order_dtype, write_length_order
from hvd_transformer.data.prepare_folder import prepare_folder
from hvd_transformer.data.prepared import (
    PreparedExamples,
    TokenSequences,
    TokenWriter,
    file_entry,
    read_examples,
    token_dtype,
    tokenizer_prefix,
)
from hvd_transformer.data.splits import ExampleSource, RawExample
from hvd_transformer.data.token_file import TokenFile
from hvd_transformer.data.tokenizers import SPECIALS, VOCABULARY_KINDS, BPETokenizer, Tokenizer, build_vocabulary
from hvd_transformer.errors import UserError

FORMAT = 3  # of prepared examples; another number prepares all of them anew
Item = TypeVar("Item")
_MOST_LABELS = 1000  # of which each may have a single sample
_CHUNK, _CHUNK_CHARACTERS = 2000, 2**22  # samples encoded at a time, at most: so many, or of about so much text


class TrainedVocabulary(NamedTuple):
    """The vocabulary of a trained model: its tokenizers by role, and its labels in the order of their numbers (None: to
    be learned from the data)."""

    tokenizers: dict[str, Tokenizer]
    labels: list[str] | None


def prepare_examples(
    config: DataConfig,
    source: ExampleSource,
    roles: tuple[str, ...],
    *,
    shared: bool = False,
    learned: TrainedVocabulary | None = None,
    encoder: Encoder | None = None,
    context: PrepareContext = ALONE,
) -> PreparedExamples:
    """The examples as token files, prepared now unless they exist.

    `roles` name the texts of an example; with `shared` all roles have one vocabulary. Tokenizers and labels are learned
    from the training split unless they are given as `learned`. Without an `encoder` the tokenizer of each role encodes
    its text. Several processes may call this at once: one prepares, the others wait. Raises `UserError` if the data
    cannot be used, `Stopped` on request.
    """
    if learned is None:
        own = tokenizer_settings(config, source.train_bytes)
    else:
        own = {"tokenizers": [tokenizer.digest for tokenizer in learned.tokenizers.values()], "labels": learned.labels}
    settings = {
        "format": FORMAT,
        "rows": source.identity,
        "roles": list(roles),
        "shared": shared,
        "sequence_length": config.sequence_length,
        "too_long": config.too_long,
        **({"target_length": config.target_length} if config.target_length else {}),  # as before there was such a key
        **own,
    }
    if encoder is not None:
        settings["encoder"] = encoder.digest
    write = _ExampleWriter(config, source, roles, shared, learned, encoder, context).write
    found = prepare_folder(config, source.name, settings, write, read_examples, context)
    # Digests are of token numbers alone: the folder may be of tokenizers with another end token or chat template.
    return found if learned is None else replace(found, tokenizers=learned.tokenizers)


class _Written(NamedTuple):
    """A split that was written: the index entries of its files, the number of samples left out for each reason, and of
    samples of each label."""

    files: dict[str, Any]
    left_out: dict[str, int]
    label_counts: list[int]


@dataclass(frozen=True)
class _ExampleWriter:
    config: DataConfig
    source: ExampleSource
    roles: tuple[str, ...]
    shared: bool
    learned: TrainedVocabulary | None
    encoder: Encoder | None
    context: PrepareContext

    def write(self, folder: Path) -> dict[str, Any]:
        tokenizers, labels = self.learned or (None, None)
        kinds = sorted({own.kind for own in tokenizers.values()}) if tokenizers else [self.config.tokenizer]
        self.context.report(f"Preparing {self.source.name}: tokenizer {', '.join(kinds)}")
        if labels is None:
            labels = self._learn_labels()
        tokenizers = tokenizers or self._learn_tokenizers()
        for role, tokenizer in tokenizers.items():
            tokenizer.save(folder, tokenizer_prefix(role, self.roles, self.shared))
        written: dict[str, _Written] = {}
        for split in self.source.splits:
            written[split] = self._write_split(split, folder, tokenizers, labels)
        return {
            "tokenizers": {role: tokenizer.digest for role, tokenizer in tokenizers.items()},
            "files": {name: entry for own in written.values() for name, entry in own.files.items()},
            "labels": labels,
            "label_counts": written["train"].label_counts if "train" in written else None,
            "left_out": {split: own.left_out for split, own in written.items()},
        }

    def _learn_labels(self) -> list[str]:
        """The labels of the training split: by value if all are integers, else by code points."""
        counts = Counter(example.label for example in self._read("train") if example.label is not None)
        if not (found := set(counts)):
            return []
        if len(found) > max(_MOST_LABELS, counts.total() / 2):
            raise UserError(
                f"data.label_column={self.config.label_column}: {len(found):,} labels for {counts.total():,} training "
                "samples; it must be the column with the class"
            )
        if len(found) < 2:
            raise UserError(
                f"data.label_column={self.config.label_column}: the training split has only the label {found.pop()}; "
                "there must be two or more"
            )
        numeric = all(re.fullmatch(r"-?\d{1,99}", label) for label in found)
        return sorted(found, key=lambda label: (int(label) if numeric else 0, label))  # "1" and "01" are two labels

    def _learn_tokenizers(self) -> dict[str, Tokenizer]:
        if self.shared:
            return dict.fromkeys(self.roles, self._learn_tokenizer(range(len(self.roles))))
        return {role: self._learn_tokenizer([number]) for number, role in enumerate(self.roles)}

    def _learn_tokenizer(self, columns: Sequence[int]) -> Tokenizer:
        """Learn from these texts of every training example, byte pairs from a sample of them."""
        config = self.config
        if config.tokenizer == BPETokenizer.kind:
            return BPETokenizer.train(
                self._sample(columns),
                config.vocab_size,
                config.min_frequency,
                sentences=True,
                should_stop=self.context.should_stop,
            )
        counts = total(self.context.map(partial(_count, config.tokenizer), _chunks(self._texts(columns), len)))
        return build_vocabulary(config.tokenizer, counts, config.vocab_size, config.min_frequency, SPECIALS)

    def _sample(self, columns: Sequence[int]) -> Iterator[str]:
        """What byte pairs are learned from: all texts, or some from everywhere in the training split."""
        if sample_bytes(self.config, self.source.train_bytes) is not None:  # there may be more than the sample
            size = sum(len(text.encode()) for text in self._texts(columns))
            if (sample := sample_bytes(self.config, size)) is not None:
                report_sample(self.context, self.source.name, sample, size)
                return evenly(self._texts(columns), lambda text: len(text.encode()), sample / size)
        return self._texts(columns)

    def _texts(self, columns: Sequence[int]) -> Iterator[str]:
        return (example.texts[column] for example in self._read("train") for column in columns)

    def _write_split(self, split: str, folder: Path, tokenizers: dict[str, Tokenizer], labels: list[str]) -> _Written:
        """Write the samples of a split chunk by chunk, then their order by length."""
        files = {}
        for role, tokenizer in tokenizers.items():
            highest = max(tokenizer.vocab_size, self.config.sequence_length)  # some roles are places
            files[role] = TokenWriter(folder, f"{split}-{role}", token_dtype(highest))
            files[f"{role}-ends"] = TokenWriter(folder, f"{split}-{role}-ends", "<i8")
        if labels:
            files["label"] = TokenWriter(folder, f"{split}-label", "<i4")
        left_out: Counter[str] = Counter()
        label_counts = np.zeros(len(labels), np.int64)
        encoder = self.encoder or TextEncoder(list(tokenizers.values()))
        limits = [self.config.length_of(role) for role in tokenizers]
        # The raw texts of the training split are needed only where it is evaluated.
        keep_raw = split != "train" or len(self.source.splits) == 1
        raw = (folder / f"{split}.jsonl").open("w", encoding="utf-8") if keep_raw else None
        for chunk, encoded in self.context.map(partial(_encode, encoder), _chunks(self._read(split), _size)):
            samples = zip(chunk, encoded, strict=True)
            usable = [
                (example, encoder.shorten(arrays, limits))
                for example, arrays in samples
                if self._keeps(example, arrays, left_out)
            ]
            kept = [(example, arrays) for example, arrays in usable if all(map(len, arrays))]
            if len(kept) < len(usable):  # such as a conversation whose answers are behind the cut
                left_out["empty after the cut"] += len(usable) - len(kept)
            if raw is not None:
                raw.writelines(json.dumps(example.texts, ensure_ascii=False) + "\n" for example, _ in kept)
            for column, role in enumerate(tokenizers):
                own = [arrays[column] for _, arrays in kept]
                ends = np.cumsum([len(array) for array in own], dtype=np.int64) + files[role].count
                files[f"{role}-ends"].add(ends)
                files[role].add(np.concatenate(own) if own else np.empty(0, np.uint32))
            if labels:
                numbers = self._label_numbers(split, labels, [example for example, _ in kept])
                files["label"].add(numbers)
                label_counts += np.bincount(numbers, minlength=len(labels))
        if raw is not None:
            raw.close()
        if not files[f"{self.roles[0]}-ends"].count:
            raise UserError(f"data.source={self.config.source}: the {split} split has no usable sample")
        entries = {f"{split}-{name}": file.close() for name, file in files.items()}
        entries |= self._write_order(split, folder, entries)
        return _Written(entries, dict(left_out), label_counts.tolist())

    def _write_order(self, split: str, folder: Path, entries: dict[str, Any]) -> dict[str, Any]:
        """Sort the samples of a split by the length of their longest text; return the index entries."""
        texts = []
        for role in self.roles:
            names = f"{split}-{role}", f"{split}-{role}-ends"
            texts.append(TokenSequences(*(TokenFile(folder / f"{name}.bin", **entries[name]) for name in names)))

        def lengths(start: int, stop: int) -> NDArray[np.int64]:
            longest: NDArray[np.int64] = np.max([own.lengths(start, stop) for own in texts], axis=0)
            return longest

        path = folder / f"{split}-order.bin"
        histogram = TokenWriter(folder, f"{split}-lengths", "<i8")
        histogram.add(write_length_order(path, len(texts[0]), lengths))
        order = file_entry(path, order_dtype(len(texts[0])), len(texts[0]))
        return {f"{split}-order": order, f"{split}-lengths": histogram.close()}

    def _label_numbers(self, split: str, labels: list[str], examples: list[RawExample]) -> NDArray[np.int64]:
        numbers = {label: number for number, label in enumerate(labels)}
        given = self.learned is not None and self.learned.labels is not None
        for example in examples:
            if example.label not in numbers:
                alone = f"is only in the {split} split; the training split has {', '.join(labels)}"
                unknown = f"is none of the model's labels, which are {', '.join(labels)}"
                raise UserError(f"{example.place}: the label {example.label} {unknown if given else alone}")
        return np.array([numbers[str(example.label)] for example in examples], np.int64)

    def _keeps(self, example: RawExample, texts: Encoded, left_out: Counter[str]) -> bool:
        """Whether the sample is used; if not, its reason is counted."""
        if not all(len(text) for text in texts) or not all(text.strip() for text in example.texts):
            left_out["empty"] += 1
            return False
        if self.config.too_long == "cut":
            return True
        apart = self.config.target_length is not None
        for role, text in zip(self.roles, texts, strict=True):
            if len(text) <= (limit := self.config.length_of(role)):
                continue
            if self.config.too_long == "error":
                key = "target_length" if apart and role == "target" else "sequence_length"
                raise UserError(
                    f"{example.place}: {len(text)} tokens, more than data.{key}={limit}; raise it, or set "
                    "data.too_long=drop or cut"
                )
            left_out[f"of more than {limit} tokens" + (f" in the {role}" if apart else "")] += 1
            return False
        return True

    def _read(self, split: str) -> Iterator[RawExample]:
        for chunk in _chunks(self.source.splits[split](), _size):
            if self.context.should_stop():
                raise Stopped
            yield from chunk


def _chunks(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Lists of items in order, by their sizes in characters."""
    chunk, characters = list[Item](), 0
    for item in items:
        chunk.append(item)
        characters += size(item)
        if len(chunk) == _CHUNK or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _size(example: RawExample) -> int:
    return sum(map(len, example.texts))


def _count(kind: str, texts: list[str]) -> Counter[str]:
    return total(VOCABULARY_KINDS[kind].count(text) for text in texts)


def _encode(encoder: Encoder, examples: list[RawExample]) -> tuple[list[RawExample], list[Encoded]]:
    return examples, encoder.encode(examples)
