"""Trackio: a database in the home folder, or the Hugging Face Space of TRACKIO_SPACE_ID."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_transformer.reporting.step_lines import is_number
from hvd_transformer.reporting.trackers.tracker import DEFAULT_PROJECT, Job, Refused, Row


class TrackioTracker:
    """Runs are known by their names, so the name contains the job's id."""

    def __init__(self) -> None:
        self._run: Any = None
        self._last: Row | None = None  # kept back for the summary, for which Trackio has no other place

    def check(self) -> None:
        import huggingface_hub
        import trackio  # noqa: F401  # fails early where it cannot be imported

        if os.environ.get("TRACKIO_SPACE_ID") and not huggingface_hub.get_token():
            raise Refused("TRACKIO_SPACE_ID is set, but there is no token: run `hf auth login` or set HF_TOKEN")

    def open(self, job: Job) -> int:
        import trackio

        space = os.environ.get("TRACKIO_SPACE_ID")
        self._run = trackio.init(
            project=job.project or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT,
            name=f"{job.name}-{job.id}",
            resume="allow",
            config=dict(job.config),
            **({"space_id": space} if space else {}),
        )
        self._last = None
        return int(self._run._next_step) - 1  # one past the largest step that is stored

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._send_last()
            self._last = row

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        if self._last is not None and status == "finished":
            step, values = self._last
            numbers = {f"summary/{key}": value for key, value in summary.items() if is_number(value)}
            self._last = step, {**values, **numbers}
        self._send_last()
        self._run.finish()

    def _send_last(self) -> None:
        if self._last is not None:
            step, values = self._last
            self._run.log(dict(values), step=step)
            self._last = None
