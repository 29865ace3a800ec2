"""Jobs that the service sends to a real Slurm: followed to their end, cancelled in mid-run, stopped at their limit."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import slurm_cluster
from hosts import Hosts
from jobs import summary, tiny, write_corpus
from service_process import ServiceProcess
from slurm_cluster import SlurmCluster

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

NUM_HOSTS = 3  # the last one has the controller; the service is on h1 and has no hosts of its own
PACED = ["task=paced:PacedTask", "training.epochs=100000", "training.eval_every=1000000", "checkpoint.every_steps=none"]


@pytest.fixture(scope="module", autouse=True)
def slurm() -> None:
    if reason := slurm_cluster.missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(hosts: Hosts) -> Iterator[SlurmCluster]:
    with SlurmCluster(hosts) as made:
        yield made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=20_000)


@pytest.fixture
def service(
    hosts: Hosts, cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceProcess]:
    monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "etc-h1" / "slurm.conf"))
    with closing(ServiceProcess(hosts, tmp_path, "", "--engine", "slurm")) as made:
        yield made


def send(service: ServiceProcess, *options: object) -> int:
    """A job of two ranks on two nodes."""
    two_nodes = ("-np", 2, "-H", "a:1,b:1", "--sbatch=--cpus-per-task=1", "--sbatch=--exclusive")
    (number,) = service.submit("--engine", "slurm", *two_nodes, *options)
    return number


def test_a_job_ends_and_the_next_one_is_cancelled_and_saves(
    cluster: SlurmCluster, corpus: Path, service: ServiceProcess
) -> None:
    """The second waits in Slurm for the nodes of the first. The service is killed meanwhile; nothing starts twice."""
    first = send(service, "--name", "first", "--", *tiny(corpus), *PACED, "training.max_steps=30")
    second = send(service, "--name", "second", "--", *tiny(corpus), *PACED, "training.max_steps=100000")
    service.wait_for_state(first, "RUNNING")
    service.wait_for(lambda: service.job(second)["reason"] == "Slurm job 2: Resources")
    assert service.job(second)["state"] == "STARTING"
    assert service.job(first)["reason"] == "Slurm job 1 on h[1-2]"
    service.kill()
    service.restart()
    assert "SUCCEEDED" in service.command("wait", first, timeout=240)
    run = Path(service.job(first)["output_dir"])
    assert [summary(run)[key] for key in ("status", "world", "steps")] == ["finished", 2, 30]
    assert f"rank 0: run directory: {run}" in service.command("logs", first)

    service.wait_for(lambda: service.step(second) >= 3)
    service.command("cancel", second)
    service.wait_for_state(second, "CANCELLED")
    stopped = summary(Path(service.job(second)["output_dir"]))
    assert stopped["status"] == "stopped" and stopped["steps"] >= 3
    (attempt,) = service.job(second)["attempts"]
    assert (attempt["external"], attempt["code"]) == ("2", 1)
    assert cluster.said("squeue", "--noheader") == ""

    service.command("retry", second)
    service.wait_for(lambda: service.step(second) > stopped["steps"])
    service.command("cancel", "--now", second)
    service.wait_for_state(second, "CANCELLED")
    assert len(service.job(second)["attempts"]) == 2


def test_what_slurm_refuses_fails_and_what_it_says_is_told(
    cluster: SlurmCluster, corpus: Path, service: ServiceProcess
) -> None:
    refused = send(service, "--sbatch=--partition=nowhere", "--", *tiny(corpus))
    service.wait_for_state(refused, "FAILED")
    job = service.job(refused)
    assert "Invalid partition name specified" in job["reason"]
    assert job["attempts"][0]["code"] == 2 and len(job["attempts"]) == 1
    wrong = service.command("submit", "--engine", "slurm", "--sbatch=--array=1-3", "--", *tiny(corpus), code=2)
    assert "--sbatch --array=1-3: must be one of --account" in wrong


def test_a_job_saves_at_its_time_limit(corpus: Path, service: ServiceProcess) -> None:
    """Slurm sends its signal at the limit, to the minute, and kills the job only when it has had time to save."""
    number = send(service, "--time-limit", "5s", "--", *tiny(corpus), *PACED, "training.max_steps=100000")
    service.wait_for_state(number, "FAILED", seconds=300)
    job = service.job(number)
    assert job["reason"] == "reached its time limit of 5 s"
    assert summary(Path(job["output_dir"]))["status"] == "stopped"
    assert json.loads(service.command("queue", "--json"))["jobs"] == []
