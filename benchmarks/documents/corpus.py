"""Made-up documents: words from a vocabulary of 50,000, drawn by Zipf's law, and a byte-level BPE learned from them."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"
MEGABYTE = 10**6
_WORDS, _BLOCK, _QUANTILES = 50_000, 100, 2**20  # a block is so many documents
_CONSONANTS = (*"bcdfghjklmnprstvwz", "st", "tr", "ch")
_VOWELS = (*"aeiou", "é", "ou", "ai")


def write_corpus(folder: Path, megabytes: float, shard_megabytes: float) -> list[Path]:
    """`train-*.jsonl` of that size together, and a small `valid.jsonl`. Files that are there are kept: the same
    arguments give the same files."""
    count = max(1, round(megabytes / shard_megabytes))
    names = [f"train-{number:05}-of-{count:05}.jsonl" for number in range(count)]
    entries, table = _vocabulary(), _quantiles()
    for number, name in enumerate((*names, "valid.jsonl")):
        size = megabytes / count if name in names else min(1.0, megabytes / 100)
        if not (folder / name).exists():
            unfinished = folder / f"{name}.unfinished"
            with unfinished.open("wb") as file:
                for lines in _blocks(np.random.default_rng(number), entries, table):
                    file.write(lines)
                    if file.tell() >= size * MEGABYTE:
                        break
            unfinished.rename(folder / name)
    return [folder / name for name in names]


def write_tokenizer(folder: Path, sample: Path, vocab_size: int, megabytes: float) -> Path:
    """A folder with a byte-level BPE, learned from the beginning of a file, with `END` as its end of a document."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_first_documents(sample, megabytes), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}), encoding="utf-8")
    return folder


def documents(shards: Sequence[Path], first: int = 0, count: int | None = None) -> Iterator[str]:
    """The texts of all documents, or of so many from one on."""
    for line in islice(lines(shards), first, None if count is None else first + count):
        yield json.loads(line)["text"]


def lines(shards: Sequence[Path]) -> Iterator[bytes]:
    """The JSON of all documents."""
    for shard in shards:
        with shard.open("rb") as file:
            yield from file


def _first_documents(shard: Path, megabytes: float) -> Iterator[str]:
    left = megabytes * MEGABYTE
    for text in documents([shard]):
        yield text
        left -= len(text)
        if left < 0:
            return


def _vocabulary() -> NDArray[Any]:
    """As JSON's bytes: two marks, which are the most frequent, and words, the shorter the more frequent."""
    random = np.random.default_rng(0)
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    words = set[str]()
    while len(words) < _WORDS:
        drawn = random.integers(0, len(syllables), (_WORDS, 4)).tolist()
        for length, numbers in zip(random.integers(1, 5, _WORDS).tolist(), drawn, strict=True):
            words.add("".join(syllables[number] for number in numbers[:length]))
    chosen = sorted(words, key=lambda word: (len(word), word))[: _WORDS - 2]
    return np.array([entry.encode() for entry in (",", ".\\n", *(f" {word}" for word in chosen))], dtype=object)


def _quantiles() -> NDArray[np.uint16]:
    """Numbers of entries: one drawn from these is distributed by Zipf's law, which is faster than a search per word."""
    weights = 1 / (np.arange(_WORDS) + 2.7)
    return np.searchsorted(np.cumsum(weights) / weights.sum(), (np.arange(_QUANTILES) + 0.5) / _QUANTILES).astype(
        np.uint16
    )


def _blocks(random: np.random.Generator, entries: NDArray[Any], table: NDArray[np.uint16]) -> Iterator[bytes]:
    """JSON lines without end; the median document has 245 words."""
    while True:
        lengths = np.clip(random.lognormal(5.5, 1.0, _BLOCK), 1, 20_000).astype(int)
        words = entries[table[random.integers(0, _QUANTILES, lengths.sum(), dtype=np.uint32)]].tolist()
        ends = np.cumsum(lengths).tolist()
        texts = (b"".join(words[end - length : end]) for end, length in zip(ends, lengths.tolist(), strict=True))
        yield b"".join(b'{"text": "' + text + b'"}\n' for text in texts)
