"""Kubernetes: an MPIJob per attempt, which `kubectl` applies, reads and deletes in the namespace of its context.

Source: the mpi-operator's API kubeflow.org/v2beta1 and its JobStatus. An MPIJob has the label of its service; the
operator removes it some days after its end.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from hvd_transformer.errors import UserError
from hvd_transformer.plugin import CODE
from hvd_transformer.service.engines.backend import Ended, OverLimit, Sighting, Submission
from hvd_transformer.service.engines.commands import CommandFailed, Commands
from hvd_transformer.service.launching.launch_command import own_variables

_KIND = "mpijobs.kubeflow.org"
_SERVICE = "hvd-transformer/service"
_JOB = "training.kubeflow.org/job-name"  # the operator's label of pods
_AT_ONCE = 200  # names on one command line; those of earlier jobs are not asked for
_KEEP_SECONDS = 7 * 86_400  # after its end: a service that was down sees it
_ENDED = {
    "DeadlineExceeded": Ended.TIME_LIMIT,
    "MPIJobEvicted": Ended.LOST,
}
# Failures that may pass: the API server does not answer, or is busy.
_QUOTA = "exceeded quota"  # of the namespace: an older job's end makes room
_PASSING = re.compile(r"connect|timeout|timed out|refused|etcd|TooManyRequests|InternalError|unavailable", re.I)


class Kubernetes:
    """The cluster of kubectl's current context."""

    title = "Kubernetes"

    def __init__(self, commands: Commands, service: str) -> None:
        self._commands, self._service = commands, service

    def look(self, wanted: Mapping[str, str | None]) -> Mapping[str, Sighting]:
        """See `Backend`."""
        names, seen = list(wanted), dict[str, Sighting]()
        for at in range(0, len(names), _AT_ONCE):
            words = (*names[at : at + _AT_ONCE], "--ignore-not-found", "--output=json")
            found = json.loads(self._kubectl("get", _KIND, *words) or "{}")
            for item in found.get("items", [found] if found else []):  # of one name it is no list
                metadata = item["metadata"]
                if metadata.get("labels", {}).get(_SERVICE) == self._service:
                    seen[metadata["name"]] = _sighting(metadata["name"], item)
        return seen

    def gone(self, external: str) -> Sighting:
        """See `Backend`. Nothing but `kubectl delete` removes an MPIJob so early."""
        return Sighting(external, f"MPIJob {external} was deleted", ended=Ended.CANCELLED)

    def submit(self, attempt: Submission) -> str:
        """See `Backend`. What is there already stays as it is."""
        items = _objects(attempt)
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        try:
            applied = json.loads(self._kubectl("apply", "--filename=-", "--output=json", text=text))["items"]
        except CommandFailed as error:
            if _QUOTA in f"{error} {error.errors}":
                raise OverLimit(str(error)) from None
            if _PASSING.search(str(error)):
                raise
            raise UserError(str(error)) from None
        if attempt.values:  # the Secret goes when the MPIJob goes, also if this service is gone by then
            mpijob = next(item for item in applied if item["kind"] == "MPIJob")
            owner = {key: mpijob[key] for key in ("apiVersion", "kind")}
            owner |= {key: mpijob["metadata"][key] for key in ("name", "uid")}
            patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
            self._kubectl("patch", "secret", f"{attempt.claim}-env", "--type=merge", f"--patch={patch}")
        return attempt.name

    def stop(self, sightings: Sequence[Sighting], now: bool) -> None:
        """See `Backend`. The MPIJob goes when its pods have gone."""
        for at in range(0, len(sightings), _AT_ONCE):
            names = [found.external for found in sightings[at : at + _AT_ONCE]]
            self._kubectl("delete", _KIND, *names, "--cascade=foreground", "--wait=false", "--ignore-not-found")
            if now:
                pods = f"--selector={_JOB} in ({','.join(names)})"
                self._kubectl("delete", "pods", pods, "--grace-period=0", "--force", "--wait=false")

    def clean(self, claim: str) -> None:
        """See `Backend`."""
        self._kubectl("delete", "secret", f"{claim}-env", "--ignore-not-found", "--wait=false")

    def _kubectl(self, *words: str, text: str = "") -> str:
        return self._commands.run("kubectl", *words, text=text)


def _objects(attempt: Submission) -> list[dict[str, Any]]:
    """The objects of the job file, for this attempt, and the Secret that they name.

    As JSON, whose strings are never taken for numbers.
    """
    items: list[dict[str, Any]] = list(yaml.safe_load_all(attempt.file))
    mpijob = next(item for item in items if item["kind"] == "MPIJob")
    mpijob["metadata"] = {"name": attempt.name, "labels": {_SERVICE: attempt.service}}
    policy = mpijob["spec"]["runPolicy"]
    policy["ttlSecondsAfterFinished"] = _KEEP_SECONDS
    if attempt.seconds is not None:
        policy["activeDeadlineSeconds"] = math.ceil(attempt.seconds)
    launcher = mpijob["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    own = own_variables(attempt.job, attempt.files)
    if attempt.code is not None:  # in the run directory, whose volume the pods and the service share
        own = {**own, CODE: str(attempt.code)}
    launcher.setdefault("env", []).extend({"name": name, "value": value} for name, value in own.items())
    if attempt.values:
        metadata = {"name": f"{attempt.claim}-env"}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": dict(attempt.values)}
        items.insert(0, secret)
    return items


def _sighting(name: str, item: Mapping[str, Any]) -> Sighting:
    """By the conditions of its status: those that hold, the newest last."""
    held = {
        condition["type"]: condition
        for condition in item.get("status", {}).get("conditions", ())
        if condition["status"] == "True"
    }
    if "Succeeded" in held:
        return Sighting(name, f"MPIJob {name}: Succeeded", ended=Ended.EXITED, code=0)
    if "Failed" in held:
        reason, message = (held["Failed"].get(key, "") for key in ("reason", "message"))
        words = ": ".join(filter(None, (f"MPIJob {name} failed", reason, " ".join(message.split())[:300])))
        return Sighting(name, words, ended=_ENDED.get(reason, Ended.EXITED), code=1)
    last = next((kind for kind in ("Suspended", "Running", "Restarting", "Created") if kind in held), "not yet seen")
    words = "is being deleted" if "deletionTimestamp" in item["metadata"] else last
    return Sighting(name, f"MPIJob {name}: {words}", runs="Running" in held)
