"""Splits of a data set: their names, random shares, and rows of examples."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_transformer.data.sampler import Permutation
from hvd_transformer.errors import UserError

SPLITS = ("train", "valid", "test")
WHOLE = "data"  # what a single file is where it is not to be cut


def chosen_split(wanted: str | None, there: Collection[str], origin: str) -> str:
    """The split to evaluate: the wanted one; else test, or valid where there is no test.

    Raises `UserError` that begins with `origin`, where the data is, and names the splits there.
    """
    own = [split for split in SPLITS if split in there]
    if wanted is not None and wanted not in own:
        raise UserError(f"{origin}: no {wanted} split; there is {' and '.join(own) or 'none to evaluate'}")
    if wanted is None and own in ([], ["train"]):
        raise UserError(f"{origin}: no valid and no test split")
    return wanted or own[-1]


def check_whole(wanted: str | None, path: Path) -> None:
    """Raises `UserError` where a split of a single file is wanted."""
    if wanted is not None:
        raise UserError(f"--split {wanted}: {path} is one file, which is evaluated as a whole; leave --split out")


# What a split's files may be called.
SPLIT_NAMES = {"train": ("train",), "valid": ("valid", "val", "validation", "dev"), "test": ("test",)}
_SHUFFLE = 5  # tells the split's order from the epochs'


@dataclass(frozen=True)
class RawExample:
    """One sample's texts, and the label of a classification; `place` says where it stands, for messages."""

    texts: tuple[str, ...]
    label: str | None
    place: str


@dataclass(frozen=True)
class ExampleSource:
    """The rows of every split, read anew each time; `identity` tells them from any others."""

    name: str
    identity: dict[str, Any]
    splits: dict[str, Callable[[], Iterator[RawExample]]]

    def only(self, wanted: str | None, origin: str) -> "ExampleSource":
        """One split, as `chosen_split` says."""
        split = chosen_split(wanted, self.splits, origin)
        return ExampleSource(self.name, {**self.identity, "only": split}, {split: self.splits[split]})


def file_identity(path: Path) -> list[Any]:
    """Tells a file from a changed one."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def split_at_random(
    read: Callable[[], Iterator[RawExample]], shares: list[float], seed: int, path: Path
) -> dict[str, Callable[[], Iterator[RawExample]]]:
    """Shares of one file's rows, chosen by `seed` alone; each split keeps the file's order."""
    number = sum(1 for _ in read())
    ends = np.rint(np.cumsum(shares) * number).astype(int)
    ends[-1] = number if sum(shares) > 1 - 1e-9 else ends[-1]
    turns = Permutation(max(number, 1), (seed, _SHUFFLE))[np.arange(number)]
    members = np.searchsorted(ends, turns, side="right")  # by row, the number of its split
    for index, split in enumerate(SPLITS[: len(shares)]):
        if not (members == index).any():
            raise UserError(
                f"{path}: data.split={shares} leaves the {split} split of {number} rows empty; give it a larger share, "
                "or two shares for no test split"
            )
    return {split: _members(read, members == index) for index, split in enumerate(SPLITS[: len(shares)])}


def _members(read: Callable[[], Iterator[RawExample]], chosen: NDArray[np.bool_]) -> Callable[[], Iterator[RawExample]]:
    return lambda: (row for row, number in zip(read(), count()) if chosen[number])
