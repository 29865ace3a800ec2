"""From a request to the jobs that it makes: defaults, arrays, and everything that is refused at submit."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import ENDED, Engine, Host, Needs, State
from hvd_transformer.service.scheduling.scheduler import can_ever_fit
from hvd_transformer.service.storage.new_job import NewJob
from hvd_transformer.service.submitting.checker import CheckedJob, Checker
from hvd_transformer.service.submitting.job_array import expand
from hvd_transformer.service.submitting.job_folders import Jobs, output_dirs
from hvd_transformer.service.submitting.request import MAX_TAG, Request, check_length, check_request, env_file_of

__all__ = ["Request", "prepare"]


def prepare(
    request: Request,
    owner: str,
    runs: Path,
    hosts: Sequence[Host],
    checker: Checker,
    jobs: Jobs,
    now: float | None = None,
) -> list[NewJob]:
    """The jobs of a request, several for an array. Raises `UserError` for anything that cannot run as it is asked for.

    The check of folders and the jobs' addition to the store belong in one critical section.
    """
    check_request(request, owner)
    _check_dependencies(request.after, jobs)
    settings = expand(request.array)
    checked = checker.check(
        request.folder,
        [[*request.words, *more] for more in settings],
        request.launch,
        request.num_ranks,
        request.min_ranks,
        request.engine,
        request.env_names,
        runs.resolve(),
    )
    name = request.name or _default_name(checked.jobs[0].name)
    folders = output_dirs(checked, name, runs.resolve(), bool(request.array), jobs)
    first = NewJob(
        name=name,
        owner=owner,
        submitted=time.time() if now is None else now,
        needs=Needs(1, 1),
        output_dir="",
        folder=request.folder,
        words=(),
        priority=request.priority,
        engine=request.engine,
        sbatch=tuple(request.sbatch),
        code=checked.code,
        env_names=tuple(dict.fromkeys(request.env_names)),
        env_file=env_file_of(request),
        tags=tuple(dict.fromkeys(request.tags)),
        after=tuple(dict.fromkeys(request.after)),
        time_limit=request.time_limit,
        max_retries=request.max_retries,
        held=request.hold,
        array=bool(request.array),
    )
    placed = _Placed(request, hosts)
    return [
        _complete(first, number, *parts, placed)
        for number, parts in enumerate(zip(checked.jobs, folders, settings, strict=True), start=1)
    ]


def _complete(
    job: NewJob, number: int, checked: CheckedJob, output_dir: str, settings: Sequence[str], placed: "_Placed"
) -> NewJob:
    """One job of the request; `number`: its place in an array, whose settings become tags."""
    needs, device = placed.of(checked)
    changed = {"training.device": device, "output_dir": output_dir}
    if checked.config["checkpoint.resume"] == "never":  # there is nothing yet; but it may be started several times
        changed["checkpoint.resume"] = "auto"
    words = [word for word in checked.words if word.partition("=")[0] not in changed]
    words += [f"{key}={value}" for key, value in changed.items() if value != "auto"]  # the default of both keys
    check_length("the configuration", words)
    return replace(
        job,
        name=f"{job.name}-{number}" if job.array else job.name,
        needs=needs,
        launch=tuple(checked.launch),
        output_dir=output_dir,
        words=tuple(words),
        config={**checked.config, **changed},
        tags=tuple(dict.fromkeys([*job.tags, *(setting[:MAX_TAG] for setting in settings)])),
    )


class _Placed:
    """What the jobs of one request need; jobs that need the same are looked at once."""

    def __init__(self, request: Request, hosts: Sequence[Host]) -> None:
        self._request, self._hosts = request, hosts
        self._known: dict[tuple[int, int, int, str], tuple[Needs, str]] = {}

    def of(self, job: CheckedJob) -> tuple[Needs, str]:
        """Its needs and its device: `auto` becomes cuda or cpu where the hosts' GPUs are known.

        Raises `UserError` if the hosts could not run it even without other jobs.
        """
        kind = (job.num_ranks, job.tensor, job.pipeline, job.device)
        if kind not in self._known:
            self._known[kind] = self._decide(*kind)
        return self._known[kind]

    def _decide(self, ranks: int, tensor: int, pipeline: int, device: str) -> tuple[Needs, str]:
        on_cpu = Needs(ranks, self._request.min_ranks or ranks, tensor)
        on_gpus = replace(on_cpu, gpus_per_rank=pipeline)
        if self._request.engine is not Engine.HOSTS:
            return on_gpus if device == "cuda" else on_cpu, device
        if device == "auto" and any(host.gpus for host in self._hosts):
            device = "cuda" if can_ever_fit(on_gpus, self._hosts) is None else "cpu"
        needs = on_gpus if device == "cuda" else on_cpu
        if (why := can_ever_fit(needs, self._hosts)) is not None:
            raise UserError(f"-np {ranks}: can never run: {why}")
        return needs, device


def _check_dependencies(after: Sequence[int], jobs: Jobs) -> None:
    for number in after:
        job = jobs.job(number)
        if job is None:
            raise UserError(f"--after {number}: no such job")
        if job.state in ENDED and job.state != State.SUCCEEDED:
            raise UserError(f"--after {number}: job {number} is {job.state.value}; `retry` it first")


def _default_name(wanted: str) -> str:
    """A preset's, file's or class's name as a job may have it."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).lstrip("._-")[:60]
    return name or "job"
