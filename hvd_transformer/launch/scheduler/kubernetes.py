"""An MPIJob for the Kubeflow mpi-operator, and a PersistentVolumeClaim for the output.

Source: the operator's API kubeflow.org/v2beta1 and its controller, which mounts a key pair and authorized_keys on every
pod, and /etc/mpi/hostfile on the launcher. Its discover_hosts.sh is not needed: a pod that comes back keeps its name,
and the script prints no slots.
"""

import math
from typing import Any

from hvd_transformer.launch.scheduler.scheduled_job import (
    FOLDER,
    GROUP_ID,
    LAUNCHER_KEY,
    SSH_PORT,
    USER_ID,
    ScheduledJob,
    command,
    output_folder,
    text,
)

NAME = "mpijob.yaml"

_RANKS_PER_GIB = 4  # of /dev/shm: NCCL and MPI need more than the default of 64 MB
_LAUNCHER = {"requests": {"cpu": 1, "memory": "1Gi"}}


def manifest(job: ScheduledJob) -> str:
    """The text of the manifest. Raises `UserError` if the hosts' slots differ."""
    spec = {
        "slotsPerWorker": job.slots,
        "sshAuthMountPath": LAUNCHER_KEY,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 3},
        "mpiReplicaSpecs": {"Launcher": _launcher(job), "Worker": _workers(job)},
    }
    header = (
        "Written by hvd-transformer launch --scheduler kubernetes.\n"
        f"The claim needs a storage class that several pods can write to; the image {job.container} must be in a\n"
        "registry that the cluster can reach."
    )
    if job.named:
        header += f" The Secret {_secret(job)} holds the values of {', '.join(job.named)}."
    return text(
        header,
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": _claim(job)},
            "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "20Gi"}}},
        },
        {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": {"name": job.name}, "spec": spec},
    )


def _launcher(job: ScheduledJob) -> dict[str, Any]:
    hosts = ["--hostfile", "/etc/mpi/hostfile"]
    if "--ssh-identity" not in job.options:
        hosts += ["--ssh-identity", f"{LAUNCHER_KEY}/id_rsa"]
    container: dict[str, Any] = {"args": command(job.launch(*hosts)), "resources": _LAUNCHER}
    if job.named:
        container["env"] = [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": _secret(job), "key": name}}} for name in job.named
        ]
    return _replica(job, "launcher", 1, container)


def _workers(job: ScheduledJob) -> dict[str, Any]:
    gpus, cores = job.slots * job.gpus_per_rank, job.slots * job.cores_per_rank
    memory = math.ceil(job.worker_bytes / 2**30) + _shared_gib(job)
    resources: dict[str, Any] = {"requests": {"cpu": cores, "memory": f"{memory}Gi"}}
    if gpus:
        resources["limits"] = {"nvidia.com/gpu": gpus}
    container = {
        "args": ["worker"],
        "resources": resources,
        "readinessProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2},
    }
    return _replica(job, "worker", len(job.hosts), container)


def _replica(job: ScheduledJob, role: str, replicas: int, container: dict[str, Any]) -> dict[str, Any]:
    folder = output_folder(job.config.output_dir)
    mounts = [{"name": "output", "mountPath": folder}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    pod = {
        # As PodSecurity's "restricted" wants it.
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "fsGroup": GROUP_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": job.grace_seconds,
        "containers": [
            {
                "name": role,
                "image": job.container,
                "workingDir": FOLDER,
                "volumeMounts": mounts,
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                **container,
            }
        ],
        "volumes": [
            {"name": "output", "persistentVolumeClaim": {"claimName": _claim(job)}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{_shared_gib(job)}Gi"}},
        ],
    }
    return {"replicas": replicas, "restartPolicy": "OnFailure", "template": {"spec": pod}}


def _shared_gib(job: ScheduledJob) -> int:
    """The size of a worker's /dev/shm, which is memory of its pod."""
    return math.ceil(job.slots / _RANKS_PER_GIB)


def _claim(job: ScheduledJob) -> str:
    return f"{job.name}-output"


def _secret(job: ScheduledJob) -> str:
    return f"{job.name}-env"
