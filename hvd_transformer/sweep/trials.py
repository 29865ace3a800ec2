"""The trials of a sweep and their results, in sweep.json: what an interrupted sweep goes on from."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvd_transformer import atomic
from hvd_transformer.errors import UserError
from hvd_transformer.folder_lock import FolderLock
from hvd_transformer.sweep.definition import Sweep

FILE, _LOCK = "sweep.json", ".sweep"
# May change when a sweep goes on: `trials` may grow.
_CHANGEABLE = ("trials", "ranks", "launch", "output_dir")


@contextmanager
def alone_in(folder: Path, waits: Callable[[str], object]) -> Iterator[None]:
    """Keep other sweeps out of `folder`, which is made: two would start every trial twice.

    `waits` is told, in a line, if one that may have ended is waited for. Raises `UserError` if one is at work, or the
    folder cannot be written.
    """
    lock = FolderLock(folder / _LOCK, "hvd-transformer sweep")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.take(waits)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


@dataclass
class Trial:
    """One combination of values. `results`: the metric by rung; None: the training failed. `steps`: of its run, which
    may end before a rung does."""

    number: int
    values: dict[str, Any]
    results: dict[str, float | None] = field(default_factory=dict)
    seconds: float | None = None
    steps: int | None = None
    job: int | None = None  # of the service, while it is at work on the next rung

    @property
    def name(self) -> str:
        return f"trial-{self.number:03d}"

    @property
    def failed(self) -> bool:
        return None in self.results.values()

    @property
    def rungs(self) -> int:
        """How many rungs it has finished."""
        return sum(value is not None for value in self.results.values())

    @property
    def value(self) -> float | None:
        """Its newest result."""
        return next((value for value in reversed(self.results.values()) if value is not None), None)


class Trials:
    """The trials of the sweep in `folder`, written after each result."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        """Read those of an earlier start. Raises `UserError` if they are of another sweep."""
        self.sweep, self.folder, self._file = sweep, folder, folder / FILE
        self.all: list[Trial] = []
        self._definition = {key: value for key, value in sweep.model_dump().items() if key not in _CHANGEABLE}
        try:
            saved = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise UserError(f"{self._file}: cannot be read: {error}") from None
        try:
            known, self.all = dict(saved["sweep"]), [Trial(**trial) for trial in saved["trials"]]
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{self._file}: not written by hvd-transformer sweep; choose another output_dir") from None
        for key, value in self._definition.items():
            if known.get(key) != json.loads(json.dumps(value)):
                raise UserError(f"{folder}: holds a sweep with another {key}; choose another output_dir")

    def trial(self, number: int, values: dict[str, Any]) -> Trial:
        """The trial of this number from 1 on; a new one gets these values."""
        if number > len(self.all):
            self.all.append(Trial(number, values))
        return self.all[number - 1]

    @property
    def any_result(self) -> bool:
        """Whether a trial has a result."""
        return any(trial.value is not None for trial in self.all)

    def forget_failures(self) -> None:
        """Let the trials that failed go on from their last results."""
        for trial in self.all:
            trial.results = {rung: value for rung, value in trial.results.items() if value is not None}

    def save(self) -> None:
        """Raises `UserError` if the folder cannot be written."""
        document = {"sweep": self._definition, "trials": [asdict(trial) for trial in self.all]}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic.write_text(self._file, json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise UserError(f"{self._file}: cannot be written: {error.strerror}") from None

    def best(self, trials: Iterable[Trial], rung: int) -> list[Trial]:
        """Trials that have finished this rung, best first, also if they failed later."""
        values = {trial.number: trial.results.get(str(rung)) for trial in trials}
        found = [trial for trial in trials if values[trial.number] is not None]
        return sorted(found, key=lambda trial: self.sweep.sign * (values[trial.number] or 0.0))

    def ranked(self, trials: Iterable[Trial]) -> list[Trial]:
        """Best first: who has finished more rungs, then by the metric; those without result last."""
        return sorted(
            trials,
            key=lambda trial: (-trial.rungs, self.sweep.sign * trial.value if trial.value is not None else 0.0),
        )
