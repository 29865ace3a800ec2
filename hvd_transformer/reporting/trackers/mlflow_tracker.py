"""MLflow: the server or database of MLFLOW_TRACKING_URI."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from hvd_transformer.config.schema import shown
from hvd_transformer.reporting.step_lines import is_number
from hvd_transformer.reporting.trackers.tracker import DEFAULT_PROJECT, Job, Refused, Row, in_parts, without_passwords

# Which run of a job an MLflow run is: MLflow chooses its own ids.
_TAG = "hvd_transformer.run"
# Limits of one request, from MLflow's REST API.
_MOST_METRICS, _MOST_PARAMETERS, _MOST_CHARACTERS = 1000, 100, 6000
_SUMMARY = "summary/"  # metrics of the end of a start, which may be of a later step than the rows that are there
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_OF_SERVERS = ("http", "https", "sqlite", "postgresql", "mysql", "mssql")


class MlflowTracker:
    """The store says up to which step it has each metric: what an interrupted request has left out is sent again."""

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # By default MLflow tries for minutes before it tells that the server is away.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._client: Any = None
        self._run = ""
        self._last: dict[str, int] = {}  # the last step of each metric

    def check(self) -> None:
        import mlflow

        uri = str(mlflow.get_tracking_uri())
        if urlsplit(uri).scheme.partition("+")[0] in _OF_SERVERS:
            return
        try:
            mlflow.MlflowClient()
        except Exception as error:  # of many kinds
            reason = " ".join(str(error).split())
            raise Refused(without_passwords(f"MLFLOW_TRACKING_URI={uri}: {reason}")) from None

    def open(self, job: Job) -> int:
        import mlflow

        self._client = client = mlflow.MlflowClient()
        name = job.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        found = client.get_experiment_by_name(name)
        experiment = client.create_experiment(name) if found is None else found.experiment_id
        runs = client.search_runs([experiment], f"tags.`{_TAG}` = '{job.id}'", max_results=1)
        run = runs[0] if runs else client.create_run(experiment, tags={_TAG: job.id}, run_name=job.name)
        self._run = run.info.run_id
        if runs:
            client.update_run(self._run, status="RUNNING")
        self._last = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        self._log_parameters({key: value for key, value in job.config.items() if key not in run.data.params})
        # The values of the last step may not all be there: `log` knows.
        own = (step for key, step in self._last.items() if not key.startswith(_SUMMARY))
        return max(own, default=0) - 1

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name, float(value), now, step)
            for step, values in rows
            for name, value in zip(map(_allowed, values), values.values(), strict=True)
            if step > self._last.get(name, -1)
        ]
        for part in in_parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._run, metrics=part)

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        step = int(summary.get("steps", 0))
        numbers = {f"{_SUMMARY}{key}": value for key, value in summary.items() if is_number(value)}
        self.log([(step, numbers)])
        for key, value in summary.items():
            if isinstance(value, str):
                self._client.set_tag(self._run, _allowed(key), value)
        self._client.set_terminated(self._run, _STATES[status])

    def _log_parameters(self, values: Mapping[str, Any]) -> None:
        """MLflow keeps the first value of a parameter."""
        from mlflow.entities import Param

        parameters = [Param(key, shown(value)[:_MOST_CHARACTERS]) for key, value in values.items()]
        for part in in_parts(parameters, _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=part)


def _allowed(name: str) -> str:
    """One refused name, such as recall@10, would keep all metrics from being logged."""
    return re.sub(r"[^\w\-. :/]", "_", name)
