"""How the trainings of a sweep run: as jobs of the service, or here through `launch`, one after the other."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from click.core import ParameterSource

from hvd_transformer.cli import service_options
from hvd_transformer.cli.engine_job import context_of
from hvd_transformer.cli.launch import launch
from hvd_transformer.cli.launch_options import LaunchOptions
from hvd_transformer.cli.main import show as show_error
from hvd_transformer.cli.wait import ends, exit_code
from hvd_transformer.errors import UserError
from hvd_transformer.sweep.definition import Sweep
from hvd_transformer.sweep.run import Runner, Task

if TYPE_CHECKING:
    from hvd_transformer.service.remote.client import Client


_NOT_FOUND = 404

# Options of `launch` that make it another thing than one training to wait for; the sweep's `ranks` are its -np.
_NOT_FOR_TRIALS = {"num_ranks", "detach", "dry_run", "scheduler", "output", "image", "memory_gib", "settings"}


def check_launch_options(sweep: Sweep, file: Path) -> None:
    """Raise `UserError` if `launch` of the sweep in `file` has anything but options of `launch` for a trial."""
    origin = f"{file}: launch: {sweep.launch}"
    try:
        context = context_of(launch, shlex.split(sweep.launch))
        LaunchOptions(**context.params)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in _NOT_FOR_TRIALS and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            told = context.params["settings"][0] if name == "settings" else parameter.opts[0]
            raise UserError(f"{origin}: {told}: not for the trials of a sweep")


def runner_of(sweep: Sweep, server: str | None, *, local: bool, silent: bool) -> Runner:
    """The service of --server or this user's, else this machine. Raises `UserError` if --server does not answer.

    `silent`: nothing but ours on standard output.
    """
    from hvd_transformer.service.remote.address import SERVER
    from hvd_transformer.service.remote.client import NoService

    options = shlex.split(sweep.launch)
    if not local:
        client = service_options.client_of(server)
        try:
            client.get("me")
        except NoService:
            if server or os.environ.get(SERVER):
                raise
        else:
            return Queued(client, sweep.ranks, options)
    return Launched(sweep.ranks, options, sys.stderr.fileno() if silent else None)


class Launched:
    """One `hvd-transformer launch` after the other."""

    def __init__(self, ranks: int, options: Sequence[str], output: int | None) -> None:
        self._output = output
        self._words = [sys.executable, "-m", "hvd_transformer.cli.main", "launch", "-np", str(ranks), *options, "--"]

    def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
        for task in tasks:
            yield task, self._launch(task)

    def _launch(self, task: Task) -> int:
        """Ctrl-C reaches the launcher, too, and SIGTERM is passed on: the ranks save first."""
        asked: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            asked.append(number)
            launcher.terminate()

        _forget_end(task)
        words, environment = [*self._words, *task.words], {**os.environ, "PYTHONSAFEPATH": "1"}
        launcher = subprocess.Popen(words, env=environment, stdout=self._output)
        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            code = launcher.wait()
        except KeyboardInterrupt:
            launcher.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        if asked:
            raise KeyboardInterrupt
        return code


class Queued:
    """Jobs of the service, all of a rung at once. A sweep that goes on waits for those that it had submitted."""

    def __init__(self, client: "Client", ranks: int, options: Sequence[str]) -> None:
        self._client, self._ranks, self._options = client, ranks, list(options)

    def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
        by_job: dict[int, Task] = {}
        unfinished = self._unfinished(tasks)
        for task in tasks:
            if task.trial.job is None or not self._has(task.trial.job, task):
                known = unfinished.get(task.run.resolve())
                task.trial.job = self._submit(task) if known is None else known
                begun()
            by_job[task.trial.job] = task
        for job in ends(self._client, list(by_job)):
            if job["state"] != "SUCCEEDED" and job["reason"]:
                show_error("hvd-transformer", f"job {job['id']}: {job['reason']}")
            yield by_job[job["id"]], _code(job)

    def _unfinished(self, tasks: Sequence[Task]) -> dict[Path, int]:
        """The sweep's jobs that have not ended, by run directory: the answer to a request may not have arrived."""
        from hvd_transformer.service.jobs import ENDED

        jobs = self._client.items("jobs", tag=_tag(tasks[0]), limit=500) if tasks else ()
        return {Path(job["output_dir"]): job["id"] for job in jobs if job["state"] not in ENDED}

    def _has(self, number: int, task: Task) -> bool:
        """Whether this service has the job: its number may be that of another service, or of one that began anew."""
        from hvd_transformer.service.remote.client import Refused

        try:
            job = self._client.get(f"jobs/{number}")
        except Refused as error:
            if error.status == _NOT_FOUND:
                return False
            raise
        return Path(job["output_dir"]) == task.run.resolve()

    def _submit(self, task: Task) -> int:
        request = {
            "words": task.words,
            "launch": self._options,
            "folder": str(Path.cwd()),
            "num_ranks": self._ranks,
            "name": task.trial.name,
            "tags": [_tag(task)],
        }
        _forget_end(task)
        answer = self._client.submit(request)
        return int(answer["ids"][0])


def _tag(task: Task) -> str:
    return f"sweep={task.run.parent.name}"


def _forget_end(task: Task) -> None:
    """A start that crashes leaves no summary of its own."""
    (task.run / "summary.json").unlink(missing_ok=True)


def _code(job: dict[str, Any]) -> int:
    """The exit code of a job that has ended; below 0 if it was cancelled or its launcher killed."""
    if job["state"] == "CANCELLED":
        return -signal.SIGTERM
    ended = job["attempts"][-1]["code"] if job["attempts"] else None
    return int(ended) if ended is not None and ended < 0 else exit_code(job)
