"""The entry point of the images as the pods of an MPIJob run it: its user, no capabilities, the operator's keys."""

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from containers import Container, Pods
from hosts import Hosts
from job_files import documents, pods, written
from jobs import state, steps, summary, tiny, write_corpus

from hvd_transformer.launch.scheduler.scheduled_job import USER_ID

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

NUM_HOSTS = 3
LAUNCHER, *WORKERS = "h1", "h2", "h3"
RUN = "/data/run"
GRACE = 60  # of the 150 s that a pod has


class Cluster:
    """A launcher and two workers from the manifest that `launch --scheduler kubernetes` writes."""

    def __init__(self, hosts: Hosts, folder: Path, max_steps: int, *options: str) -> None:
        for name in ("data", "run"):
            (folder / name).mkdir()
        write_corpus(folder / "data" / "text", train=3000)
        settings = [*tiny(Path("/corpus/text")), f"output_dir={RUN}", f"training.max_steps={max_steps}"]
        settings += ["training.epochs=1000", "checkpoint.every_steps=none"]
        words = ["-np", "2", "-H", "w1:1,w2:1", "--gloo", *options, "--", *settings]
        _, mpijob = documents(written("kubernetes", *words))
        self.specs = pods(mpijob)
        self.run = folder / "run"
        self._pods = Pods(hosts, folder, dict.fromkeys(WORKERS, 1), {"/corpus": folder / "data", RUN: self.run})
        self._hosts = hosts
        self.workers = {host: self.start_worker(host) for host in WORKERS}
        self.launcher = self._pods.start(LAUNCHER, self.specs["Launcher"])

    def start_worker(self, host: str) -> Container:
        """Starts a worker's container; returns when it is ready, as its probe sees it."""
        worker = self._pods.start(host, self.specs["Worker"])
        (container,) = self.specs["Worker"]["containers"]
        port = str(container["readinessProbe"]["tcpSocket"]["port"])
        for _ in range(300):
            if not self._hosts.run(host, ["bash", "-c", f"</dev/tcp/127.0.0.1/{port}"]).returncode:
                return worker
            assert worker.process.poll() is None, worker.text()
            time.sleep(0.1)
        raise AssertionError(worker.text())

    def host_key(self, host: str) -> str:
        """What the worker's sshd shows."""
        found = self._hosts.run(host, ["ssh-keyscan", "-p", "2222", "127.0.0.1"]).stdout
        return next(line.split(" ", 1)[1] for line in found.splitlines() if not line.startswith("#"))

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 120
        while not (self.run / "metrics.jsonl").exists() or (step,) not in steps(self.run):
            assert self.launcher.process.poll() is None and time.monotonic() < deadline, self.launcher.text()
            time.sleep(0.05)

    def close(self) -> None:
        for container in (self.launcher, *self.workers.values()):
            container.kill()


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    pytest.importorskip("horovod", reason="needs Horovod")
    made: list[Cluster] = []

    def make(max_steps: int, *options: str) -> Cluster:
        made.append(Cluster(hosts, tmp_path, max_steps, *options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rank_status(hosts: Hosts, host: str) -> dict[str, str]:
    """/proc/PID/status of the rank on a host."""
    pid = next(pid for pid, line in hosts.processes(host).items() if "hvd-train" in line and "sh -c" not in line)
    found = re.findall(r"^(\w+):\s*(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return dict(found)


def test_pods_train_as_the_user_without_privileges(hosts, cluster):
    made = cluster(400)
    made.wait_for_step(1)
    for host in WORKERS:
        status = rank_status(hosts, host)
        assert status["Uid"].split() == [str(USER_ID)] * 4
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
    assert made.launcher.wait(120) == 0, made.launcher.text()
    assert (summary(made.run)["status"], summary(made.run)["world"]) == ("finished", 2)
    for worker in made.workers.values():  # as the operator does when the launcher has ended
        worker.signal(signal.SIGTERM)
        assert worker.wait(10) == 0, worker.text()


def test_a_worker_that_is_terminated_saves_and_the_job_continues(cluster):
    made = cluster(400, "--restarts", "3", "--min-np", "1")
    made.wait_for_step(20)
    made.workers["h3"].signal(signal.SIGTERM)
    assert made.workers["h3"].wait(GRACE) == 0, made.workers["h3"].text()
    assert 20 <= state(made.run)["position"]["step"] < 400
    assert made.launcher.wait(120) == 0, made.launcher.text()
    assert "host h3 is about to end" in made.launcher.text()
    assert (summary(made.run)["status"], summary(made.run)["world"]) == ("finished", 1)
    assert [step for (step,) in steps(made.run)] == list(range(1, 401))


@pytest.mark.slow
def test_without_restarts_the_job_ends_with_its_checkpoint(cluster):
    made = cluster(100_000)
    made.wait_for_step(20)
    made.workers["h3"].signal(signal.SIGTERM)
    assert made.workers["h3"].wait(GRACE) == 0, made.workers["h3"].text()
    assert made.launcher.wait(60) not in (0, 2), made.launcher.text()
    assert state(made.run)["position"]["step"] == steps(made.run)[-1][0] >= 20  # nothing is lost
    assert made.workers["h2"].process.poll() is None


@pytest.mark.slow
def test_a_worker_that_is_started_again_lets_its_launcher_in(cluster):
    made = cluster(400, "--restarts", "3")
    key = made.host_key("h3")
    made.wait_for_step(20)
    made.workers["h3"].kill()
    made.workers["h3"] = made.start_worker("h3")
    assert made.host_key("h3") == key
    assert made.launcher.wait(200) == 0, made.launcher.text()
    assert (summary(made.run)["status"], summary(made.run)["world"]) == ("finished", 2)
    assert "restart 1 of 3" in made.launcher.text()


# Takes six seconds to end.
AGENT = """bash -c 'trap "trap : TERM; sleep 6; exit" TERM; echo; while :; do sleep 0.1; done' \
hvd_transformer.launch.node.node_agent"""


def test_an_agent_that_begins_while_the_worker_ends_is_ended_too(hosts, cluster, tmp_path):
    """That of another launcher."""
    made = cluster(100_000)
    made.launcher.kill()
    key = tmp_path / "key"
    key.write_bytes((tmp_path / "secret" / "id_rsa").read_bytes())
    key.chmod(0o600)
    login = ["ssh", "-i", key, "-p", "2222", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    with ExitStack() as stack:
        for number in range(2):
            agent = hosts.popen(
                "h2", [*login, "trainer@127.0.0.1", AGENT], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
            stack.enter_context(agent)
            stack.callback(agent.kill)
            assert agent.stdout and agent.stdout.readline() == b"\n"
            if number == 0:
                made.workers["h2"].signal(signal.SIGTERM)
        assert made.workers["h2"].wait(60) == 0, made.workers["h2"].text()
