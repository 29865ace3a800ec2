"""The manifest for Kubernetes: valid, admitted by PodSecurity's "restricted", and with requests for what it takes."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from job_files import TWO_HOSTS, documents, job, pods, written
from jsonschema import Draft202012Validator
from pod_security import RESTRICTED, Pod, refused

from hvd_transformer.cli.launch import launch
from hvd_transformer.errors import UserError
from hvd_transformer.launch.scheduler import kubernetes

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = json.loads((SCHEMAS / "kubernetes-1.32.json").read_text())
MPIJOB = yaml.safe_load((SCHEMAS / "mpijob.yaml").read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
_METADATA = "apimachinery.pkg.apis.meta.v1.ObjectMeta"
GPU_JOB = ["--env", "TOKEN", "--", "training.device=cuda", "parallel.pipeline=2"]
# What Kubernetes' quantities look like.
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[KMGTPE]i?|k)?")


def strict(schema: Any) -> Any:
    """A structural schema under which a field that it does not name is an error. The API server drops such a field."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(item) for key, item in schema.items()}
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def errors(claim: dict, mpijob: dict) -> list[str]:
    """What the API server would find in them, as paths."""
    found = [
        ("claim", _kubernetes("api.core.v1.PersistentVolumeClaim").iter_errors(claim)),
        ("mpijob", Draft202012Validator(strict(MPIJOB)).iter_errors(mpijob)),
        ("mpijob.metadata", _kubernetes(_METADATA).iter_errors(mpijob.get("metadata", {}))),
    ]
    for role, replica in mpijob.get("spec", {}).get("mpiReplicaSpecs", {}).items():
        found.append((role, _kubernetes("api.core.v1.PodTemplateSpec").iter_errors(replica.get("template", {}))))
    return [f"{of}{error.json_path[1:]}: {error.message}" for of, seen in found for error in seen]


def _kubernetes(kind: str) -> Draft202012Validator:
    return Draft202012Validator({**KUBERNETES, "$ref": f"#/$defs/io.k8s.{kind}"})


def keys(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        if isinstance(value, dict):
            yield (*path, key)
        yield from keys(item, (*path, key))


@pytest.mark.parametrize("words", [[], GPU_JOB])
def test_the_manifest_is_valid(words: list[str]) -> None:
    claim, mpijob = documents(written("kubernetes", *TWO_HOSTS, *words))
    assert errors(claim, mpijob) == []
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert (mpijob["apiVersion"], mpijob["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")


def test_a_misspelt_key_is_an_error_wherever_it_is() -> None:
    """Else the check would pass a manifest whose field the API server drops."""
    manifest = documents(written("kubernetes", *TWO_HOSTS, *GPU_JOB))
    paths = [path for path in keys(manifest) if path[-2] not in ("requests", "limits", "mpiReplicaSpecs")]
    assert len(paths) > 80
    for path in paths:
        wrong = copy.deepcopy(manifest)
        place: Any = wrong
        for key in path[:-1]:
            place = place[key]
        place[f"{path[-1]}x"] = place.pop(path[-1])
        assert errors(*wrong), path


# ---- what the job needs


@pytest.mark.parametrize("words", [[], GPU_JOB])
def test_the_job_gets_what_it_needs(words: list[str]) -> None:
    claim, mpijob = documents(written("kubernetes", *TWO_HOSTS, *words))
    spec = mpijob["spec"]
    assert spec["slotsPerWorker"] == 2
    assert [spec["mpiReplicaSpecs"][role]["replicas"] for role in ("Launcher", "Worker")] == [1, 2]
    launcher, worker = (pods(mpijob)[role]["containers"][0] for role in ("Launcher", "Worker"))
    assert launcher["image"] == worker["image"] == f"hvd-transformer:{'gpu' if words else 'cpu'}"
    assert worker["resources"].get("limits") == ({"nvidia.com/gpu": 4} if words else None)
    for pod in pods(mpijob).values():
        assert claim["metadata"]["name"] in [
            volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]
        ]
        requests = pod["containers"][0]["resources"]["requests"]
        assert requests.keys() == {"cpu", "memory"}
        assert all(QUANTITY.fullmatch(str(quantity)) for quantity in requests.values())
        # Ranks, then agents and sshd: a pod that is killed at the end of the first would save nothing.
        assert pod["terminationGracePeriodSeconds"] > 120


def gib(*words: str) -> tuple[int, int]:
    """The memory that a worker requests, and how much of it is for /dev/shm."""
    worker = pods(documents(written("kubernetes", *words))[1])["Worker"]
    (shared,) = (volume["emptyDir"] for volume in worker["volumes"] if "emptyDir" in volume)
    assert shared["medium"] == "Memory"
    quantities = worker["containers"][0]["resources"]["requests"]["memory"], shared["sizeLimit"]
    memory, size = (int(quantity.removesuffix("Gi")) for quantity in quantities)
    return memory, size


LARGE = ["--", "data.vocab_size=30000", "model.num_layers=3", "model.d_model=768", "training.device=cpu"]


def test_the_memory_is_what_the_plan_says_and_what_a_checkpoint_takes() -> None:
    """21 M parameters in blocks and twice 23 M in tables, in fp32, with AdamW."""
    memory, shared = gib("-np", "1", "-H", "h1:1", *LARGE, "model.d_feedforward=3072", "training.batch_size=1")
    weights = 4 * (3 * 12 * 768**2 + 2 * 30_000 * 768) / 2**30
    assert memory - shared >= weights * (
        1 + 1 + 2 + 3
    )  # with gradients, optimizer, and a copy of weights and optimizer
    assert memory - shared <= weights * 7 + 1.5


def test_all_ranks_of_a_worker_count() -> None:
    one, one_shared = gib("-np", "1", "-H", "h1:1", *LARGE)
    eight, eight_shared = gib("-np", "16", "-H", "h1:8,h2:8", *LARGE)
    assert (one_shared, eight_shared) == (1, 2)
    assert 8 * (one - one_shared - 1) < eight - eight_shared <= 8 * (one - one_shared)


def test_a_sharded_optimizer_needs_less() -> None:
    words = ["-np", "8", "-H", "h1:8", *LARGE]
    assert gib(*words, "parallel.optimizer_shard=gradients")[0] < gib(*words)[0]


def test_the_memory_can_be_given() -> None:
    assert gib(*TWO_HOSTS, "--memory-gib", "9.5") == (11, 1)
    assert "memory-gib" not in kubernetes.manifest(job())


def test_a_model_that_cannot_be_planned_needs_a_number(tmp_path: Path) -> None:
    words = [*TWO_HOSTS, "--scheduler", "kubernetes", "--dry-run"]
    own = ["--", "task=own_task:Own"]
    (tmp_path / "own_task.py").write_text(
        "from hvd_transformer.tasks.language_model_task import LanguageModelTask\n"
        "from hvd_transformer.tasks.task import Task\n"
        "class Own(LanguageModelTask):\n    sketch = Task.sketch\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        with pytest.raises(UserError, match=r"cannot be planned; .*; give --memory-gib, the memory of each worker$"):
            CliRunner().invoke(launch, [*words, *own], catch_exceptions=False)
        assert CliRunner().invoke(launch, [*words, "--memory-gib", "4", *own]).exit_code == 0


@pytest.mark.parametrize("output", ["runs/x", "/data/runs/x", "/runs"])
def test_the_output_lies_in_the_volume(output: str) -> None:
    for pod in pods(documents(kubernetes.manifest(job(output_dir=output)))[1]).values():
        (container,) = pod["containers"]
        mount = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "output")
        assert mount == (output if output.startswith("/") else container["workingDir"])


# ---- PodSecurity


@pytest.mark.parametrize("words", [[], GPU_JOB])
def test_restricted_admits_all_pods(words: list[str]) -> None:
    _, mpijob = documents(written("kubernetes", *TWO_HOSTS, *words))
    assert {role: refused(pod) for role, pod in pods(mpijob).items()} == {"Launcher": [], "Worker": []}


def _own(**values: Any) -> Callable[[Pod], None]:
    """Sets these in the first container's security context."""
    return lambda pod: pod["containers"][0]["securityContext"].update(values)


def _of_pod(**values: Any) -> Callable[[Pod], None]:
    return lambda pod: pod["securityContext"].update(values)


def _container(**values: Any) -> Callable[[Pod], None]:
    return lambda pod: pod["containers"][0].update(values)


BREAKS: list[tuple[str, Callable[[Pod], Any]]] = [
    ("HostProcess", _of_pod(windowsOptions={"hostProcess": True})),
    ("Host Namespaces", lambda pod: pod.update(hostNetwork=True)),
    ("Host Namespaces", lambda pod: pod.update(hostPID=True)),
    ("Host Namespaces", lambda pod: pod.update(hostIPC=True)),
    ("Privileged Containers", _own(privileged=True)),
    ("Capabilities", _own(capabilities={"drop": ["ALL"], "add": ["SYS_PTRACE"]})),
    ("Capabilities", _own(capabilities={"drop": ["NET_RAW"]})),
    ("Capabilities", lambda pod: pod["containers"][0]["securityContext"].pop("capabilities")),
    ("Volume Types", lambda pod: pod["volumes"].append({"name": "x", "hostPath": {"path": "/data"}})),
    ("Volume Types", lambda pod: pod["volumes"].append({"name": "x", "nfs": {"server": "x", "path": "/"}})),
    ("Host Ports", _container(ports=[{"containerPort": 2222, "hostPort": 2222}])),
    ("Host Probes / Lifecycle Hooks", _container(readinessProbe={"tcpSocket": {"port": 22, "host": "10.0.0.1"}})),
    ("Host Probes / Lifecycle Hooks", _container(lifecycle={"preStop": {"httpGet": {"port": 1, "host": "x"}}})),
    ("AppArmor", _own(appArmorProfile={"type": "Unconfined"})),
    ("SELinux", _of_pod(seLinuxOptions={"type": "spc_t"})),
    ("SELinux", _own(seLinuxOptions={"user": "system_u"})),
    ("/proc Mount Type", _own(procMount="Unmasked")),
    ("Sysctls", _of_pod(sysctls=[{"name": "kernel.msgmax", "value": "1"}])),
    ("Privilege Escalation", _own(allowPrivilegeEscalation=True)),
    ("Privilege Escalation", lambda pod: pod["containers"][0]["securityContext"].pop("allowPrivilegeEscalation")),
    ("Running as Non-root", lambda pod: pod["securityContext"].pop("runAsNonRoot")),
    ("Running as Non-root", _own(runAsNonRoot=False)),
    ("Running as Non-root user", _own(runAsUser=0)),
    ("Seccomp", lambda pod: pod["securityContext"].pop("seccompProfile")),
    ("Seccomp", _own(seccompProfile={"type": "Unconfined"})),
]


@pytest.mark.parametrize(("control", "change"), BREAKS, ids=[control for control, _ in BREAKS])
def test_each_control_refuses_what_breaks_it(control: str, change: Callable[[Pod], Any]) -> None:
    pod = pods(documents(kubernetes.manifest(job()))[1])["Worker"]
    (good,) = copy.deepcopy(pod["containers"])
    change(pod)
    assert refused(pod) == [control]
    (changed,) = pod["containers"]
    if changed != good:  # also where it is not the first one
        assert refused({**pod, "containers": [good], "initContainers": [changed]}) == [control]


def test_every_control_has_a_pod_that_breaks_it() -> None:
    assert {control for control, _ in BREAKS} == RESTRICTED.keys()
