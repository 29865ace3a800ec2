"""The command line and the environment of a job's launcher."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hvd_transformer.folder_lock import JOB
from hvd_transformer.launch.detach import BEGUN
from hvd_transformer.service.jobs import Allocation, Host, Job
from hvd_transformer.service.launching.attempt_files import AttemptFiles, write_discovery_script
from hvd_transformer.service.submitting.env_file import read_values
from hvd_transformer.service.submitting.request import env_owners

EXIT_FILE = "HVD_TRANSFORMER_EXIT_FILE"


def launch_words(job: Job, files: AttemptFiles) -> list[str]:
    """The arguments of `hvd-transformer` that start the job on the hosts of its spool folder.

    An elastic job, which may grow, gets a script there that tells its hosts. Raises `OSError`.
    """
    hosts = ["--hostfile", str(files.folder / "hosts")]
    if job.needs.min_ranks < job.needs.num_ranks:
        script = write_discovery_script(files.folder)
        hosts = ["--min-np", str(job.needs.min_ranks), "--host-discovery-script", str(script)]
    named = [word for name in job.env_names for word in ("--env", name)]
    return ["launch", "--detach", "-np", str(job.needs.num_ranks), *hosts, *named, *job.launch, "--", *job.words]


def launch_environment(job: Job, defaults: Mapping[str, str], begun: int, files: AttemptFiles) -> dict[str, str]:
    """The launcher's environment: this process's, the values of the job's `env_names`, and where it is to tell what.

    `defaults` are for variables that this process does not have. Raises `UserError` like `secret_values`.
    """
    return {
        **defaults,
        **os.environ,
        **secret_values(job),
        BEGUN: str(begun),
        **own_variables(job, files),
        "PYTHONSAFEPATH": "1",  # see `launcher_environment`
    }


def secret_values(job: Job) -> dict[str, str]:
    """The values of the job's `env_names`, from its private file.

    Raises `UserError` if that is incomplete or not private, and `NotNow` if it is away.
    """
    if not job.env_names:
        return {}
    return read_values(Path(job.env_file or ""), job.env_names, env_owners(job.owner))


def own_variables(job: Job, files: AttemptFiles) -> dict[str, str]:
    """What every launcher of the job is told, whoever starts it: where to tell how it ended, and which job it is.

    The lock of a run directory may outlive an attempt that has lost hosts.
    """
    return {EXIT_FILE: str(files.exit), JOB: f"{job.id}-{job.submitted * 1e6:.0f}"}


def thread_limit(allocation: Allocation, hosts: Iterable[Host]) -> dict[str, str]:
    """OMP_NUM_THREADS for the ranks of an allocation: what a slot of its smallest host has; nothing if not known.

    Jobs that share a host share its threads: without a limit each would take all cores that its own ranks leave.
    """
    known = {host.name: host.threads for host in hosts}
    least = min((known.get(place.host, 0) for place in allocation), default=0)
    return {"OMP_NUM_THREADS": str(least)} if least else {}
