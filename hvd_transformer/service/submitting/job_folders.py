"""Where submitted jobs write: each into a run directory of its own, inside the runs folder."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hvd_transformer.config.schema import check_new_run
from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ID, Job
from hvd_transformer.service.submitting.checker import Checked


class Jobs(Protocol):
    """What must be known of the jobs that there are: `Store`."""

    def job(self, id: int) -> Job | None: ...

    def jobs(self, *, limit: int, newest_first: bool) -> list[Job]: ...


def output_dirs(checked: Checked, name: str, runs: Path, is_array: bool, jobs: Jobs) -> list[str]:
    """The run directory of each job: RUNS/NAME-ID or what the user has chosen, and below it one per job of an array.

    Raises `UserError` for a folder outside of `runs`. The store refuses one that another job uses.
    """
    unchosen = runs / f"{name}-{ID}{_suffix(name, runs, jobs)}"
    folders = []
    for number, job in enumerate(checked.jobs, start=1):
        folder = unchosen if job.output_dir is None else _chosen(job.output_dir, runs)
        folder = folder / str(number) if is_array else folder
        check_new_run(job.config["checkpoint.resume"], folder)
        folders.append(str(folder))
    return folders


def _chosen(output_dir: str, runs: Path) -> Path:
    folder = Path(output_dir).resolve()
    if runs not in folder.parents:
        raise UserError(f"output_dir={output_dir}: must be inside the service's runs folder, {runs}; or leave it out")
    return folder


def _suffix(name: str, runs: Path, jobs: Jobs) -> str:
    """What tells the folder of the next job from those of an earlier database, whose ids began at 1, too.

    The job would otherwise resume a run that has nothing to do with it.
    """
    newest = jobs.jobs(limit=1, newest_first=True)
    last = newest[0].id if newest else 0
    pattern = re.compile(rf"{re.escape(name)}-(\d{{1,18}})(-\d{{1,9}})?", re.ASCII)
    taken = set()
    with suppress(FileNotFoundError), os.scandir(runs) as entries:
        for entry in entries:
            found = pattern.fullmatch(entry.name)
            if found is not None and int(found[1]) > last:
                taken.add(found[2] or "")
    return next(suffix for suffix in ("", *(f"-{n}" for n in range(2, len(taken) + 3))) if suffix not in taken)
