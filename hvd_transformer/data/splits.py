"""Splits of a data set: their names, the one finder of their files, and how one file is split at random."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.config.schema import DataConfig
from hvd_transformer.data.sampler import Permutation
from hvd_transformer.errors import UserError

T = TypeVar("T")
SPLITS = ("train", "valid", "test")
WHOLE = "data"  # the split's name when a single file is evaluated as a whole
# File stems accepted for each split of examples, in order of preference.
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "val", "validation", "dev"), "test": ("test",)}
_SHUFFLE = 5  # keeps the random split independent of the order of the epochs


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
        raise UserError(f"{origin}: no valid and no test split")
    return wanted or own[-1]


def check_whole(wanted: str | None, path: Path) -> None:
    """Raise `UserError` if a split of a single file is requested."""
    if wanted is not None:
        raise UserError(f"--split {wanted}: {path} is one file, which is evaluated as a whole; omit --split")


@dataclass(frozen=True)
class Source(Generic[T]):
    """What every split is read from. `identity` distinguishes data sets: equal identities mean equal texts."""

    name: str
    identity: dict[str, Any]
    splits: dict[str, T]

    def only(self, wanted: str | None, origin: str) -> "Source[T]":
        """One split of it, chosen by `chosen_split`."""
        split = chosen_split(wanted, self.splits, origin)
        return Source(self.name, {**self.identity, "only": split}, {split: self.splits[split]})


ExampleSource = Source[Reader]


class ExampleFiles(ABC):
    """One way to store examples: which files of a folder hold each split, and how they are read."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config

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
        """The names of each split's files: as configured, else `SPLIT_NAMES`."""
        return {
            split: (name,) if (name := getattr(self.config, split)) else names for split, names in SPLIT_NAMES.items()
        }

    def open(self, path: Path, seed: int) -> ExampleSource:
        """All splits of a folder, or of one file that is split at random.

        Raises `UserError` with what is missing and what is allowed.
        """
        if path.is_file():
            splits = split_at_random(self.reader((path,)), self.config.split, seed, path)
            identity = {"file": file_identity(path), "split": self.config.split, "seed": seed}
            return ExampleSource(_stem(path), {**identity, **self.settings}, splits)
        files = self.find(path)
        for split in ("train", "valid"):
            if split not in files:
                raise UserError(f"{path}: no {split} split; it must hold {self.accepted(path, split)}")
        return self._source(path, files)

    def open_split(self, path: Path, wanted: str | None) -> ExampleSource:
        """One file as a whole, or one split of a folder (see `chosen_split`), which needs no other splits.

        Raises `UserError` with what is missing and what is allowed.
        """
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
        return ExampleSource(folder.name, {**identity, **self.settings}, readers)


def file_identity(path: Path) -> list[Any]:
    """Path, size and time of the last change: they distinguish a file from a changed one."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def split_at_random(read: Reader, shares: list[float], seed: int, path: Path) -> dict[str, Reader]:
    """Split the examples of one file by `shares`, determined by `seed` alone; each split keeps the file's order.

    Raises `UserError` if a split would be empty.
    """
    number = sum(1 for _ in read())
    ends = np.rint(np.cumsum(shares) * number).astype(int)
    ends[-1] = number if sum(shares) > 1 - 1e-9 else ends[-1]
    positions = Permutation(max(number, 1), (seed, _SHUFFLE))[np.arange(number)]
    members = np.searchsorted(ends, positions, side="right")  # for each example the number of its split
    for index, split in enumerate(SPLITS[: len(shares)]):
        if not (members == index).any():
            raise UserError(
                f"{path}: data.split={shares} leaves the {split} split of {number} rows empty; give it a larger share, "
                "or two shares for no test split"
            )
    return {split: _members(read, members == index) for index, split in enumerate(SPLITS[: len(shares)])}


def _members(read: Reader, chosen: NDArray[np.bool_]) -> Reader:
    return lambda: compress(read(), chosen)


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]
