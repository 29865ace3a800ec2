"""What listing commands show while the service is down: from its database and the run directories."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Job, State
from hvd_transformer.service.remote.address import DATABASE, expanded
from hvd_transformer.service.remote.reading import job_number, run_of
from hvd_transformer.service.runs.index import RunIndex, run_id
from hvd_transformer.service.runs.launcher_beats import LauncherBeats
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.runs.query import TableRow, table_rows
from hvd_transformer.service.runs.watched_run import WatchedRun
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.storage.tokens import Tokens
from hvd_transformer.service.web.api.views import JobViews
from hvd_transformer.service.web.parts import Service


class Offline:
    """The database in a state folder. Documents have the shape of the HTTP interface. Raises `UserError`."""

    def __init__(self, state: Path) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._store = Store(state / DATABASE, read_only=True)
        self._service = Service(
            version="",
            store=self._store,
            tokens=Tokens(self._store.database),
            runs=RunIndex(state),  # which nobody refreshes: it knows no run
            curves=Curves(),
            launchers=LauncherBeats(),
            queue=None,
            problem=lambda: None,
        )

    @classmethod
    def of_directories(cls) -> "Offline":
        """Without a service: it knows no job, and shows what run directories hold."""
        folder = TemporaryDirectory()
        Store(Path(folder.name) / DATABASE).close()
        found = cls(Path(folder.name))
        found._folder = folder  # removed with it
        return found

    def jobs(self, states: Sequence[str], user: str | None, tag: str | None) -> Iterable[dict[str, Any]]:
        views = JobViews(self._service)
        for job in self._store.jobs(map(State, states), user, tag):
            yield views.job(job).model_dump(mode="json")

    def job_and_run(self, word: str) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        row = self._row(word)
        views = JobViews(self._service)
        job = None if row.job is None else views.details(row.job).model_dump(mode="json")
        return job, None if row.run is None else views.run(row).model_dump(mode="json")

    def compare(self, words: Sequence[str]) -> dict[str, Any]:
        rows = [self._row(word) for word in words]
        return JobViews(self._service).comparison(rows).model_dump(mode="json")

    def _row(self, word: str) -> TableRow:
        number = job_number(word)
        if number is not None:
            job = self._store.job(number)
            if job is None:
                raise UserError(f"job {number}: no such job")
            return _table_row(Path(job.output_dir), job)
        path = expanded(word)
        if not path.is_dir() and run_of(word):
            raise UserError(f"{word}: while no service runs, give the run's directory or the number of its job")
        path = path.resolve()
        job = self._store.jobs_by_output([str(path)]).get(str(path))
        return _table_row(path, job, self._store.run_tags([run_id(path)]))


def _table_row(path: Path, job: Job | None, tags: Mapping[str, Sequence[str]] = MappingProxyType({})) -> TableRow:
    """The run in a folder, if it has begun, with its job. Raises `UserError` for a folder that is neither."""
    if job is None and not (path / "config.yaml").exists():
        raise UserError(f"{path}: not a run directory")
    jobs, watched = [] if job is None else [job], WatchedRun(path, path.name)
    try:
        watched.refresh()
    except OSError as error:
        if job is None:
            raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
        return table_rows([], jobs, {})[0]
    return table_rows([watched.row], jobs, tags)[0]
