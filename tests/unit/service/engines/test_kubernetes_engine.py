"""Kubernetes as an engine. No cluster can run here: a stand-in for `kubectl` keeps objects as files, and refuses what
the real one would. Conditions are those that the mpi-operator sets (kubeflow.org/v2beta1, JobStatus).
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine_jobs import FakeCommands, submission
from engine_jobs import job as any_job
from job_files import written

from hvd_transformer.errors import UserError
from hvd_transformer.service.actions import Actions
from hvd_transformer.service.engines.backend import Ended, EngineFault, OverLimit
from hvd_transformer.service.engines.commands import CommandFailed, Commands
from hvd_transformer.service.engines.external_jobs import ExternalJobs
from hvd_transformer.service.engines.kubernetes import Kubernetes
from hvd_transformer.service.jobs import Engine, Job, State
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting.checker import Checker
from hvd_transformer.service.submitting.request import Request

LABELS = {"hvd-transformer/service": "abc"}
KUBECTL = """
import json, os, re, sys
from pathlib import Path

FOLDER = Path(os.environ["KUBECTL_FOLDER"])
FOLDER.mkdir(exist_ok=True)
KINDS = {"mpijobs.kubeflow.org": "MPIJob", "secret": "Secret", "pods": "Pod"}
action, *words = sys.argv[1:]
options = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
names = [word for word in words if not word.startswith("--")]


def file(kind, name):
    return FOLDER / f"{kind}-{name}.json"


if action == "apply":
    assert options == {"--filename": "-", "--output": "json"}, options
    items = json.load(sys.stdin)["items"]
    quota = FOLDER / "quota"
    for item in items:
        name = item["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name
        path = file(item["kind"], name)
        item["metadata"]["uid"] = f"uid of {name}"
        if not path.exists() and item["kind"] == "MPIJob" and quota.exists():
            sys.exit(quota.read_text())
        if not path.exists():
            path.write_text(json.dumps(item))
    print(json.dumps({"items": items}))
elif action == "get":
    assert options == {"--ignore-not-found": "", "--output": "json"}, options
    paths = [path for name in names[1:] if (path := file(KINDS[names[0]], name)).exists()]
    items = [json.loads(path.read_text()) for path in paths]
    if len(names) == 2:  # not a list
        items and print(json.dumps(items[0]))
    else:
        print(json.dumps({"kind": "List", "items": items}))
elif action == "patch":
    path = file(KINDS[names[0]], names[1])
    item = json.loads(path.read_text())
    item["metadata"] |= json.loads(options["--patch"])["metadata"]
    path.write_text(json.dumps(item))
elif action == "delete":
    with (FOLDER / "deleted").open("a") as log:
        log.write(" ".join(sys.argv[2:]) + "\\n")
    if names[0] == "secret":
        for name in names[1:]:
            file("Secret", name).unlink(missing_ok=True)
    elif names[0] != "pods":
        for name in names[1:]:
            path = file(KINDS[names[0]], name)
            item = json.loads(path.read_text())
            item["metadata"]["deletionTimestamp"] = "now"  # until its pods have gone
            path.write_text(json.dumps(item))
else:
    sys.exit(f"error: unknown command {action}")
"""


class Cluster:
    """The files of the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def objects(self, kind: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{kind}-*.json"))]

    def set(self, name: str, *conditions: tuple[str, str, str]) -> None:
        """The conditions of an MPIJob that hold: type, reason, message."""
        path = self.folder / f"MPIJob-{name}.json"
        item = json.loads(path.read_text())
        item["status"] = {
            "conditions": [
                {"type": kind, "status": "True", "reason": reason, "message": message}
                for kind, reason, message in conditions
            ]
        }
        path.write_text(json.dumps(item))

    def deleted(self) -> list[str]:
        file = self.folder / "deleted"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "kubectl").write_text(f"#!{sys.executable}\n{KUBECTL}")
    (commands / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECTL_FOLDER", str(tmp_path / "cluster"))
    return Cluster(tmp_path / "cluster")


class Service:
    """The real checking process and database, without the loop's thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store, self.checker = Store(folder / "service.db"), Checker(folder / "code")
        commands, self.id = Commands(), self.store.service_id()
        backends = {Engine.KUBERNETES: Kubernetes(commands, self.id)}
        self.jobs = ExternalJobs(self.store, backends, self.checker.job_file, folder, commands)
        self._actions = Actions(self.store, self.checker, folder / "runs", lambda: None, self.jobs.kill)

    def submit(self, **fields: Any) -> Job:
        given = {"folder": str(self.folder), "words": ["--preset", "tiny"], "engine": "kubernetes"}
        given["launch"] = ["-H", "a:2,b:2", "--image", "registry.example/x", "--memory-gib", "4"]
        (job,) = self._actions.submit(Request(**{**given, **fields}), "ann", None)
        self.jobs.accept([job.id])
        self.jobs.look()
        return job

    def cancel(self, number: int, now: bool = False) -> None:
        self._actions.cancel(number, now)

    def job(self, number: int) -> Job:
        self.jobs.look()
        found = self.store.job(number)
        assert found is not None
        return found

    def close(self) -> None:
        self.checker.close()
        self.store.close()


@pytest.fixture
def service(cluster: Cluster, tmp_path: Path) -> Iterator[Service]:
    with closing(Service(tmp_path)) as made:
        yield made


def test_a_job_becomes_an_mpijob_and_is_followed(service: Service, cluster: Cluster, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.touch(mode=0o600)
    secrets.write_text("TOKEN=hidden\n")
    job = service.submit(env_names=["TOKEN"], env_file="secrets", time_limit=3600.0)
    assert job.needs.num_ranks == 4
    claim = f"hvd-{service.id}-1"
    (mpijob,), (secret,), (volume,) = map(cluster.objects, ("MPIJob", "Secret", "PersistentVolumeClaim"))
    assert mpijob["metadata"]["name"] == f"{claim}-1"
    assert mpijob["spec"]["runPolicy"]["activeDeadlineSeconds"] == 3600
    assert mpijob["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"] == 2
    launcher = mpijob["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["image"] == "registry.example/x"
    assert f"output_dir={job.output_dir}" in launcher["args"]
    exit_file = {"name": "HVD_TRANSFORMER_EXIT_FILE", "value": f"{job.output_dir}/.attempts/1.exit"}
    reference = {"secretKeyRef": {"name": f"{claim}-env", "key": "TOKEN"}}
    name = {"name": "HVD_TRANSFORMER_JOB", "value": f"1-{job.submitted * 1e6:.0f}"}
    assert launcher["env"] == [{"name": "TOKEN", "valueFrom": reference}, exit_file, name]
    assert volume["metadata"]["name"] == f"{claim}-output"
    assert (secret["metadata"]["name"], secret["stringData"]) == (f"{claim}-env", {"TOKEN": "hidden"})
    owner = secret["metadata"]["ownerReferences"]
    assert [one["uid"] for one in owner] == [f"uid of {claim}-1"]
    assert service.job(1).reason == f"MPIJob {claim}-1: not yet seen"
    cluster.set(f"{claim}-1", ("Created", "MPIJobCreated", "created"))
    assert (service.job(1).state, service.job(1).reason) == (State.STARTING, f"MPIJob {claim}-1: Created")
    cluster.set(f"{claim}-1", ("Created", "", ""), ("Running", "MPIJobRunning", "running"))
    assert service.job(1).state is State.RUNNING
    cluster.set(f"{claim}-1", ("Created", "", ""), ("Succeeded", "MPIJobSucceeded", "done"))
    assert service.job(1).state is State.SUCCEEDED
    assert cluster.objects("Secret") == []
    assert "hidden" not in "".join(path.read_text(errors="replace") for path in tmp_path.glob("service.db*"))


def test_the_code_of_a_job_is_named_to_its_launcher(service: Service, cluster: Cluster, tmp_path: Path) -> None:
    """As it was at `submit`: the volume of the run directory has it where the service's machine mounts that."""
    (tmp_path / "mine.py").write_text("class Mine: ...")
    job = service.submit(words=["task=mine:Mine"])
    (mpijob,) = cluster.objects("MPIJob")
    launcher = mpijob["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    found = {one["name"]: one.get("value") for one in launcher["env"]}["HVD_TRANSFORMER_CODE"]
    assert (Path(found) / "mine.py").read_text() == "class Mine: ..."
    assert Path(found).parent == Path(job.output_dir)


def test_a_job_that_fails_and_one_whose_worker_is_evicted(service: Service, cluster: Cluster) -> None:
    service.submit()
    service.submit()
    cluster.set(f"hvd-{service.id}-1-1", ("Failed", "BackoffLimitExceeded", "Job has reached\nthe limit"))
    cluster.set(f"hvd-{service.id}-2-1", ("Failed", "MPIJobEvicted", "1/2 workers are evicted"))
    failed, evicted = service.job(1), service.job(2)
    assert failed.state is State.FAILED
    assert failed.reason == f"MPIJob hvd-{service.id}-1-1 failed: BackoffLimitExceeded: Job has reached the limit"
    assert (evicted.state, evicted.retries) == (State.QUEUED, 1)
    service.jobs.accept([2])
    service.jobs.look()
    names = [item["metadata"]["name"] for item in cluster.objects("MPIJob")]
    assert names == [f"hvd-{service.id}-{attempt}" for attempt in ("1-1", "2-1", "2-2")]
    assert len(cluster.objects("PersistentVolumeClaim")) == 2  # the second attempt has the volume of the first


def test_a_job_is_cancelled(service: Service, cluster: Cluster) -> None:
    service.submit()
    name = f"hvd-{service.id}-1-1"
    cluster.set(name, ("Running", "", ""))
    assert service.job(1).state is State.RUNNING
    service.cancel(1)
    assert service.job(1).state is State.STOPPING  # its ranks save
    options = "--cascade=foreground --wait=false --ignore-not-found"
    assert cluster.deleted() == [f"mpijobs.kubeflow.org {name} {options}"]
    service.cancel(1, now=True)
    assert service.job(1).state is State.STOPPING
    assert cluster.deleted()[-1] == (
        f"pods --selector=training.kubeflow.org/job-name in ({name}) --grace-period=0 --force --wait=false"
    )
    (cluster.folder / f"MPIJob-{name}.json").unlink()
    assert service.job(1).state is State.CANCELLED


def test_an_mpijob_that_somebody_deletes_is_not_started_again(service: Service, cluster: Cluster) -> None:
    service.submit()
    (cluster.folder / f"MPIJob-hvd-{service.id}-1-1.json").unlink()
    job = service.job(1)
    assert (job.state, job.reason) == (State.FAILED, f"MPIJob hvd-{service.id}-1-1 was deleted")


def test_an_mpijob_that_is_there_already_stays_as_it_is(cluster: Cluster, tmp_path: Path) -> None:
    """The service was killed before it could write down that it had applied it."""
    text = written("kubernetes", "-np", "2", "--memory-gib", "1", "--", "--preset", "tiny")
    sent = submission(any_job(tmp_path, engine=Engine.KUBERNETES), text)
    kubernetes = Kubernetes(Commands(), "abc")
    assert kubernetes.submit(sent) == kubernetes.submit(sent) == "hvd-abc-7-1"
    assert list(kubernetes.look({"hvd-abc-7-1": None, "hvd-abc-7-2": None})) == ["hvd-abc-7-1"]
    assert Kubernetes(Commands(), "another").look({"hvd-abc-7-1": None}) == {}


def test_jobs_that_have_ended_are_not_looked_at(tmp_path: Path) -> None:
    """The cluster keeps them for days."""
    commands = FakeCommands({"kubectl": ""})
    assert Kubernetes(commands, "abc").look({f"x-{number}": None for number in range(300)}) == {}
    asked = [word for call in commands.called for word in call if word.startswith("x-")]
    assert (asked, len(commands.called)) == ([f"x-{number}" for number in range(300)], 2)


def test_the_values_of_a_job_that_the_cluster_does_not_take_are_removed(
    service: Service, cluster: Cluster, tmp_path: Path
) -> None:
    """A full quota is waited for."""
    (tmp_path / "secrets").touch(mode=0o600)
    (tmp_path / "secrets").write_text("TOKEN=hidden\n")
    cluster.folder.mkdir()
    quota = cluster.folder / "quota"
    quota.write_text("Error from server (Forbidden): exceeded quota: team, requested: count/mpijobs=1")
    service.submit(env_names=["TOKEN"], env_file="secrets")
    assert service.job(1).state is State.STARTING
    assert "exceeded quota" in service.job(1).reason
    quota.write_text("Error from server (Forbidden): mpijobs are forbidden")
    assert service.job(1).state is State.FAILED
    assert cluster.objects("Secret") == []


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("The connection to the server 127.0.0.1:6443 was refused - did you specify the right host?", EngineFault),
        ('error: the server doesn\'t have a resource type "mpijobs"', UserError),
        ("Error from server (Forbidden): mpijobs.kubeflow.org is forbidden", UserError),
        ('Error from server (Forbidden): persistentvolumeclaims "x" is forbidden: exceeded quota: team', OverLimit),
    ],
)
def test_what_kubectl_refuses_for_good_and_for_now(tmp_path: Path, message: str, kind: type[Exception]) -> None:
    text = written("kubernetes", "-np", "2", "--memory-gib", "1", "--", "--preset", "tiny")
    kubernetes = Kubernetes(FakeCommands({"kubectl": CommandFailed(f"kubectl: {message}")}), "abc")
    with pytest.raises(kind):
        kubernetes.submit(submission(any_job(tmp_path), text))


@pytest.mark.parametrize(
    ("conditions", "ended", "runs"),
    [
        ([], None, False),
        (["Created", "Suspended"], None, False),
        (["Created", "Running"], None, True),
        (["Created", "Restarting"], None, False),
        (["Created", "Running", "Succeeded"], Ended.EXITED, False),
        (["Created", "Failed"], Ended.EXITED, False),
    ],
)
def test_every_condition(conditions: list[str], ended: Ended | None, runs: bool) -> None:
    status = {"conditions": [{"type": kind, "status": "True"} for kind in conditions]}
    status["conditions"].append({"type": "Failed" if ended is None else "Running", "status": "False"})
    items = {"items": [{"metadata": {"name": "x", "labels": LABELS}, "status": status}]}
    found = Kubernetes(FakeCommands({"kubectl": json.dumps(items)}), "abc").look({"x": None})["x"]
    assert (found.ended, found.runs) == (ended, runs)


def test_the_deadline_of_an_mpijob() -> None:
    condition = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "too long"}
    items = {"items": [{"metadata": {"name": "x", "labels": LABELS}, "status": {"conditions": [condition]}}]}
    found = Kubernetes(FakeCommands({"kubectl": json.dumps(items)}), "abc").look({"x": "x"})["x"]
    assert found.ended is Ended.TIME_LIMIT
