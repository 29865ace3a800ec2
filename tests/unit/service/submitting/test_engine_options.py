"""Jobs for Slurm and Kubernetes: what is kept of them, and what is refused when they are submitted."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from job_files import documents

from hvd_transformer.cli import engine_job
from hvd_transformer.config import Config, load
from hvd_transformer.errors import UserError
from hvd_transformer.launch.hostfile import Host
from hvd_transformer.service.jobs import Engine, Needs
from hvd_transformer.service.storage.new_job import NewJob
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting.checker import Checker
from hvd_transformer.service.submitting.submission import Request, prepare

TWO_NODES = ["-H", "a:2,b:2"]


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    made = Checker(tmp_path_factory.mktemp("code"))
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "service.db")
    yield made
    made.close()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all commands: those of Slurm and kubectl, which are never called."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "kubectl"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


class Submit:
    """Submits to a service that has no hosts."""

    def __init__(self, checker: Checker, store: Store, folder: Path) -> None:
        self._checker, self._store, self._folder = checker, store, folder

    def __call__(self, engine: str, *words: str, **fields: Any) -> list[NewJob]:
        given = {"folder": str(self._folder), "words": ["--preset", "tiny", *words], "engine": engine, **fields}
        return prepare(Request(**given), "ann", self._folder / "runs", [], self._checker, self._store)

    def refused(self, engine: str, *words: str, **fields: Any) -> str:
        with pytest.raises(UserError) as error:
            self(engine, *words, **fields)
        return str(error.value)


@pytest.fixture
def submit(checker: Checker, store: Store, commands: Path, tmp_path: Path) -> Submit:
    return Submit(checker, store, tmp_path)


def test_a_job_for_slurm(submit: Submit, store: Store, checker: Checker) -> None:
    (new,) = submit("slurm", "training.device=cuda", launch=[*TWO_NODES, "--mpi"], sbatch=["--partition=gpu"])
    (number,) = store.add_jobs([new])
    job = store.job(number)
    assert job is not None
    assert (job.engine, job.needs, job.sbatch) == (Engine.SLURM, Needs(4, 4, 1, 1), ("--partition=gpu",))
    text = checker.job_file(job, "hvd-x")
    options = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert {"--job-name=hvd-x", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2"} <= options
    assert "launch -np 4 -H" in text and " --mpi " in text and f"output_dir={job.output_dir}" in text


def test_an_elastic_job_and_one_of_one_node(submit: Submit, store: Store, checker: Checker) -> None:
    batch = "training.global_batch_size=8"
    jobs = [submit("slurm", batch, num_ranks=4, min_ranks=2)[0], submit("slurm", batch)[0]]
    elastic, single = (store.job(number) for number in store.add_jobs(jobs))
    assert elastic is not None and single is not None
    assert (elastic.needs, single.needs) == (Needs(4, 2), Needs(1, 1))
    assert " --min-np 2 " in checker.job_file(elastic, "x")
    assert " --min-np " not in checker.job_file(single, "x") and "--nodes=1" in checker.job_file(single, "x")


def test_an_array_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning a large model takes seconds, and a request has 30."""
    planned: list[int] = []

    def plan(config: Config, hosts: Sequence[Host]) -> int:
        planned.append(config.seed)
        return 2**30

    monkeypatch.setattr(engine_job, "planned_bytes", plan)
    monkeypatch.setattr(engine_job, "_PLANNED", {})
    request = {"engine": "kubernetes", "launch": ["--image", "x"], "runs": str(tmp_path), "env_names": []}
    for words in (["seed=1"], ["seed=2"], ["seed=3", "optimizer.lr=0.1"], ["seed=4", "model.d_model=384"]):
        ranks, extra = engine_job.complete(load(overrides=words), {**request, "num_ranks": 1, "min_ranks": None})
        assert (ranks, extra) == (1, ["--memory-gib", "1.00"])
    assert planned == [1, 4]


def test_a_job_for_kubernetes_keeps_the_memory_that_was_planned(submit: Submit, store: Store, checker: Checker) -> None:
    (new,) = submit("kubernetes", launch=[*TWO_NODES, "--image", "r/x"])
    assert new.launch[:-1] == (*TWO_NODES, "--image", "r/x", "--memory-gib")
    assert 0.5 < float(new.launch[-1]) < 10
    job = store.job(store.add_jobs([new])[0])
    assert job is not None
    volume, mpijob = documents(checker.job_file(job, "hvd-x"))
    assert (volume["metadata"]["name"], mpijob["metadata"]["name"]) == ("hvd-x-output", "hvd-x")


@pytest.mark.parametrize(
    ("engine", "fields", "line"),
    [
        ("slurm", {"launch": ["-H", "a:2,b:1,c:2"]}, "all hosts must have the same number of slots"),
        ("slurm", {"launch": TWO_NODES, "num_ranks": 5}, "-np 5"),
        ("slurm", {"launch": ["--image", "x"]}, "--image: only with --engine kubernetes"),
        ("slurm", {"launch": ["--hostfile", "x"]}, "--hostfile: not for a job of the service"),
        ("slurm", {"launch": ["--scheduler", "slurm"]}, "--scheduler: not for a job of the service"),
        ("slurm", {"sbatch": ["--wrap=true"]}, "--sbatch --wrap=true: must be one of --account"),
        ("slurm", {"sbatch": ["-pgpu"]}, "--sbatch -pgpu: must be one of --account"),
        ("slurm", {"sbatch": ["partition=gpu"]}, "--sbatch partition=gpu: must be one of --account"),
        ("kubernetes", {"sbatch": ["--mem=1"]}, "--sbatch --mem=1: only with --engine slurm"),
        ("kubernetes", {}, "--engine kubernetes: needs --image"),
        ("kubernetes", {"launch": ["--image", "x", "--memory-gib", "0"]}, "--memory-gib 0: must be above 0"),
        ("hosts", {"launch": TWO_NODES}, "-H: only with --engine slurm or kubernetes"),
        ("hosts", {}, "the service has no hosts"),
    ],
)
def test_what_is_refused(submit: Submit, engine: str, fields: dict[str, Any], line: str) -> None:
    assert line in submit.refused(engine, **fields)


def test_a_machine_without_the_command(submit: Submit, commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(commands))
    (commands / "squeue").unlink()
    (commands / "kubectl").unlink()
    assert submit.refused("slurm") == "--engine slurm: the service's machine has no command squeue"
    assert submit.refused("kubernetes") == "--engine kubernetes: the service's machine has no command kubectl"
