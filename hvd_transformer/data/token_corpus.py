"""Token files that other tools have prepared (see `foreign_tokens`): which files each split has, and what is kept about
them. Training maps them where they are."""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.mixture import origin
from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext, Stopped
from hvd_transformer.data.foreign_tokens import INDEX, TOKENS, ForeignTokens, Spans, TokenSpan, megatron_ending
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.prepare_folder import prepare_folder
from hvd_transformer.data.prepared import PreparedData
from hvd_transformer.data.shards import check_shards, is_there
from hvd_transformer.data.splits import SPLITS, WHOLE, Files, Source, file_identity
from hvd_transformer.data.token_file import JoinedTokens, TokenFile, Tokens
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError

# The first numbers of files of llm.c, which have a header.
_HEADERS = {number.to_bytes(4, "little") for number in (20240520, 20240801)}
FORMAT = 3  # of what is kept about token files; another number checks all of them anew
_CHECKED = 2**22  # tokens at a time


class TokenCorpus(Source[Spans]):
    """Splits of ready token files."""


def open_token_folder(
    folder: Path, stems: Mapping[str, tuple[str, ...]], needed: Collection[str] = ("train", "valid")
) -> TokenCorpus | None:
    """The token files of a folder: `train.bin` and `val.bin`, or several per split, such as `train_000.bin`, Megatron's
    `train_text_document.bin` with its index, or all of `train/`. None if it has none.
    Raises `UserError`, also if a split that is `needed` is missing."""
    found = {split: next(filter(None, (_find(folder, stem) for stem in stems[split])), ()) for split in SPLITS}
    if not any(found.values()) and not find_token_files(folder.glob("*"), str(folder)):
        return None
    for split in needed:
        if not found[split]:
            accepted = " or ".join(f"{stem}.bin" for stem in stems[split])
            raise UserError(
                f"{folder}: token files, but none of the {split} split; it must hold {accepted}, or several such as "
                f"{stems[split][0]}_000.bin; data.source='{folder}/*.bin' cuts all of them by data.split"
            )
    return _corpus(folder.name, {split: ForeignTokens(files).spans() for split, files in found.items() if files})


def open_token_file(path: Path, shares: list[float] | None) -> TokenCorpus | None:
    """One token file, which may be given as its index or without ending, cut by shares of its tokens (None: all of it,
    to be evaluated), Megatron's between documents; None if the path is none. Raises `UserError`."""
    if path.suffix not in (TOKENS, INDEX):
        path = path.with_name(f"{path.name}{INDEX}")
    if not path.is_file():
        return None
    path = path.with_suffix(TOKENS).absolute()
    return open_token_files((path,), shares, path.stem)


def open_token_files(files: Files, shares: list[float] | None, name: str) -> TokenCorpus:
    """Some token files together, cut by shares as one (None: all of them, to be evaluated). Raises `UserError`."""
    if shares is None:
        return _corpus(name, {WHOLE: ForeignTokens(files).spans()})
    tokens, ends = ForeignTokens(files), accumulate(shares, initial=0.0)
    splits = {split: tokens.spans(*share) for split, share in zip(SPLITS, pairwise(ends), strict=False)}
    for split, spans in splits.items():
        if not spans:
            raise UserError(f"{files[0]}: data.split={shares} leaves the {split} split empty")
    return _corpus(name, splits)


def find_token_files(paths: Iterable[Path], where: str) -> Files:
    """The `.bin` files among these paths, or of the indices among them, by name. Raises `UserError` if Megatron's have
    several endings: the same documents may be there twice."""
    shown = (path for path in paths if not path.name.startswith("."))
    found = {path.with_suffix(TOKENS) for path in shown if path.suffix in (TOKENS, INDEX) and is_there(path)}
    files = tuple(sorted(found))
    endings = sorted({own for path in files if (own := megatron_ending(path))})
    if len(endings) > 1:
        raise UserError(f"{where}: token files that end in {' and in '.join(endings)}; give those of one kind")
    return files


def prepare_tokens(
    config: DataConfig, corpus: TokenCorpus, tokenizer: Tokenizer | None, context: PrepareContext
) -> PreparedData:
    """Check once that the tokenizer has all tokens, and keep the checksums. Raises `UserError` and `Stopped`."""
    if tokenizer is None:
        raise needs_tokenizer(config)
    own = {"tokenizer": tokenizer.digest, "document_end": tokenizer.document_end}
    settings = {"format": FORMAT, "corpus": corpus.identity, **own}

    def write(folder: Path) -> dict[str, Any]:
        check_shards({"source": config.source, "corpus": corpus.identity}, folder.parent)
        tokenizer.save(folder)
        size = sum(span.end - span.start for spans in corpus.splits.values() for span in spans)
        context.report(f"Checking {corpus.name}: {size:,} tokens in {len(corpus.splits)} splits")
        splits = {
            split: [_checked(span, tokenizer, context) for span in spans] for split, spans in corpus.splits.items()
        }
        return {"format": FORMAT, "tokenizer": tokenizer.digest, "splits": splits}

    def read(folder: Path, index: dict[str, Any]) -> PreparedData | None:
        if load_tokenizer(folder).digest != index["tokenizer"]:
            return None
        entries = index["splits"]
        splits = {split: _tokens(spans, entries[split]) for split, spans in corpus.splits.items()}
        has_documents = any(entry["documents"] for own in entries.values() for entry in own)
        return PreparedData(folder, tokenizer, splits, index["digest"], has_documents)

    return prepare_folder(config, corpus.name, settings, write, read, context)


def needs_tokenizer(config: DataConfig) -> UserError:
    """For token files without `data.tokenizer`."""
    return UserError(
        f"{origin(config)}: has token numbers; name the tokenizer that made them with data.tokenizer="
        "tokenizer.json or its folder"
    )


def _tokens(spans: Spans, entries: list[dict[str, Any]]) -> Tokens:
    files = [
        TokenFile(span.path, span.dtype, span.end - span.start, entry["sha256"], span.start)
        for span, entry in zip(spans, entries, strict=True)
    ]
    return files[0] if len(files) == 1 else JoinedTokens(files)


def _checked(span: TokenSpan, tokenizer: Tokenizer, context: PrepareContext) -> dict[str, Any]:
    """The entry of these tokens in the index. `documents` counts those that an end token follows."""
    digest, tokens = hashlib.sha256(), np.memmap(span.path, span.dtype, "r")
    documents, vocab_size = 0, tokenizer.vocab_size
    if not span.path.with_suffix(INDEX).is_file():
        _check_bare(span.path, tokens, vocab_size)
    for start in range(span.start, span.end, _CHECKED):
        if context.should_stop():
            raise Stopped
        part = np.asarray(tokens[start : min(start + _CHECKED, span.end)])
        if (wrong := np.flatnonzero((part < 0) | (part >= vocab_size))).size:
            raise UserError(
                f"{span.path}: token {start + wrong[0]} is {part[wrong[0]]}, but the tokenizer has {vocab_size} "
                "tokens; data.tokenizer must be the one that made the file"
            )
        digest.update(part.tobytes())
        if tokenizer.document_end is not None:
            documents += int(np.count_nonzero(part == tokenizer.document_end))
    return {"tokens": span.end - span.start, "sha256": digest.hexdigest(), "documents": documents}


def _check_bare(path: Path, tokens: NDArray[Any], vocab_size: int) -> None:
    """Raise `UserError` if a file without an index, which says nothing of its numbers, is not one of 16 bits as
    nanoGPT's: numbers of 32 bits would be read as twice as many tokens, every second of them 0 or nearly so."""
    first = np.asarray(tokens[:_CHECKED])
    high = first[1::2]
    wide = high.size > 7 and first.size % 2 == 0 and bool(np.all(high <= vocab_size - 1 >> 16))
    if vocab_size > 1 << 16 or wide or first[:2].tobytes() in _HEADERS:
        raise UserError(
            f"{path}: without an .idx beside it, it must hold nothing but token numbers of 16 bits, of a tokenizer of "
            f"at most 65,536 tokens, as nanoGPT's do; this one {_what_else(vocab_size, wide)}"
        )


def _what_else(vocab_size: int, wide: bool) -> str:
    if vocab_size > 1 << 16:
        return f"is of a tokenizer of {vocab_size:,} tokens"
    return "seems to hold numbers of 32 bits" if wide else "begins with a header"


def _find(folder: Path, stem: str) -> Files:
    """The `.bin` files of a split."""
    where, one, inside = f"{folder}: {stem}", folder / f"{stem}{TOKENS}", list((folder / stem).glob("*"))
    if not one.is_file():
        return find_token_files(inside, where) or find_token_files(folder.glob(f"{stem}[-_.]*"), where)
    # Beside it only numbered names are shards, not train_small.bin.
    if beside := find_token_files([*folder.glob(f"{stem}[-_.][0-9]*"), *inside], where):
        other = beside[0].relative_to(folder)
        raise UserError(f"{where}: both {one.name} and {other}; the same documents may be there twice; move one away")
    return (one,)


def _corpus(name: str, splits: dict[str, Spans]) -> TokenCorpus:
    files = {
        split: [[*file_identity(span.path), span.dtype, span.start, span.end] for span in spans]
        for split, spans in splits.items()
    }
    return TokenCorpus(name, {"tokens": files}, splits)
