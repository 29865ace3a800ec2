"""Prepare the sources of a language model: one, or a mixture with one tokenizer for all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_transformer.config.mixture import MixedSource, mixed_sources, origin, source_names
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext
from hvd_transformer.data.learn_tokenizer import learn_common_tokenizer
from hvd_transformer.data.prepare_text import prepare_corpus
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.splits import SPLITS, chosen_split
from hvd_transformer.data.text_corpus import Corpus, open_corpus, open_evaluated
from hvd_transformer.data.token_corpus import TokenCorpus, needs_tokenizer
from hvd_transformer.data.token_file import MixedTokens, Tokens
from hvd_transformer.data.tokenizers import Tokenizer, sha256
from hvd_transformer.errors import UserError


@dataclass(frozen=True)
class PreparedMixture(PreparedData):
    """The prepared sources of a mixture; a split consists of the splits of those that have it."""

    parts: Sequence[PreparedData] = ()

    def report(self) -> list[str]:
        return [line for part in self.parts for line in part.report()]


def prepare_sources(config: DataConfig, tokenizer: Tokenizer | None, context: PrepareContext) -> PreparedData:
    """All splits of `data.source` or `data.sources`. Without a `tokenizer` one is learned from the training splits.

    Raises `UserError` if the data cannot be used, `Stopped` on request.
    """
    if config.sources is None:
        corpus = open_corpus(config, context)
        _check_test(config, [corpus])
        return prepare_corpus(config, corpus, tokenizer, context)
    corpora = [_open(source, context) for source in mixed_sources(config)]
    _check_test(config, corpora)
    tokenizer = tokenizer or _learned(config, corpora, context)
    return _mixture(config, corpora, tokenizer, context)


def _learned(config: DataConfig, corpora: Sequence[Corpus | TokenCorpus], context: PrepareContext) -> Tokenizer:
    """The tokenizer for all sources, learned from those that are trained on."""
    texts = [corpus for corpus in corpora if not isinstance(corpus, TokenCorpus)]
    if len(texts) < len(corpora):
        raise needs_tokenizer(config)
    has_documents = any("columns" in corpus.identity for corpus in texts)
    trained = [corpus for corpus in texts if "train" in corpus.splits]
    return learn_common_tokenizer(config, trained, has_documents, context)


def _check_test(config: DataConfig, corpora: Sequence[Corpus | TokenCorpus]) -> None:
    """Raise `UserError` if a test split is named that no source has: the job would never be tested."""
    if config.test and not any("test" in corpus.splits for corpus in corpora):
        raise UserError(f"data.test={config.test}: {origin(config)} has no file of that name")


def _open(source: MixedSource, context: PrepareContext) -> Corpus | TokenCorpus:
    return (open_evaluated if source.weight == 0 else open_corpus)(source.config, context)


def prepare_split(
    config: DataConfig, wanted: str | None, tokenizer: Tokenizer, context: PrepareContext
) -> PreparedData:
    """One split of `data.source` or `data.sources` (see `splits.chosen_split`). Raises as `prepare_sources`."""
    if config.sources is None:
        corpus = open_corpus(config, context).only(wanted, origin(config))
        return prepare_corpus(config, corpus, tokenizer, context)
    corpora = [_open(source, context) for source in mixed_sources(config)]
    split = chosen_split(wanted, {name for corpus in corpora for name in corpus.splits}, origin(config))
    parts = [corpus.only(split, origin(config)) if split in corpus.splits else None for corpus in corpora]
    return _mixture(config, parts, tokenizer, context)


def _mixture(
    config: DataConfig, corpora: Sequence[Corpus | TokenCorpus | None], tokenizer: Tokenizer, context: PrepareContext
) -> PreparedMixture:
    """None: a source without the split that is wanted."""
    named = {
        name: prepare_corpus(source.config, corpus, tokenizer, context)
        for name, source, corpus in zip(source_names(config), mixed_sources(config), corpora, strict=True)
        if corpus is not None
    }
    parts, splits = list(named.values()), dict[str, MixedTokens]()
    for split in SPLITS:
        files = {name: tokens for name, part in named.items() if isinstance(tokens := part.splits.get(split), Tokens)}
        if files:
            splits[split] = MixedTokens(list(files.values()), list(files))
    digest = sha256(json.dumps([part.digest for part in parts]))
    has_documents = any(part.has_documents for part in parts)
    return PreparedMixture(parts[0].folder.parent, tokenizer, splits, digest, has_documents, parts)
