"""How the trainings of a sweep run: as jobs of the service, or here through `launch`, one after the other."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from click.core import ParameterSource

from hvd_transformer.cli import service_options
from hvd_transformer.cli.engine_job import context_of
from hvd_transformer.cli.exit_file import EXIT_FILE
from hvd_transformer.cli.launch import launch
from hvd_transformer.cli.launch_options import LaunchOptions
from hvd_transformer.cli.main import show as show_error
from hvd_transformer.cli.wait import POLL_SECONDS, ends, exit_code, perhaps_ended
from hvd_transformer.errors import UserError
from hvd_transformer.launch.launch_record import wait_for_launcher
from hvd_transformer.sweep.definition import Sweep
from hvd_transformer.sweep.run import Runner, Task

if TYPE_CHECKING:
    from hvd_transformer.service.remote.client import Client


_NOT_FOUND, _QUEUE_FULL = 404, 429
_LONGEST_PAUSE = 80.0  # seconds between two attempts to submit, each of which makes the service check a configuration

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

        # An earlier sweep that was killed may have left its launcher at work.
        wait_for_launcher(task.run, lambda line: show_error("hvd-transformer", line))
        _forget_end(task)
        with tempfile.TemporaryDirectory() as folder:
            words, ended = [*self._words, *task.words], Path(folder) / "ended.json"
            environment = {**os.environ, "PYTHONSAFEPATH": "1", EXIT_FILE: str(ended)}
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
            if code:
                _check_hosts(task, ended)
        return code


def _check_hosts(task: Task, ended: Path) -> None:
    """Raise `UserError` if a launcher ended because hosts could not be used or were lost, which is no result."""
    try:
        how = json.loads(ended.read_text(encoding="utf-8"))
        hosts = ", ".join(dict.fromkeys([*how["refused"], *how["lost"]]))
    except (OSError, ValueError, KeyError, TypeError):
        return
    if hosts:
        raise UserError(f"{task.trial.name}: hosts that cannot be used: {hosts}; run the same command to resume")


class Queued:
    """Jobs of the service, as many of a rung at once as it takes. A sweep that goes on waits for those that it had
    submitted."""

    def __init__(self, client: "Client", ranks: int, options: Sequence[str]) -> None:
        self._client, self._ranks, self._options = client, ranks, list(options)

    def run(self, tasks: Sequence[Task], begun: Callable[[], None]) -> Iterator[tuple[Task, int]]:
        waiting, by_job, pause = deque(tasks), dict[int, Task](), 0.0
        unfinished = self._unfinished(tasks)
        while (refusal := self._begin(waiting, by_job, unfinished, begun)) is not None:
            if not pause:
                show_error("hvd-transformer", f"{refusal}; {waiting[0].trial.name} waits")
            pause = min(max(2 * pause, POLL_SECONDS), _LONGEST_PAUSE)
            for job in self._ended_within(pause, list(by_job)):
                yield _result(by_job.pop(job["id"]), job)
        for job in ends(self._client, list(by_job)):
            yield _result(by_job[job["id"]], job)

    def _begin(
        self, waiting: deque[Task], by_job: dict[int, Task], unfinished: Mapping[Path, int], begun: Callable[[], None]
    ) -> UserError | None:
        """Give jobs to the tasks that wait, in their order; returns why the service takes no more of them now, such as
        a user's limit of jobs in the queue."""
        from hvd_transformer.service.remote.client import Busy, Refused

        while waiting:
            task = waiting[0]
            try:
                if task.trial.job is None or not self._has(task.trial.job, task):
                    known = unfinished.get(task.run.resolve())
                    task.trial.job = self._submit(task) if known is None else known
                    begun()
            except Refused as error:
                if isinstance(error, Busy) or error.status == _QUEUE_FULL:
                    return error
                raise
            by_job[task.trial.job] = waiting.popleft()
        return None

    def _ended_within(self, seconds: float, jobs: list[int]) -> list[dict[str, Any]]:
        """The first of the jobs that end within so many seconds: each makes room for another."""
        until = time.monotonic() + seconds
        while True:
            time.sleep(POLL_SECONDS)
            if (found := self._ended(jobs)) or time.monotonic() >= until:
                return found

    def _ended(self, jobs: list[int]) -> list[dict[str, Any]]:
        """Those of the jobs that have ended, as far as the service answers."""
        from hvd_transformer.service.jobs import ENDED
        from hvd_transformer.service.remote.client import Busy, NoService

        found = []
        with suppress(NoService, Busy):
            for number in perhaps_ended(self._client, jobs):
                if (job := self._client.get(f"jobs/{number}"))["state"] in ENDED:
                    found.append(job)
        return found

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


def _result(task: Task, job: dict[str, Any]) -> tuple[Task, int]:
    if job["state"] != "SUCCEEDED" and job["reason"]:
        show_error("hvd-transformer", f"job {job['id']}: {job['reason']}")
    return task, _code(job)


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
