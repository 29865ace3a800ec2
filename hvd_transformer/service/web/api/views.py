"""Turns what the service knows into what it answers: jobs, attempts, rows of the table."""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_transformer.service.jobs import Allocation, Attempt, Engine, Job
from hvd_transformer.service.runs.comparison import compare
from hvd_transformer.service.runs.details import run_details
from hvd_transformer.service.runs.index import RunRow, run_id
from hvd_transformer.service.runs.logs import log_names
from hvd_transformer.service.runs.query import TableRow
from hvd_transformer.service.runs.status import RunStatus
from hvd_transformer.service.web.api import models
from hvd_transformer.service.web.parts import Service

_NOT_ANSWERED = {"config", "env_file"}  # the one only in detail, the other never


def placements(allocation: Allocation) -> list[models.Placement]:
    """Where an attempt runs."""
    return [models.Placement(host=part.host, ranks=part.ranks, gpus=list(part.gpus)) for part in allocation]


def job_fields(job: Job, allocation: Allocation) -> dict[str, Any]:
    """The fields of `models.Job`. `allocation`: of its attempt that runs."""
    return {
        **{name: value for name, value in vars(job).items() if name not in _NOT_ANSWERED},
        "needs": models.Needs(**vars(job.needs)),
        "words": list(job.words),
        "launch": list(job.launch),
        "sbatch": list(job.sbatch),
        "env_names": list(job.env_names),
        "tags": list(job.tags),
        "after": list(job.after),
        "stopping": None if job.stopping is None else job.stopping.value,
        "run": run_id(Path(job.output_dir)),
        "allocation": placements(allocation),
    }


class JobViews:
    """Makes the answers of one request: where jobs run is read once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._allocations = {attempt.job: attempt.allocation for attempt in service.store.open_attempts()}

    def job(self, job: Job) -> models.Job:
        """A job without its configuration."""
        return models.Job(**job_fields(job, self._allocations.get(job.id, ())))

    def details(self, job: Job) -> models.JobDetails:
        """A job with its configuration and its attempts."""
        fields = job_fields(job, self._allocations.get(job.id, ()))
        return models.JobDetails(**fields, config=dict(job.config), attempts=attempts(self._service, job.id))

    def row_fields(self, row: TableRow, config: Collection[str] | None = ()) -> dict[str, Any]:
        """The fields of `models.Row`, its job as it is now. `config`: the wanted keys; None: all."""
        run = row.run
        job = None if row.job is None else self._service.store.job(row.job.id)
        keys = row.config if config is None else [key for key in config if key in row.config]
        task = row.config.get("task")  # anything: anybody may have written the file
        return {
            "id": row.id,
            "name": row.name,
            "state": row.state if job is None else job.state.value,
            "job": None if job is None else self.job(job),
            "user": row.user or None,
            "tags": list(row.tags if job is None else job.tags),
            "step": None if run is None else run.step,
            "total_steps": None if run is None else run.total_steps,
            "epoch": None if run is None else run.epoch,
            "metrics": {} if run is None else dict(run.metrics),
            "best": {} if run is None else dict(run.best),
            "task": task if isinstance(task, str) else None,
            "world": None if run is None else run.world,
            "tokens_per_second": None if run is None else run.tokens_per_second,
            "began": None if run is None else run.began,
            "updated": None if run is None else run.updated,
            "estimated_end": self.estimated_end(row),
            "cause": "" if run is None else run.cause,
            "problem": "" if run is None else run.problem,
            "config": {key: row.config[key] for key in keys},
        }

    def row(self, row: TableRow, config: Collection[str] | None = ()) -> models.Row:
        """A row of the table."""
        return models.Row(**self.row_fields(row, config))

    def run(self, row: TableRow) -> models.RunDetails:
        """Everything about one run but its curves and logs."""
        fields = self.row_fields(row, None)
        fields["attempts"] = [] if row.job is None else attempts(self._service, row.job.id)
        if row.run is None:
            return models.RunDetails(**fields, logs=log_names(row.path))
        found = run_details(row.run, self._service.curves, self._service.launchers)
        return models.RunDetails(
            **fields,
            ranks=[models.Rank(**vars(rank)) for rank in found.ranks],
            checkpoints=[models.Checkpoint(**{**vars(one), "metrics": dict(one.metrics)}) for one in found.checkpoints],
            late=found.late,
            samples=[models.StepSamples(step=one.step, samples=[*map(dict, one.samples)]) for one in found.samples],
            logs=list(found.logs),
            summary=dict(row.run.summary),
        )

    def comparison(self, rows: Sequence[TableRow], missing: Sequence[str] = ()) -> models.Comparison:
        """Several runs side by side; `missing` are the ids of others. Raises `UserError` for too many."""
        found = compare([row.run or _not_begun(row) for row in rows])
        shown = [self.row(row) for row in rows]
        return models.Comparison(runs=shown, differs=found.differs, final=found.final, missing=list(missing))

    def estimated_end(self, row: TableRow) -> float | None:
        """When the run of a row is likely to end; None if it does not run, or if that is not known."""
        if row.job is not None and row.job.engine is Engine.HOSTS and self._service.queue is not None:
            return self._service.queue.manager.estimated_end(row.job.id)
        if row.run is None or row.run.status is not RunStatus.RUNNING:
            return None
        left = self._service.runs.progress(row.run.path).seconds_left
        return None if left is None else time.time() + left


def attempts(service: Service, job: int) -> list[models.Attempt]:
    """The attempts of a job."""
    return [_attempt(attempt) for attempt in service.store.attempts(job)]


def _not_begun(row: TableRow) -> RunRow:
    """What is known of a job without a run directory: its configuration."""
    assert row.job is not None
    return RunRow(row.id, row.name, Path(row.job.output_dir), row.user, config=row.config)


def _attempt(attempt: Attempt) -> models.Attempt:
    fields: Mapping[str, Any] = {
        name: value for name, value in vars(attempt).items() if name not in ("job", "allocation")
    }
    return models.Attempt(allocation=placements(attempt.allocation), **fields)
