"""Pairs of a source and a target sentence: two parallel files, one tab-separated file, or WMT's .sgm files."""

import html
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

from hvd_transformer.data.sacrebleu_sets import PREFIX, sacrebleu_files
from hvd_transformer.data.splits import (
    ExampleFiles,
    ExampleSource,
    Files,
    RawExample,
    Reader,
    find_splits,
    first_file,
)
from hvd_transformer.data.text_files import read_lines
from hvd_transformer.errors import UserError

_TABS = ("{}.tsv", "{}.tsv.gz")


class PairFiles(ExampleFiles):
    """The two files of each split, source first, or its single tab-separated file."""

    def find(self, folder: Path) -> dict[str, Files]:
        found = find_splits(self.stems, lambda stem: self._named(folder, stem))
        if (self.config.test or "").startswith(PREFIX):
            found["test"] = sacrebleu_files(self.config, self.should_stop)
        if "test" not in found and not self.config.test and (files := self._other_test(folder)):
            found["test"] = files
        return found

    def open_split(self, path: Path, wanted: str | None) -> ExampleSource:
        if (self.config.test or "").startswith(PREFIX):  # of the training data, not of these
            config = self.config.model_copy(update={"test": None})
            return type(self)(config, self.should_stop).open_split(path, wanted)
        return super().open_split(path, wanted)

    def reader(self, files: Files) -> Reader:
        if len(files) == 1:
            return lambda: _tabbed(files[0])
        return lambda: _segments(*files) if files[0].suffix == ".sgm" else _side_by_side(*files)

    def accepted(self, folder: Path, split: str) -> str:
        name, source, target = self.stems[split][0], self.config.source_language, self.config.target_language
        present = ", ".join(sorted(file.name for file in folder.iterdir())[:12]) or "nothing"
        return (
            f"{name}.{source} and {name}.{target} (also .gz), {name}.tsv, or "
            f"{name}-src.{source}.sgm and {name}-ref.{target}.sgm; it holds {present}"
        )

    def _other_test(self, folder: Path) -> Files | None:
        """The test split under any name that starts with "test". Raises `UserError` if there are several."""
        ending = f".{self.config.source_language}"
        names = (file.name.removesuffix(".gz") for file in folder.glob("test*"))
        stems = {name.removesuffix(ending) for name in names if name.endswith(ending)}
        stems |= {file.name.partition("-src.")[0] for file in folder.glob(f"test*-src{ending}.sgm")}
        tabbed = (file.name for end in _TABS for file in folder.glob(end.format("test*")))
        stems = stems or {name.removesuffix(".gz").removesuffix(".tsv") for name in tabbed}
        if len(stems) > 1:
            choices = " or data.test=".join(sorted(stems))
            raise UserError(f"{folder}: several test splits; choose with data.test={choices}")
        return self._named(folder, stems.pop()) if stems else None

    def _named(self, folder: Path, stem: str) -> Files | None:
        source, target = self.config.source_language, self.config.target_language
        for end in ("", ".gz"):
            for middle in ("", f".{source}-{target}", f".{target}-{source}"):
                files = tuple(folder / f"{stem}{middle}.{language}{end}" for language in (source, target))
                exist = [file.is_file() for file in files]
                if all(exist) and source == target:
                    raise UserError(
                        f"data.source_language={source}: also data.target_language, so that {files[0]} would be its "
                        "own translation"
                    )
                if all(exist):
                    return files
                if any(exist):
                    missing = files[exist.index(False)].name
                    raise UserError(f"{files[exist.index(True)]}: its partner {missing} is missing")
        return first_file(folder, stem, _TABS) or self._sgm(folder, stem)

    def _sgm(self, folder: Path, stem: str) -> Files | None:
        source, target = self.config.source_language, self.config.target_language
        sources = sorted(folder.glob(f"{stem}*-src.{source}.sgm"))
        if len(sources) > 1:
            names = ", ".join(file.name for file in sources)
            raise UserError(f"{folder}: several files {stem}*-src.{source}.sgm: {names}")
        if not sources:
            return None
        reference = sources[0].with_name(sources[0].name.replace(f"-src.{source}.sgm", f"-ref.{target}.sgm"))
        if not reference.is_file():
            raise UserError(f"{sources[0]}: its partner {reference.name} is missing")
        return sources[0], reference


def _side_by_side(source: Path, target: Path) -> Iterator[RawExample]:
    for number, pair in enumerate(zip_longest(read_lines(source), read_lines(target)), start=1):
        if None in pair:
            counts = [sum(1 for _ in read_lines(file)) for file in (source, target)]
            raise UserError(
                f"{source} has {counts[0]:,} lines, {target} has {counts[1]:,}; parallel files must have equally many"
            )
        yield RawExample(pair, None, f"{source}, line {number}")


def _tabbed(path: Path) -> Iterator[RawExample]:
    for number, line in enumerate(read_lines(path), start=1):
        parts = line.split("\t") if line else ["", ""]  # left out and counted, as all empty samples are
        if len(parts) != 2:
            raise UserError(f"{path}, line {number}: {len(parts) - 1} tabs; a pair is a source, one tab and its target")
        yield RawExample((parts[0], parts[1]), None, f"{path}, line {number}")


def _segments(source: Path, target: Path) -> Iterator[RawExample]:
    """Pairs matched by document and segment number, in the order of the source file."""
    targets, sources = _read_segments(target), _read_segments(source)
    both = (source, sources), (target, targets)
    for (file, own), (other, others) in (both, both[::-1]):
        if alone := next((key for key in own if key not in others), None):
            raise UserError(f"{file}: document {alone[0]}, segment {alone[1]} has no partner in {other.name}")
    for (document, segment), text in sources.items():
        yield RawExample((text, targets[document, segment]), None, f"{source}, document {document}, segment {segment}")


_DOCUMENT = re.compile(r"<doc\s[^>]*?docid\s*=\s*[\"']?([^\"'>\s]+)", re.IGNORECASE)
_SEGMENT = re.compile(r"<seg\s[^>]*?id\s*=\s*[\"']?([^\"'>\s]+)[^>]*>(.*?)</seg>", re.IGNORECASE | re.DOTALL)
_TAGS = re.compile(f"{_DOCUMENT.pattern}|{_SEGMENT.pattern}", re.IGNORECASE | re.DOTALL)


def _read_segments(path: Path) -> dict[tuple[str, str], str]:
    """The segments by (document, number), in the order of the file."""
    found: dict[tuple[str, str], str] = {}
    document = ""
    for match in _TAGS.finditer("\n".join(read_lines(path))):
        if match[1] is not None:
            document = match[1]
            continue
        key = document, match[2]
        if key in found:
            raise UserError(f"{path}: document {document} has segment {match[2]} twice")
        found[key] = html.unescape(" ".join(match[3].split()))
    if not found:
        raise UserError(f"{path}: no segments; an .sgm file has <doc docid=…> with <seg id=…> inside")
    return found
