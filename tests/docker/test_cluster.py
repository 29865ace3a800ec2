"""The cluster of docker/compose.yaml on a real engine, from an image built from docker/Dockerfile.cpu.

`make test-docker` alone runs this file: its first run compiles Horovod in the image.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from conftest import REPOSITORY
from containers import write_secret
from engine import IMAGE, Engine, engine
from job_files import TWO_HOSTS, documents, pods, written

from hvd_transformer.launch.scheduler.scheduled_job import LAUNCHER_KEY

COMPOSE = yaml.safe_load((REPOSITORY / "docker" / "compose.yaml").read_text(encoding="utf-8"))
SMALL = ["model.num_layers=1", "model.d_model=32", "model.num_heads=2", "model.d_feedforward=64"]
SMALL += ["data.tokenizer=char", "data.sequence_length=32", "training.log_every=1"]
SMALL += ["output_dir=runs/small"]
STEPS = 1000

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine that has the image."""
    with engine() as found:
        found.build(tmp_path_factory.mktemp("image"))
        yield found


class Cluster:
    """A compose project: the services of compose.yaml with the tests' image and a small job."""

    def __init__(self, docker: Engine, folder: Path, num_steps: int, every_steps: str = "50") -> None:
        self.docker, self._name = docker, f"hvd-test-{uuid4().hex[:8]}"
        services = {name: {**service, "image": IMAGE} for name, service in COMPOSE["services"].items()}
        for service in services.values():
            del service["build"]
        settings = [*SMALL, f"training.max_steps={num_steps}", f"checkpoint.every_steps={every_steps}"]
        self._launcher_command = [*services["launcher"]["command"], *settings]
        services["launcher"]["command"] = self._launcher_command
        file = folder / "compose.yaml"
        file.write_text(yaml.safe_dump({"services": services, "volumes": COMPOSE["volumes"]}), encoding="utf-8")
        self._words = [*docker.compose(), "-p", self._name, "-f", str(file)]

    def __call__(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.docker.run(*self._words, *words, check=check, timeout=600)

    def read(self, file: str) -> str:
        """A file of the run; nothing where it is not there yet."""
        words = ["docker", "run", "--rm", "--network", "none", "-v", f"{self._name}_runs:/work/runs", IMAGE]
        return self.docker.run(*words, "cat", f"runs/small/{file}", check=False).stdout

    def train(self, *options: str) -> "subprocess.Popen[str]":
        """The workers, then the launcher with more options for `launch`."""
        self("up", "--detach", "worker-1", "worker-2")
        command = self._launcher_command
        split = command.index("--")
        words = ["run", "--rm", "-T", "launcher", *command[:split], *options, *command[split:]]
        return subprocess.Popen(
            [*self._words, *words],
            env=self.docker.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def steps(self) -> list[int]:
        """The steps of the run so far."""
        lines = map(json.loads, self.read("metrics.jsonl").splitlines())
        return [line["step"] for line in lines if "loss" in line]

    def wait_for(self, condition: Callable[[], object], job: "subprocess.Popen[str]") -> None:
        while not condition():
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.2)

    def container(self, service: str) -> str:
        return self("ps", "-q", service).stdout.strip()

    def down(self) -> None:
        self("down", "--volumes", "--remove-orphans", "--timeout", "1", check=False)


@pytest.fixture
def cluster(docker: Engine, tmp_path: Path) -> Iterator[Cluster]:
    with closing_cluster(docker, tmp_path) as made:
        yield made


@contextmanager
def closing_cluster(docker: Engine, folder: Path, **options: str) -> Iterator[Cluster]:
    made = Cluster(docker, folder, STEPS, **options)
    try:
        yield made
    finally:
        made.down()


def test_one_command_trains_on_both_workers(cluster):
    done = cluster("up", "--exit-code-from", "launcher", check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    summary = json.loads(cluster.read("summary.json"))
    assert (summary["world"], summary["steps"]) == (2, STEPS)


def test_a_job_goes_on_without_a_worker_that_was_killed(cluster):
    job = cluster.train("--restarts", "3", "--min-np", "1")
    cluster.wait_for(lambda: cluster.read("checkpoints/latest/state.json"), job)
    cluster("kill", "worker-2")
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 0, output
    summary = json.loads(cluster.read("summary.json"))
    assert (summary["world"], summary["steps"]) == (1, STEPS)
    assert cluster.steps() == list(range(1, STEPS + 1))


def test_a_worker_that_is_stopped_saves_before_it_ends(docker, tmp_path):
    with closing_cluster(docker, tmp_path, every_steps="none") as cluster:
        job = cluster.train("--restarts", "3", "--min-np", "1")
        cluster.wait_for(cluster.steps, job)
        stopped = cluster.container("worker-2")
        cluster("stop", "worker-2")
        state = docker.run("docker", "inspect", "-f", "{{.State.ExitCode}} {{.State.OOMKilled}}", stopped).stdout
        assert state.split() == ["0", "false"]
        saved = json.loads(cluster.read("checkpoints/latest/state.json"))["position"]["step"]
        assert 1 <= saved < STEPS
        output, _ = job.communicate(timeout=600)
        assert job.returncode == 0, output
        assert "host worker-2 is about to end" in output
        assert json.loads(cluster.read("summary.json"))["world"] == 1
        assert cluster.steps() == list(range(1, STEPS + 1))


def test_a_worker_that_is_started_again_lets_its_launcher_in(cluster):
    job = cluster.train("--restarts", "3")
    cluster.wait_for(lambda: cluster.read("checkpoints/latest/state.json"), job)
    show_key = ["exec", "-T", "worker-2", "cat", "/home/trainer/.ssh/host_key.pub"]
    key = cluster(*show_key).stdout
    cluster("restart", "--timeout", "0", "worker-2")
    assert cluster(*show_key).stdout == key
    output, _ = job.communicate(timeout=600)
    assert job.returncode == 0, output
    summary = json.loads(cluster.read("summary.json"))
    assert (summary["world"], summary["steps"]) == (2, STEPS)


def test_a_worker_runs_as_the_pods_of_an_mpijob_do(docker, tmp_path):
    """Their user, no capabilities, and the operator's keys; tests/distributed/test_pods.py trains so."""
    specs = pods(documents(written("kubernetes", *TWO_HOSTS))[1])
    write_secret(tmp_path / "secret")
    tmp_path.chmod(0o755)
    (pod,) = {json.dumps(pod["securityContext"]) for pod in specs.values()}
    user = json.loads(pod)["runAsUser"]
    words = [
        "--user",
        f"{user}:{user}",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
        "--network",
        "none",
    ]
    words += ["-v", f"{tmp_path}/secret:{LAUNCHER_KEY}:ro"]
    name = docker.run(
        "docker", "run", "--detach", *words, IMAGE, *specs["Worker"]["containers"][0]["args"]
    ).stdout.strip()
    try:
        login = ["ssh", "-o", "StrictHostKeyChecking=accept-new", "-i", f"{LAUNCHER_KEY}/id_rsa", "localhost"]
        look = [*login, "grep -E '^(Uid|Cap|NoNewPrivs|Seccomp:)' /proc/self/status"]
        for _ in range(100):
            seen = docker.run("docker", "exec", name, *look, check=False)
            if seen.returncode == 0:
                break
            time.sleep(0.1)
        status = dict(line.split(":", 1) for line in seen.stdout.splitlines())
        assert set(status.pop("Uid").split()) == {str(user)}, seen.stderr
        assert (status.pop("NoNewPrivs").strip(), status.pop("Seccomp").strip()) == ("1", "2")
        assert {value.strip() for value in status.values()} == {"0" * 16}
        docker.run("docker", "stop", "--time", "30", name)
        assert docker.run("docker", "inspect", "-f", "{{.State.ExitCode}}", name).stdout.strip() == "0"
    finally:
        docker.run("docker", "rm", "--force", name)


def test_a_worker_lets_in_the_launcher_alone_and_says_that_it_is_healthy(cluster):
    cluster("up", "--detach", "worker-1", "worker-2")
    login = ["ssh", "-o", "StrictHostKeyChecking=accept-new", "worker-2", "id", "-un"]
    told = cluster("run", "--rm", "-T", "launcher", *login)
    assert told.stdout.strip() == "trainer"
    refused = cluster("exec", "-T", "worker-1", *login, check=False)
    assert refused.returncode == 255
    assert "Permission denied (publickey)" in refused.stderr
    for _ in range(30):
        container = cluster.container("worker-1")
        health = cluster.docker.run("docker", "inspect", "-f", "{{.State.Health.Status}}", container).stdout.strip()
        if health != "starting":
            break
        time.sleep(1)
    assert health == "healthy"
    assert cluster("run", "--rm", "-T", "launcher", "entrypoint", "health", check=False).returncode == 1


def test_a_host_that_does_not_answer_is_named(docker):
    words = ["docker", "run", "--rm", "--network", "none", "-e", "HOSTS=nobody:1", IMAGE, "launcher", "true"]
    done = docker.run(*words, check=False)
    assert done.returncode == 1
    assert "nobody" in done.stderr.splitlines()[-1]


def test_the_image_has_no_key_no_compiler_and_no_root(docker):
    look = "id -u; find /etc/ssh /home /root /keys -name '*_key' -o -name 'id_*'; command -v gcc g++ cmake"
    done = docker.run("docker", "run", "--rm", "--network", "none", IMAGE, "sh", "-c", look, check=False)
    assert done.stdout.split() == ["1000"]
