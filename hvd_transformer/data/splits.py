"""The splits of a data set, and which of them is evaluated."""

from collections.abc import Collection
from pathlib import Path

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
