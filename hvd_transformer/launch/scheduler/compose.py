"""A compose file: a launcher and one worker container per host, on one Docker engine, as in docker/compose.yaml.

Source: the Compose Specification.
"""

from collections.abc import Sequence
from typing import Any

from hvd_transformer.launch.scheduler.scheduled_job import (
    FOLDER,
    LAUNCHER_KEY,
    WORKER_KEYS,
    ScheduledJob,
    command,
    output_folder,
    text,
)

NAME = "compose.yaml"


def services(job: ScheduledJob) -> str:
    """The text of compose.yaml."""
    workers = {f"worker-{number}": host.slots for number, host in enumerate(job.hosts, start=1)}
    hosts = ",".join(f"{name}:{slots}" for name, slots in workers.items())
    launcher = {
        **_service(job, "launcher", command(["launcher", *job.launch("-H", hosts)])),
        "environment": [f"HOSTS={hosts}", *_threads(job), *job.named],
        "depends_on": list(workers),
        "healthcheck": {"disable": True},  # it runs no sshd
    }
    described = {"launcher": launcher}
    first_gpu = 0
    for name, slots in workers.items():
        described[name] = _service(job, name, ["worker"])
        if gpus := slots * job.gpus_per_rank:
            ids = [str(first_gpu + at) for at in range(gpus)]
            devices = [{"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}]
            described[name]["deploy"] = {"resources": {"reservations": {"devices": devices}}}
            first_gpu += gpus
    header = f"Written by hvd-transformer launch --scheduler compose; docker/ builds the image {job.container}."
    if job.named:
        header += f"\nThe values of {', '.join(job.named)} come from the shell that runs docker compose."
    return text(header, {"services": described, "volumes": {"launcher-key": {}, "worker-keys": {}, "output": {}}})


def _threads(job: ScheduledJob) -> list[str]:
    """One thread per rank, or what the user's shell has: each of several workers sees all cores of the machine."""
    alone = len(job.hosts) == 1 or job.gpus_per_rank or "OMP_NUM_THREADS" in job.named
    return [] if alone else ["OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"]


def _service(job: ScheduledJob, name: str, words: Sequence[str]) -> dict[str, Any]:
    folder = output_folder(job.config.output_dir).replace("$", "$$")
    output = "output" if folder == FOLDER else folder  # an absolute folder is one of the machine
    return {
        "image": job.container,
        "hostname": name,
        "command": list(words),
        "working_dir": FOLDER,
        "volumes": [f"launcher-key:{LAUNCHER_KEY}", f"worker-keys:{WORKER_KEYS}", f"{output}:{folder}"],
        "shm_size": "1gb",  # NCCL and MPI need more than the default of 64 MB
        "stop_grace_period": f"{job.grace_seconds}s",  # for the ranks to save
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
