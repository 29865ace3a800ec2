"""Splits of a data set: their names, the one finder of their files, and how one file is split at random."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import compress, islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.build_once import ShouldStop, Stopped
from hvd_transformer.data.sampler import Permutation
from hvd_transformer.errors import UserError

T = TypeVar("T")
AnySource = TypeVar("AnySource", bound="Source[Any]")
SPLITS = ("train", "valid", "test")
WHOLE = "data"  # the split's name when a single file is evaluated as a whole
# File stems accepted for each split of examples, in order of preference.
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "val", "validation", "dev"), "test": ("test",)}
_SHUFFLE = 5  # keeps the random split independent of the order of the epochs
_CHUNK = 2**16  # rows whose splits are worked out at a time
_COUNTED = 2**12  # rows that are counted between two looks at a request to stop
_MOST_DEFLATED = 1032  # gzip makes a text no smaller than by this factor


@dataclass(frozen=True)
class RawExample:
    """The texts of one sample, and its label for classification; `place` (file and line) is for messages."""

    texts: tuple[str, ...]
    label: str | None
    place: str


Files = tuple[Path, ...]  # of one split: a single file, or two parallel ones
Reader = Callable[[], Iterator[RawExample]]


def find_splits(stems: Mapping[str, Iterable[str]], find: Callable[[str], Files | None]) -> dict[str, Files]:
    """The files of every split that a folder holds.

    `stems` lists the accepted names of each split, in order of preference; `find(stem)` returns the files of one of
    them, or None.
    """
    found = {split: next(filter(None, map(find, stems[split])), None) for split in SPLITS}
    return {split: files for split, files in found.items() if files}


def first_file(folder: Path, stem: str, patterns: Sequence[str]) -> Files | None:
    """The first of the patterns, such as "{}.txt", whose file exists."""
    return next(((path,) for pattern in patterns if (path := folder / pattern.format(stem)).is_file()), None)


def chosen_split(wanted: str | None, present: Collection[str], origin: str) -> str:
    """The split to evaluate: `wanted` if given, else test, else valid.

    Raises `UserError` if there is no such split; the message starts with `origin`, the place of the data.
    """
    own = [split for split in SPLITS if split in present]
    if wanted is not None and wanted not in own:
        raise UserError(f"{origin}: no {wanted} split; there is {' and '.join(own) or 'none to evaluate'}")
    if wanted is None and own in ([], ["train"]):
        raise UserError(f"{origin}: has neither a valid nor a test split")
    return wanted or own[-1]


def split_stems(config: DataConfig, usual: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The names of each split's files: as configured, else the usual ones."""
    return {split: (name,) if (name := getattr(config, split)) else names for split, names in usual.items()}


def check_no_names(config: DataConfig, reason: str) -> None:
    """Raise `UserError` if the files of splits are named although the source is no folder."""
    for split in SPLITS:
        if name := getattr(config, split):
            raise UserError(f"data.{split}={name}: only if data.source is a folder; {reason}")


def check_whole(wanted: str | None, path: Path) -> None:
    """Raise `UserError` if a split of a single file is requested."""
    if wanted is not None:
        raise UserError(f"--split {wanted}: {path} is one file, which is evaluated as a whole; omit --split")


@dataclass(frozen=True)
class Source(Generic[T]):
    """What every split is read from. `identity` distinguishes data sets: equal identities mean equal texts.

    `train_bytes`: the most bytes of text that the training split can have; 0 if it is not included.
    """

    name: str
    identity: dict[str, Any]
    splits: dict[str, T]
    train_bytes: int = 0

    def only(self: AnySource, wanted: str | None, origin: str) -> AnySource:
        """One split of it, chosen by `chosen_split`."""
        split = chosen_split(wanted, self.splits, origin)
        return type(self)(self.name, {**self.identity, "only": split}, {split: self.splits[split]})

    def evaluated(self: AnySource) -> AnySource:
        """Without the training split. What is evaluated as a whole is the valid split."""
        names = {split: "valid" if split == WHOLE else split for split in self.splits if split != "train"}
        splits = {name: self.splits[split] for split, name in names.items()}
        return type(self)(self.name, {**self.identity, "only": list(splits)}, splits)


ExampleSource = Source[Reader]


class ExampleFiles(ABC):
    """One way to store examples: which files of a folder hold each split, and how they are read."""

    def __init__(self, config: DataConfig, should_stop: ShouldStop = lambda: False) -> None:
        self.config, self.should_stop = config, should_stop

    @abstractmethod
    def find(self, folder: Path) -> dict[str, Files]:
        """The files of every split that the folder holds. Raises `UserError` if they are ambiguous or incomplete."""

    @abstractmethod
    def reader(self, files: Files) -> Reader:
        """Read the examples of these files. Raises `UserError` if their form is unknown."""

    @abstractmethod
    def accepted(self, folder: Path, split: str) -> str:
        """The file names that this split may have, for messages."""

    def identity(self, files: Files) -> Any:
        """Distinguish the files of a split from changed ones."""
        return [file_identity(file) for file in files]

    @property
    def settings(self) -> dict[str, str]:
        """What else the examples depend on."""
        return {}

    @property
    def stems(self) -> dict[str, tuple[str, ...]]:
        """The names of each split's files."""
        return split_stems(self.config, SPLIT_NAMES)

    def open(self, path: Path, seed: int) -> ExampleSource:
        """All splits of a folder, or of one file that is split at random.

        Raises `UserError` with what is missing and what is allowed.
        """
        with readable(path):
            if path.is_file():
                check_no_names(self.config, f"{path} is one file, which data.split splits")
                splits = split_at_random(self.reader((path,)), self.config.split, seed, path, self.should_stop)
                identity = {"file": file_identity(path), "split": self.config.split, "seed": seed}
                return ExampleSource(_stem(path), {**identity, **self.settings}, splits, _most_bytes((path,)))
            files = self.find(path)
            for split in SPLITS:
                if split not in files and (split != "test" or self.config.test):
                    raise UserError(f"{path}: no {split} split; it must hold {self.accepted(path, split)}")
            return self._source(path, files)

    def open_split(self, path: Path, wanted: str | None) -> ExampleSource:
        """One file as a whole, or one split of a folder (see `chosen_split`), which needs no other splits.

        Raises `UserError` with what is missing and what is allowed.
        """
        with readable(path):
            if path.is_file():
                check_whole(wanted, path)
                identity = {"whole": file_identity(path), **self.settings}
                return ExampleSource(_stem(path), identity, {WHOLE: self.reader((path,))})
            files = self.find(path)
            split = chosen_split(wanted, files, str(path))
            return self._source(path, {split: files[split]})

    def _source(self, folder: Path, files: dict[str, Files]) -> ExampleSource:
        identity = {split: self.identity(own) for split, own in files.items()}
        readers = {split: self.reader(own) for split, own in files.items()}
        return ExampleSource(folder.name, {**identity, **self.settings}, readers, _most_bytes(files.get("train", ())))


def real_path(path: Path) -> Path:
    """The file or folder behind links, unless a file's name has another ending, which tells how it is read: in the
    cache of huggingface_hub it has none."""
    found = path.resolve()
    ending, other = (own.suffixes[-2:] if own.suffix in (".gz", ".zst") else [own.suffix] for own in (path, found))
    return found if found.is_dir() or ending == other else path.absolute()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise `UserError` for a file or folder inside that the system does not let us read; `path` if it tells none."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path}: cannot be read: {error.strerror}") from None


def file_identity(path: Path) -> list[Any]:
    """Path, size and time of the last change: they distinguish a file from a changed one."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def split_at_random(
    read: Reader, shares: list[float], seed: int, path: Path, should_stop: ShouldStop = lambda: False
) -> dict[str, Reader]:
    """Split the examples of one file by `shares`, determined by `seed` alone; each split keeps the file's order.

    The file is read for the first time, to count its rows, when a split is: a start with prepared data never does.
    Reading raises `UserError` if a split is empty, and `Stopped`.
    """
    rows = _RandomSplit(read, shares, seed, path, should_stop)
    return {split: partial(rows.of, index) for index, split in enumerate(SPLITS[: len(shares)])}


class _RandomSplit:
    """Which split each row is in. Memory does not grow with the number of rows."""

    def __init__(self, read: Reader, shares: list[float], seed: int, path: Path, should_stop: ShouldStop) -> None:
        self.read, self.shares, self.seed, self.path, self.should_stop = read, shares, seed, path, should_stop

    def of(self, index: int) -> Iterator[RawExample]:
        """The examples of the split of this number."""
        number, ends = self._ends
        order, rows = Permutation(number, (self.seed, _SHUFFLE)), self.read()
        for start in range(0, number, _CHUNK):
            positions = order[np.arange(start, min(start + _CHUNK, number))]
            chosen = np.searchsorted(ends, positions, side="right") == index
            yield from compress(islice(rows, _CHUNK), chosen)

    @cached_property
    def _ends(self) -> tuple[int, NDArray[np.int64]]:
        """The number of rows, and where each split ends in their random order."""
        number, rows = 0, self.read()
        while some := sum(1 for _ in islice(rows, _COUNTED)):
            if self.should_stop():
                raise Stopped
            number += some
        if not number:
            raise UserError(f"{self.path}: has no rows")
        ends = np.rint(np.cumsum(self.shares) * number).astype(np.int64)
        ends[-1] = number if sum(self.shares) > 1 - 1e-9 else ends[-1]
        for split, size in zip(SPLITS, np.diff(ends, prepend=0), strict=False):
            if size <= 0:
                raise UserError(
                    f"{self.path}: data.split={self.shares} leaves the {split} split of {number} rows empty; give it a "
                    "larger share, or two shares for no test split"
                )
        return number, ends


def _most_bytes(files: Files) -> int:
    """The most bytes of text that these files can hold."""
    return sum(path.stat().st_size * (_MOST_DEFLATED if path.suffix == ".gz" else 1) for path in files)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]
