"""The batch script of `launch --scheduler slurm` under a real Slurm: it ends, is cancelled, is requeued."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import slurm_cluster
from conftest import BIN, rank_environment
from hosts import Hosts
from jobs import state, steps, summary, tiny, write_corpus
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.distributed

NUM_HOSTS = 4  # the last one is where users log in
STEPS = 90
# Takes its time while there is a file `slow`, and never begins while there is one `stuck`.
TASK = """
import time
from pathlib import Path

from hvd_transformer.tasks.language_model_task import LanguageModelTask

FOLDER = Path(__file__).parent
while (FOLDER / "stuck").exists():
    time.sleep(0.1)

class Paced(LanguageModelTask):
    def batch(self, *words):
        if (FOLDER / "slow").exists():
            time.sleep(1)
        return super().batch(*words)
"""


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
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=12_000)


def settings(corpus: Path) -> list[str]:
    return [
        *tiny(corpus), "task=paced:Paced", "output_dir=run", f"training.max_steps={STEPS}", "training.epochs=100",
        "training.batch_size=4", "checkpoint.every_steps=none",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(hosts: Hosts, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the same job on the same nodes, started through ssh alone."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "paced.py").write_text(TASK)
    words = ["launch", "-np", "2", "-H", "h1:1,h2:1", "--", *settings(corpus)]
    result = hosts.run("h1", [BIN / "hvd-transformer", *words], cwd=folder, env=rank_environment(), timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "run"


class BatchJob:
    """A job submitted with the script that `launch --scheduler slurm` writes, in a folder of its own."""

    def __init__(
        self,
        cluster: SlurmCluster,
        folder: Path,
        words: list[str],
        *options: str,
        launch: Sequence[str] = (),
        slow: bool = True,
    ) -> None:
        self.cluster, self.folder, self.run = cluster, folder, folder / "run"
        (folder / "paced.py").write_text(TASK)
        if slow:
            self.mark("slow")
        environment = rank_environment()
        write = [BIN / "hvd-transformer", "launch", "-np", "2", "-H", "any:1,other:1", "--scheduler", "slurm"]
        cluster.said(*write, *launch, "--output", folder, "--", *words, cwd=folder, env=environment)
        submit = ["sbatch", "--parsable", "--cpus-per-task=1", *options, "job.sbatch"]
        self.number = cluster.said(*submit, cwd=folder, env=environment)

    def mark(self, name: str, there: bool = True) -> None:
        (self.folder / name).touch() if there else (self.folder / name).unlink()

    def tell(self) -> dict[str, str]:
        return self.cluster.job(self.number)

    def text(self) -> str:
        return "".join(file.read_text(errors="replace") for file in self.folder.glob(f"*-{self.number}.log"))

    def wait(self, seconds: float, **wanted: str) -> dict[str, str]:
        """Until the job is as wanted: by key of scontrol, a pattern. Returns all that scontrol tells."""
        deadline, told = time.monotonic() + seconds, self.tell()
        while not all(re.fullmatch(pattern, told[key]) for key, pattern in wanted.items()):
            assert time.monotonic() < deadline, f"{told}\n{self.text()}\n{self.cluster.logs()}"
            time.sleep(0.1)
            told = self.tell()
        return told

    def wait_step(self, step: int, seconds: float = 60) -> None:
        self.cluster.wait(lambda: (self.run / "metrics.jsonl").exists() and self.last_step() >= step, seconds)

    def last_step(self) -> int:
        return max((step for (step,) in steps(self.run)), default=0)

    def assert_free(self) -> None:
        """No process is left on any node; mpirun's own ssh may take a moment."""
        self.cluster.wait(lambda: not any(map(self.cluster.left, self.cluster.nodes)), 5)


def test_a_job_runs_to_its_end(cluster: SlurmCluster, corpus: Path, unbroken: Path, tmp_path: Path) -> None:
    job = BatchJob(cluster, tmp_path, settings(corpus), slow=False)
    told = job.wait(60, JobState="COMPLETED|FAILED")
    assert (told["JobState"], told["ExitCode"], told["NodeList"]) == ("COMPLETED", "0:0", "h[1-2]"), job.text()
    assert [summary(job.run)[key] for key in ("status", "world", "steps")] == ["finished", 2, STEPS]
    assert state(job.run)["position"]["step"] == STEPS
    assert steps(job.run, "loss", "lr") == steps(unbroken, "loss", "lr")
    job.assert_free()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "options", "end"),
    [("--gloo", [], "CANCELLED"), ("--mpi", ["--batch", "--signal=TERM"], "FAILED")],
    ids=["every process is told", "the script is told"],
)
def test_a_cancelled_job_saves_and_is_not_queued_again(
    cluster: SlurmCluster, corpus: Path, tmp_path: Path, library: str, options: list[str], end: str
) -> None:
    job = BatchJob(cluster, tmp_path, settings(corpus), launch=[library])
    job.wait_step(3)
    cluster.said("scancel", *options, job.number)
    told = job.wait(60, JobState=end)
    assert told["Restarts"] == "0"
    assert "saving on" in job.text()
    assert summary(job.run)["status"] == "stopped", job.text()
    assert state(job.run)["position"]["step"] == job.last_step() < STEPS
    job.assert_free()


@pytest.mark.slow
def test_a_job_that_reaches_its_time_limit_goes_on_in_its_next_turn(
    cluster: SlurmCluster, corpus: Path, unbroken: Path, tmp_path: Path
) -> None:
    # Slurm looks at the limits every 30 s: this signal comes 20 to 50 s after the start.
    job = BatchJob(cluster, tmp_path, settings(corpus), "--time=1", "--signal=B:USR1@10")
    job.wait_step(3)
    job.wait(60, Restarts="1")
    job.mark("slow", there=False)
    job.wait(90, JobState="COMPLETED|FAILED")
    assert "everything is saved" in job.text()
    check_resumed(job, unbroken)


@pytest.mark.slow
def test_a_requeued_job_goes_on_where_it_was(
    cluster: SlurmCluster, corpus: Path, unbroken: Path, tmp_path: Path
) -> None:
    job = BatchJob(cluster, tmp_path, settings(corpus))
    job.wait_step(3)
    cluster.said("scontrol", "requeue", job.number)
    job.wait(60, Restarts="1")
    job.mark("slow", there=False)
    job.wait(90, JobState="COMPLETED|FAILED")
    check_resumed(job, unbroken)


def check_resumed(job: BatchJob, unbroken: Path) -> None:
    """It has ended in its second turn, with no step lost or done twice, and the losses of the unbroken run."""
    told = job.tell()
    assert (told["JobState"], told["ExitCode"], told["Restarts"]) == ("COMPLETED", "0:0", "1"), job.text()
    assert "resuming from run/checkpoints/step-" in job.text()
    assert steps(job.run, "loss", "lr") == steps(unbroken, "loss", "lr")
    assert summary(job.run)["status"] == "finished"
    job.assert_free()


@pytest.mark.slow
def test_a_cancelled_job_over_mpi_leaves_no_process(cluster: SlurmCluster, corpus: Path, tmp_path: Path) -> None:
    job = BatchJob(cluster, tmp_path, settings(corpus), launch=["--mpi"])
    job.wait_step(3)
    cluster.said("scancel", job.number)
    assert job.wait(60, JobState="CANCELLED")["Restarts"] == "0"
    job.assert_free()


@pytest.mark.slow
@pytest.mark.parametrize(("node", "others"), [("h1", "h[2-3]"), ("h2", "h[1,3]")], ids=["the launcher's", "another"])
def test_another_node_takes_over_from_one_that_fails(
    corpus: Path, unbroken: Path, tmp_path: Path, node: str, others: str
) -> None:
    with Hosts(NUM_HOSTS) as hosts, SlurmCluster(hosts, slurmd_timeout=10) as cluster:
        words = [*settings(corpus), "checkpoint.every_steps=1"]
        job = BatchJob(cluster, tmp_path, words, launch=["--restarts", "1"])
        job.wait_step(3)
        hosts.kill_host(node)
        job.wait(60, Restarts="1")
        job.mark("slow", there=False)
        job.wait(150, JobState="COMPLETED|FAILED")
        assert job.tell()["NodeList"] == others
        check_resumed(job, unbroken)


@pytest.mark.slow
def test_a_job_that_saves_nothing_is_queued_three_times(cluster: SlurmCluster, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "stuck").touch()
    job = BatchJob(cluster, tmp_path, settings(corpus))
    for turn in range(4):
        job.wait(60, JobState="RUNNING", Restarts=str(turn))
        cluster.wait(lambda: any("hvd-train" in line for line in cluster.left("h2")), 30)
        cluster.said("scancel", "--batch", "--signal=USR1", job.number)
        if turn < 3:
            job.wait(60, Restarts=str(turn + 1))
    told = job.wait(60, JobState="FAILED")
    assert told["Restarts"] == "3"
    assert job.text().count("not queued again: no new checkpoint in 3 turns") == 1
    job.assert_free()


@pytest.mark.slow
def test_a_job_that_cannot_run_keeps_its_exit_code(cluster: SlurmCluster, corpus: Path, tmp_path: Path) -> None:
    job = BatchJob(cluster, tmp_path, [*settings(corpus), f"data.source={tmp_path / 'none'}"])
    told = job.wait(60, JobState="FAILED")
    assert (told["ExitCode"], told["Restarts"]) == ("2:0", "0"), job.text()
    assert f"{tmp_path / 'none'}" in job.text()
    job.assert_free()


def test_srun_without_pmix_is_refused_in_one_line(cluster: SlurmCluster, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "paced.py").write_text(TASK)
    words = ["srun", "--nodes=2", "--ntasks=2", BIN / "hvd-train", *settings(corpus)]
    result = cluster.run(*words, cwd=tmp_path, env=rank_environment(), timeout=60)
    print(result.stdout + result.stderr)
    assert result.returncode == 2
    said = [line for line in result.stderr.splitlines() if not line.startswith("srun: ")]
    assert len(said) == 1 and "use srun --mpi=pmix" in said[0], result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_srun_with_pmix_trains(cluster: SlurmCluster, corpus: Path, unbroken: Path, tmp_path: Path) -> None:
    if reason := cluster.no_pmix():
        pytest.skip(reason)
    (tmp_path / "paced.py").write_text(TASK)
    words = ["srun", "--mpi=pmix", "--nodes=2", "--ntasks=2", BIN / "hvd-train", *settings(corpus)]
    result = cluster.run(*words, cwd=tmp_path, env=rank_environment(), timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [summary(tmp_path / "run")[key] for key in ("status", "world", "backend")] == ["finished", 2, "mpi"]
    found, wanted = steps(tmp_path / "run", "loss"), steps(unbroken, "loss")
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-6, abs=0)
