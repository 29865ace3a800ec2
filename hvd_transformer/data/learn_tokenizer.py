"""Learn a tokenizer from training text: one for a corpus, or one for all corpora of a mixture."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from hvd_transformer.config.mixture import mixed_sources
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.corpus_pieces import CorpusPieces, Spans
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.parquet import Rows
from hvd_transformer.data.prepare_folder import prepare_folder
from hvd_transformer.data.shards import check_shards, cut_splits, text_bytes
from hvd_transformer.data.text_corpus import Corpus
from hvd_transformer.data.text_files import Piece
from hvd_transformer.data.tokenizers import (
    DOCUMENT_SPECIALS,
    UNKNOWN,
    VOCABULARY_KINDS,
    BPETokenizer,
    Tokenizer,
    build_vocabulary,
)
from hvd_transformer.data.words import count_words
from hvd_transformer.errors import UserError

FORMAT = 2  # of a kept tokenizer; another number learns all of them anew
LEAST_PIECE = 2**12  # bytes of a sample's pieces, at least
Item = TypeVar("Item")
Text = tuple[CorpusPieces, Spans]  # the training split of a corpus


def tokenizer_settings(config: DataConfig, train_bytes: int) -> dict[str, Any]:
    """The settings that a learned tokenizer depends on, besides at most so many bytes of text."""
    found = {key: getattr(config, key) for key in ("tokenizer", "vocab_size", "min_frequency")}
    sample = sample_bytes(config, train_bytes)
    return found if sample is None else {**found, "tokenizer_sample_mb": config.tokenizer_sample_mb}


def sample_bytes(config: DataConfig, train_bytes: int) -> int | None:
    """The bytes of text to learn from, of so many; None: all."""
    if config.tokenizer != BPETokenizer.kind or config.tokenizer_sample_mb is None:
        return None
    limit = int(config.tokenizer_sample_mb * 2**20)
    return limit if limit < train_bytes else None


def evenly(items: Iterable[Item], size: Callable[[Item], int], share: float) -> Iterator[Item]:
    """About this share of the items by their size, spread evenly over all of them; always the same ones."""
    seen = taken = 0
    for item in items:
        if taken <= share * seen:
            taken += size(item)
            yield item
        seen += size(item)


def report_sample(context: PrepareContext, name: str, sample: int, whole: int) -> None:
    """Tell how much of the training split's text byte pairs are learned from, in bytes."""
    context.report(
        f"{name}: byte pairs are learned from {sample / 2**20:.1f} of {whole / 2**20:.1f} MiB, spread over the "
        "training split (data.tokenizer_sample_mb)"
    )


def total(counts: Iterable[Counter[str]]) -> Counter[str]:
    """The sum of all counts."""
    result: Counter[str] = Counter()
    for part in counts:
        result.update(part)
    return result


def learn_common_tokenizer(
    config: DataConfig, corpora: Sequence[Corpus], has_documents: bool, context: PrepareContext
) -> Tokenizer:
    """One tokenizer for a mixture, learned now unless it exists from the training splits of these corpora, those of
    the sources that are trained on.

    Raises `UserError` if the data cannot be used, `Stopped` on request.
    """
    own = tokenizer_settings(config, sum(corpus.train_bytes for corpus in corpora))
    identities = [corpus.identity for corpus in corpora]
    settings = {"format": FORMAT, "corpora": identities, "documents": has_documents, **own}
    sources = [source.config.source for source in mixed_sources(config) if source.weight != 0]

    def write(folder: Path) -> dict[str, Any]:
        for source, corpus in zip(sources, corpora, strict=True):
            check_shards({"source": source, "corpus": corpus.identity}, folder.parent)
        context.report(f"Learning one tokenizer {config.tokenizer} for {', '.join(corpus.name for corpus in corpora)}")
        tokenizer = learn_tokenizer(
            [
                (CorpusPieces(config, corpus, context), cut_splits(corpus.splits, context)["train"])
                for corpus in corpora
            ],
            has_documents,
        )
        tokenizer.save(folder)
        return {"format": FORMAT, "tokenizer": tokenizer.digest}

    def read(folder: Path, index: dict[str, Any]) -> Tokenizer | None:
        tokenizer = load_tokenizer(folder)
        return tokenizer if tokenizer.digest == index["tokenizer"] else None

    return prepare_folder(config, "mixture", settings, write, read, context)


def learn_tokenizer(texts: Sequence[Text], has_documents: bool) -> Tokenizer:
    """The tokenizer of `data.tokenizer` for all these texts, with an end token for documents. Raises `UserError` if
    they have no token."""
    first, spans = texts[0]
    config, context = first.config, first.context
    specials = DOCUMENT_SPECIALS if has_documents else (UNKNOWN,)
    if config.tokenizer == BPETokenizer.kind:
        return BPETokenizer.train(
            (text for piece in _sample(texts) for text in piece.texts()),
            config.vocab_size,
            config.min_frequency,
            specials=specials,
            should_stop=context.should_stop,
        )
    pieces = chain.from_iterable(_pieces(text, "counting tokens") for text in texts)
    if all(reader.is_native(config.tokenizer) for reader, _ in texts):
        running = (piece for piece in pieces if isinstance(piece, Piece))
        counts = count_words(first.libraries, context.thread_map, running)
    else:
        counts = total(context.map(partial(_count, config.tokenizer), pieces))
    if not counts:
        raise UserError(f"{spans[0].path}: the train split has no token; it must hold text")
    return build_vocabulary(config.tokenizer, counts, config.vocab_size, config.min_frequency, specials)


def _sample(texts: Sequence[Text]) -> Iterator[Piece | Rows]:
    """What byte pairs are learned from: all of the texts, or small pieces from everywhere in them."""
    config, context, phase = texts[0][0].config, texts[0][0].context, "learning byte pairs"
    sample, sizes = sample_bytes(config, sum(reader.corpus.train_bytes for reader, _ in texts)), [0]
    if sample is not None:  # there may be more than the sample
        sizes = [text_bytes(spans, context) for _, spans in texts]
        sample = sample_bytes(config, whole := sum(sizes))
    if sample is None:
        yield from chain.from_iterable(_pieces(text, phase) for text in texts)
        return
    for text, size in zip(texts, sizes, strict=True):
        report_sample(context, text[0].corpus.name, sample * size // whole, size)
        pieces = _pieces(text, phase, max(LEAST_PIECE, sample // 256))
        yield from evenly(pieces, lambda piece: piece.size, sample / whole)


def _pieces(text: Text, phase: str, piece_bytes: int | None = None) -> Iterator[Piece | Rows]:
    reader, spans = text
    return (piece for _, piece in reader.read(spans, phase, piece_bytes))


def _count(kind: str, piece: Piece | Rows) -> Counter[str]:
    return total(map(VOCABULARY_KINDS[kind].count, piece.texts()))
