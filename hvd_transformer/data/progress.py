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


class Mark(NamedTuple):
    """The entry of a token file when the text up to this place was in it."""

    entry: dict[str, Any]
    place: Place


@dataclass
class Progress:
    """What is kept in `folder`: once, in `PROGRESS`, how the corpus was cut and which tokenizer was learned; again and
    again, in `PLACES`, one or two marks for each split that was begun: the last one, and before it that of the end of
    the span before, which stays true if the span that is being read turns out to be wrong.

    `failed`: an error of the user ended it. `settings` are those of the source, for `check_shards` and `take_over`.
    """

    folder: Path
    settings: dict[str, Any]
    tokenizer: Tokenizer
    spans: dict[str, tuple[TextSpan, ...]]
    marks: dict[str, list[Mark]] = field(default_factory=dict)
    failed: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(marks[-1].entry["count"] for marks in self.marks.values())

    @classmethod
    def begin(
        cls, folder: Path, settings: dict[str, Any], tokenizer: Tokenizer, spans: dict[str, tuple[TextSpan, ...]]
    ) -> "Progress":
        """Keep what does not change, and the tokenizer. Raises `OSError`."""
        (folder / PLACES).unlink(missing_ok=True)  # of a damaged `PROGRESS`
        tokenizer.save(folder)
        progress = cls(folder, settings, tokenizer, spans)
        progress._write()
        return progress

    @classmethod
    def read(cls, folder: Path) -> "Progress | None":
        """The progress that this folder keeps; None if there is none, or it is damaged."""
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
            marks = {split: [Mark(entry, Place(*place)) for entry, place in own] for split, own in places.items()}
            return cls(folder, found["settings"], tokenizer, spans, marks, found["failed"])
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return None

    def pass_span(self, split: str, mark: Mark) -> None:
        """The next tokens are of another span than those up to this mark. It is written with the next one."""
        self.marks[split] = [mark]

    def save(self, split: str, entry: dict[str, Any], place: Place) -> None:
        """Keep the place in a split, to which `TokenWriter.checkpoint` has written. Raises `OSError`."""
        passed = [mark for mark in self.marks.get(split, ()) if mark.place.span < place.span][-1:]
        self.marks[split] = [*passed, Mark(entry, place)]
        self.write_places()

    def fail(self) -> None:
        """Keep what is done for files of which the wrong one is mended, if there are several; else `build_once` removes
        the folder. Raises `OSError`."""
        files = {span.path for own in self.spans.values() for span in own}
        if len(files) > 1 and self.num_tokens:
            self.failed = True
            self._write()
        else:
            (self.folder / PROGRESS).unlink(missing_ok=True)

    def resume(self, split: str, dtype: str, should_stop: ShouldStop) -> tuple[TokenWriter, Place]:
        """The token file of a split, and the place to go on from. What the file already has is read once and compared
        with its checksum; where it is damaged, the split begins anew. Raises `Stopped`."""
        if split in self.marks:
            entry, place = self.marks[split][-1]
            if (writer := TokenWriter.resume(self.folder, split, entry, should_stop)) is not None:
                return writer, place
            del self.marks[split]
        return TokenWriter(self.folder, split, dtype), BEGIN

    def write_places(self) -> None:
        """Keep the marks. Raises `OSError`."""
        atomic.write_text(self.folder / PLACES, json.dumps(self.marks))

    def _write(self) -> None:
        spans = {
            split: [(str(span.path), span.start, span.end, span.column) for span in own]
            for split, own in self.spans.items()
        }
        found = {"settings": self.settings, "tokenizer": self.tokenizer.digest, "spans": spans}
        atomic.write_text(self.folder / PROGRESS, json.dumps(found | {"failed": self.failed}))
