"""Weights & Biases: the server, or with WANDB_MODE=offline a folder for `wandb sync`."""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvd_transformer.reporting.trackers.tracker import DEFAULT_PROJECT, Job, Refused, Row

_WITHOUT_SERVER = ("offline", "dryrun", "disabled")


class WandbTracker:
    """The server knows which steps it has. Offline there is nobody to ask, and `wandb sync` of a second folder would
    replace what the first one uploaded: wandb's folder is made anew from metrics.jsonl whenever the run resumes."""

    def __init__(self) -> None:
        # No reports of crashes to the company.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run: Any = None

    def check(self) -> None:
        import wandb

        if self._mode() in _WITHOUT_SERVER:
            return
        try:
            # Standard input is a pipe: it cannot ask for the key.
            wandb.login(verify=False)
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise Refused(
                f"no usable API key ({error}): run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            ) from None

    def open(self, job: Job) -> int:
        import wandb

        if self._run is not None:  # a failure came between: `init` would return this one, whose folder goes now
            run, self._run = self._run, None
            with suppress(Exception):
                run.finish(exit_code=1)
        parent = Path(os.environ.get("WANDB_DIR") or job.folder)
        for earlier in (parent / "wandb").glob(f"*run-*-{job.id}"):  # also of attempts to reach the server
            shutil.rmtree(earlier)
        self._run = wandb.init(
            project=job.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            id=job.id,
            name=os.environ.get("WANDB_NAME") or job.name,
            dir=parent,
            resume="allow",
            config=dict(job.config),
            allow_val_change=True,
            # What the ranks print and their code stay here.
            settings=wandb.Settings(console="off", silent=True, save_code=False, disable_git=True),
        )
        return int(self._run.starting_step) - 1 if self._run.resumed else -1

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            self._run.log(dict(values), step=step)

    def close(self, status: str, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        if status == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)

    @staticmethod
    def _mode() -> str:
        import wandb

        return str(wandb.setup().settings.mode)
