"""From a request to jobs: with the real checking process, the real database, and hosts that are not there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_transformer.cli.train import config_of
from hvd_transformer.config import load
from hvd_transformer.config.schema import flatten
from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Host, Job, Needs, State
from hvd_transformer.service.storage.new_job import NewJob
from hvd_transformer.service.storage.store import Store
from hvd_transformer.service.submitting.checker import Checker
from hvd_transformer.service.submitting.submission import Request, prepare

HOSTS = [Host("h1", 4), Host("h2", 4)]
GPUS = [Host("h1", 4, (0, 1, 2, 3)), Host("h2", 4)]
TINY = ["--preset", "tiny"]

Submit = Callable[..., list[NewJob]]


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
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


@pytest.fixture
def submit(checker: Checker, store: Store, runs: Path, tmp_path: Path) -> Submit:
    """What a request in the folder `tmp_path` makes."""

    def prepared(*words: str, hosts: list[Host] = HOSTS, **fields: Any) -> list[NewJob]:
        request = Request(**{"folder": str(tmp_path), "words": words, **fields})
        return prepare(request, "ann", runs, hosts, checker, store, now=7.0)

    return prepared


def add(store: Store, jobs: list[NewJob]) -> list[Job]:
    found = [store.job(number) for number in store.add_jobs(jobs, None)]
    return [job for job in found if job is not None]


def refused(submit: Submit, *words: str, **fields: Any) -> str:
    with pytest.raises(UserError) as error:
        submit(*words, **fields)
    return str(error.value)


def test_a_job_with_the_defaults(submit: Submit, store: Store, runs: Path, tmp_path: Path) -> None:
    (job,) = add(store, submit(*TINY, "training.max_steps=5"))
    assert (job.name, job.owner, job.state, job.submitted) == ("tiny", "ann", State.QUEUED, 7.0)
    assert job.needs == Needs(1, 1)
    assert job.output_dir == str(runs / f"tiny-{job.id}")
    assert job.folder == str(tmp_path)
    expected = flatten(load("tiny", overrides=["training.max_steps=5", f"output_dir={job.output_dir}"]))
    assert job.config == expected
    assert flatten(config_of(job.words)) == expected
    assert "training.device=auto" not in job.words
    assert (job.array, job.code, job.tags, job.after) == (None, "", (), ())


def test_everything_that_can_be_asked_for(submit: Submit, store: Store, runs: Path, tmp_path: Path) -> None:
    (first,) = add(store, submit(*TINY))
    file = tmp_path / "values.env"
    file.write_text("A=1")
    file.chmod(0o600)
    (job,) = add(
        store,
        submit(
            *TINY, "training.global_batch_size=16", f"output_dir={runs}/deep/er", num_ranks=8, min_ranks=2,
            name="mine", priority=-3, tags=["a", "b", "a"], after=[first.id], hold=True, time_limit=60.0, max_retries=1,
            launch=["--mpi"], env_names=["A"], env_file="values.env",
        ),
    )  # fmt: skip
    assert (job.name, job.state, job.priority, job.tags, job.after) == ("mine", State.HELD, -3, ("a", "b"), (first.id,))
    assert (job.needs, job.time_limit, job.max_retries) == (Needs(8, 2), 60.0, 1)
    assert (job.launch, job.env_names, job.env_file) == (("--mpi",), ("A",), str(file))
    assert job.output_dir == str(runs / "deep" / "er")
    assert not any(value == "1" for value in job.config.values() if isinstance(value, str))  # the variable's value


def test_an_array(submit: Submit, store: Store, runs: Path) -> None:
    add(store, submit(*TINY))
    jobs = add(store, submit(*TINY, array=["optimizer.lr=1e-3,3e-4", "seed=1,2"], tags=["sweep"], name="lr"))
    first = jobs[0].id
    assert [job.name for job in jobs] == ["lr-1", "lr-2", "lr-3", "lr-4"]
    assert [job.output_dir for job in jobs] == [str(runs / f"lr-{first}" / str(n)) for n in (1, 2, 3, 4)]
    assert [(job.config["optimizer.lr"], job.config["seed"]) for job in jobs] == [
        (1e-3, 1), (1e-3, 2), (3e-4, 1), (3e-4, 2),
    ]  # fmt: skip
    assert jobs[2].tags == ("optimizer.lr=3e-4", "seed=1", "sweep")
    assert {job.array for job in jobs} == {first}
    for job in jobs:
        assert flatten(config_of(job.words)) == job.config
    (one, two) = submit(*TINY, f"output_dir={runs}/mine", array=["seed=1,2"])
    assert [one.output_dir, two.output_dir] == [f"{runs}/mine/1", f"{runs}/mine/2"]
    line = refused(submit, *TINY, array=["seed=1,no"])
    assert line.startswith("seed=no (command line): must be a valid integer")


def test_where_a_job_may_write(submit: Submit, store: Store, runs: Path, tmp_path: Path) -> None:
    inside = f"must be inside the service's runs folder, {runs}; or leave it out"
    (tmp_path / "link").symlink_to("/tmp")
    (runs / "out").symlink_to(tmp_path)
    for folder in ("elsewhere", "runs", "runs/../x", "link/x", "runs/out/x", str(tmp_path)):
        assert refused(submit, *TINY, f"output_dir={folder}").endswith(inside), folder
    (job,) = add(store, submit(*TINY, "output_dir=runs/./mine"))  # relative to the folder
    assert job.output_dir == str(runs / "mine")
    with pytest.raises(UserError, match=rf"^output_dir={runs}/mine: job {job.id} uses it, which is QUEUED; "):
        add(store, submit(*TINY, "output_dir=runs/mine"))
    (next_one,) = add(store, submit(*TINY, "output_dir=runs/mine", after=[job.id]))
    for number in (job.id, next_one.id):
        store.update(number, state=State.CANCELLED, ended=8.0)
    (last,) = add(store, submit(*TINY, "output_dir=runs/of-{id}"))
    assert last.output_dir == last.config["output_dir"] == f"{runs}/of-{last.id}"
    add(store, submit(*TINY, "output_dir=runs/mine"))


def test_a_run_directory_of_an_earlier_database_is_left_alone(submit: Submit, store: Store, runs: Path) -> None:
    (runs / "tiny-1").mkdir()
    (first,) = add(store, submit(*TINY))
    assert first.output_dir == str(runs / "tiny-1-2")
    (second,) = add(store, submit(*TINY))
    assert second.output_dir == str(runs / "tiny-2")
    (runs / "tiny-3").mkdir()
    (runs / "tiny-9-2").mkdir()
    assert submit(*TINY)[0].output_dir == str(runs / "tiny-{id}-3")


def test_a_job_that_must_not_resume(submit: Submit, runs: Path) -> None:
    (job,) = submit(*TINY, "output_dir=runs/mine", "checkpoint.resume=never")
    assert job.config["checkpoint.resume"] == "auto"  # its second attempt resumes
    assert not any("resume" in word for word in job.words)
    (runs / "mine" / "checkpoints" / "step-00000005").mkdir(parents=True)
    line = refused(submit, *TINY, "output_dir=runs/mine", "checkpoint.resume=never")
    assert line.startswith(f"checkpoint.resume=never: {runs}/mine has checkpoints, which a new run would overwrite")
    submit(*TINY, "output_dir=runs/mine")


def test_what_can_never_fit(submit: Submit) -> None:
    assert refused(submit, *TINY, num_ranks=9).startswith("-np 9: can never run: needs 9 ")
    assert refused(submit, *TINY, hosts=[]).startswith("-np 1: can never run: ")
    submit(*TINY, num_ranks=8)
    submit(*TINY, "training.global_batch_size=32", num_ranks=20, min_ranks=8)  # an elastic job that never grows so far
    line = refused(submit, *TINY, "training.device=cuda", num_ranks=1)
    assert line.startswith("-np 1: can never run: ")
    assert "GPU" in line


@pytest.mark.parametrize(
    ("words", "ranks", "hosts", "device", "gpus"),
    [
        ([], 4, HOSTS, "auto", 0),  # nobody has said what GPUs there are
        ([], 4, GPUS, "cuda", 1),
        (["parallel.pipeline=2"], 2, GPUS, "cuda", 2),
        (["parallel.pipeline=2"], 4, GPUS, "cpu", 0),  # as hvd-train does: not enough for all stages
        (["training.device=cpu"], 4, GPUS, "cpu", 0),
        (["training.device=cuda"], 4, GPUS, "cuda", 1),
    ],
)
def test_gpus(submit: Submit, words: list[str], ranks: int, hosts: list[Host], device: str, gpus: int) -> None:
    (job,) = submit(*TINY, *words, num_ranks=ranks, hosts=hosts)
    assert job.needs == Needs(ranks, ranks, 1, gpus)
    assert job.config["training.device"] == device == config_of(job.words).training.device


def test_one_replica_is_the_default_size(submit: Submit) -> None:
    (job,) = submit(*TINY, "parallel.tensor=2")
    assert job.needs == Needs(2, 2, 2)


def test_dependencies(submit: Submit, store: Store) -> None:
    assert refused(submit, *TINY, after=[1]) == "--after 1: no such job"
    (job,) = add(store, submit(*TINY))
    submit(*TINY, after=[job.id, job.id])
    store.update(job.id, state=State.CANCELLED, ended=8.0)
    assert refused(submit, *TINY, after=[job.id]) == (f"--after {job.id}: job {job.id} is CANCELLED; `retry` it first")


def test_names(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "größe 1.yaml").touch()
    (tmp_path / "mine.py").write_text("class Mine: ...")
    found = [
        submit(*words)[0].name
        for words in (TINY, [], ["--config", "größe 1.yaml"], ["task=mine:Mine"], ["task=translation"])
    ]
    assert found == ["tiny", "language_model", "gr-e-1", "Mine", "translation"]


def test_the_code_of_a_task_goes_with_the_job(submit: Submit, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...")
    jobs = submit("task=mine:Mine", array=["seed=1,2"])
    assert len({job.code for job in jobs}) == 1
    assert jobs[0].code


def test_wrong_input_gets_the_line_of_hvd_train(submit: Submit, tmp_path: Path) -> None:
    assert refused(submit, "lr=1") == "lr (command line): unknown key, did you mean optimizer.lr?"
    (tmp_path / "long.yaml").write_text(f"data: {{source: {'x' * 100_001}}}")
    assert refused(submit, "--config", "long.yaml").startswith("the configuration: longer than the")
