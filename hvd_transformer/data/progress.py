"""How far the preparation of a corpus has come: files beside the token files, from which the next start resumes."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hvd_transformer import atomic
from hvd_transformer.data.build_once import PLACES, PROGRESS, ShouldStop
from hvd_transformer.data.load_tokenizer import load_tokenizer
from hvd_transformer.data.prepared import TokenWriter
from hvd_transformer.data.text_files import TextSpan
from hvd_transformer.data.tokenizers import Tokenizer
from hvd_transformer.errors import UserError


class Place(NamedTuple):
    """All spans of a split before this one are read, and this one up to this position."""

    span: int
    position: int


BEGIN = Place(0, 0)


@dataclass
class Progress:
    """What is kept in `folder`: once, in `PROGRESS`, how the corpus was cut and which tokenizer was learned; again and
    again, in `PLACES`, for each split that was begun the entry of its token file and the place in its spans."""

    folder: Path
    spans: dict[str, tuple[TextSpan, ...]]
    places: dict[str, tuple[dict[str, Any], Place]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(entry["count"] for entry, _ in self.places.values())

    @classmethod
    def begin(
        cls, folder: Path, settings: dict[str, Any], tokenizer: Tokenizer, spans: dict[str, tuple[TextSpan, ...]]
    ) -> "Progress":
        """Keep what does not change, and the tokenizer. Raises `OSError`."""
        (folder / PLACES).unlink(missing_ok=True)  # of a damaged `PROGRESS`
        tokenizer.save(folder)
        own = {split: [(str(span.path), span.start, span.end, span.column) for span in spans[split]] for split in spans}
        found = {"settings": settings, "tokenizer": tokenizer.digest, "spans": own}
        atomic.write_text(folder / PROGRESS, json.dumps(found))
        return cls(folder, spans)

    @classmethod
    def read(cls, folder: Path) -> "tuple[Progress, Tokenizer] | None":
        """The progress that this folder keeps, with its tokenizer; None if there is none, or it is damaged."""
        try:
            found, tokenizer = json.loads((folder / PROGRESS).read_text(encoding="utf-8")), load_tokenizer(folder)
            if tokenizer.digest != found["tokenizer"]:
                return None
            spans = {
                split: tuple(TextSpan(Path(path), *rest) for path, *rest in own)
                for split, own in found["spans"].items()
            }
            kept = folder / PLACES
            places = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
            places = {split: (entry, Place(*place)) for split, (entry, place) in places.items()}
            return cls(folder, spans, places), tokenizer
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return None

    def save(self, split: str, entry: dict[str, Any], place: Place) -> None:
        """Keep the place in a split, to which `TokenWriter.checkpoint` has written. Raises `OSError`."""
        self.places[split] = entry, place
        atomic.write_text(self.folder / PLACES, json.dumps(self.places))

    def resume(self, split: str, dtype: str, should_stop: ShouldStop) -> tuple[TokenWriter, Place]:
        """The token file of a split, and the place to go on from. What the file already has is read once and compared
        with its checksum; where it is damaged, the split begins anew. Raises `Stopped`."""
        if split in self.places:
            entry, place = self.places[split]
            if (writer := TokenWriter.resume(self.folder, split, entry, should_stop)) is not None:
                return writer, place
        return TokenWriter(self.folder, split, dtype), BEGIN
