"""A corpus read piece by piece, which counting, learning and encoding share: with reports, stops and checked shards."""

import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import PrepareContext, Stopped
from hvd_transformer.data.compressed import COMPRESSED
from hvd_transformer.data.in_thread import computing
from hvd_transformer.data.parquet import PARQUET, Rows
from hvd_transformer.data.progress import BEGIN, Place
from hvd_transformer.data.shards import change, read_pieces
from hvd_transformer.data.text_corpus import Corpus
from hvd_transformer.data.text_files import PIECE_BYTES, Piece, TextSpan
from hvd_transformer.data.tokenizers import WordTokenizer
from hvd_transformer.data.words import is_native

REPORT_SECONDS = 10.0
Spans = tuple[TextSpan, ...]


@dataclass(frozen=True)
class CorpusPieces:
    """Reads the spans of a corpus. `context` says where to report, and whether to stop."""

    config: DataConfig
    corpus: Corpus
    context: PrepareContext

    def read(
        self, spans: Spans, phase: str, piece_bytes: int | None = None, start: Place = BEGIN
    ) -> Iterator[tuple[int, Piece | Rows]]:
        """The pieces from a place on, of at most about `piece_bytes`, each with the number of its span; reports the
        progress every ten seconds.

        Raises `Stopped`, and `OSError`, after which the next start resumes, if a shard has changed meanwhile.
        """
        for span in spans:
            self._check_unchanged(span.path)
        reported, sizes = time.monotonic(), [span.size for span in spans]
        for number, span in enumerate(spans[start.span :], start=start.span):
            self._check_unchanged(span.path)
            first = max(start.position, span.start) if number == start.span else span.start
            pieces = read_pieces(replace(span, start=first), min(piece_bytes or PIECE_BYTES, PIECE_BYTES))
            if first and span.path.suffix in COMPRESSED:  # all that is before is read
                pieces = self._skipped(pieces)
            for piece in pieces:
                if self.context.should_stop():
                    raise Stopped
                if time.monotonic() - reported > REPORT_SECONDS:
                    reported = time.monotonic()
                    # How much a compressed file holds, or how many rows, is not known before its end.
                    known = span.end is not None or span.path.suffix not in (*COMPRESSED, PARQUET)
                    done = sum(sizes[:number]) + (piece.start - span.start if known else 0)
                    self.context.report(f"{self.corpus.name}: {phase}, {100 * done / sum(sizes):.0f} %")
                yield number, piece
            self._check_unchanged(span.path)

    def _skipped(self, pieces: Iterator[Piece | Rows]) -> Iterator[Piece | Rows]:
        """The same pieces, of which the first one takes long."""
        if (piece := computing(lambda: next(pieces, None), self.context.should_stop)) is not None:
            yield piece
        yield from pieces

    @property
    def has_documents(self) -> bool:
        return any(split.spans[0].column is not None for split in self.corpus.splits.values())

    @property
    def size(self) -> int:
        """Bytes of all files or parts of them; more if they are compressed."""
        spans = dict.fromkeys(span for split in self.corpus.splits.values() for span in split.spans)
        return sum(span.size for span in spans)

    @property
    def libraries(self) -> Path:
        return Path(self.config.cache_dir).expanduser().absolute() / "kernels"

    def is_native(self, kind: str) -> bool:
        """Whether native code counts and encodes for a tokenizer of this kind."""
        return kind == WordTokenizer.kind and self._words_are_native

    @cached_property
    def _words_are_native(self) -> bool:
        return not self.has_documents and is_native(self.libraries, self.size, self.context.report)

    def _check_unchanged(self, path: Path) -> None:
        known = self._known_files.get(str(path))
        if known is not None and (what := change(path, *known)) is not None:
            raise OSError(errno.ESTALE, f"{what} while it was prepared; restore it to resume", str(path))

    @cached_property
    def _known_files(self) -> dict[str, list[int]]:
        """Size and time of the last change of each file."""
        found = self.corpus.identity
        states = found["shards"] if "shards" in found else found.get("files", {}).values()
        return {path: known[:2] for path, *known in states}
