"""The service with real launchers and ranks, on two hosts of network namespaces with a real sshd each."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hosts import Hosts
from jobs import summary, tiny, write_corpus
from service_process import ServiceProcess

pytestmark = pytest.mark.distributed

NUM_HOSTS = 2
STEPS = 400  # at 200 ms each: more than preemption takes, as a job that is about to end is not stopped


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=20_000)


@pytest.fixture
def service(hosts: Hosts, tmp_path: Path) -> Iterator[ServiceProcess]:
    with closing(ServiceProcess(hosts, tmp_path, "h1:1,h2:1")) as made:
        yield made


def settings(corpus: Path, steps: int, *more: str) -> list[str]:
    """A job that gives way at any time; a step of `paced` takes about 200 ms."""
    return [
        *tiny(corpus), "task=paced:PacedTask", f"training.max_steps={steps}", "training.epochs=100000",
        "training.eval_every=1000000", "checkpoint.every_steps=100", *more,
    ]  # fmt: skip


def final_weights(run: Path) -> dict[str, bytes]:
    """The files of the newest checkpoint's weights; each host has its own."""
    files = {file.name: file.read_bytes() for file in (run / "checkpoints" / "latest").glob("model*.safetensors")}
    assert files
    return files


def test_preemption_loses_no_step_and_nothing_is_lost_when_the_service_is_killed(
    hosts: Hosts, corpus: Path, service: ServiceProcess
) -> None:
    """A high priority preempts a job, whose weights in the end are those of an unbroken run."""
    service.token("ben")
    (victim,) = service.submit("-np", 2, "--name", "victim", "--", *settings(corpus, STEPS))
    service.wait_for(lambda: service.step(victim) >= 5)
    (urgent,) = service.submit("-np", 2, "--name", "urgent", "--priority", 5, "--", *settings(corpus, 20), user="ben")
    service.wait_for_state(urgent, "RUNNING")
    assert service.states()[victim] == "QUEUED"
    service.kill()  # the ranks of the urgent job go on
    service.environment["HOROVOD_TEST_PACE"] = "0"
    service.restart()
    assert service.command("wait", urgent, victim, timeout=240).count("SUCCEEDED") == 2
    first, second = service.job(victim)["attempts"]
    assert first["cause"] == "preempted"
    assert first["last_step"] == second["first_step"]
    assert [len(service.job(job)["attempts"]) for job in (victim, urgent)] == [2, 1]
    unbroken = service.runs / "unbroken"
    words = ["launch", "-np", 2, "-H", "h1:1,h2:1", "--", *settings(corpus, STEPS, f"output_dir={unbroken}")]
    service.command(*words, timeout=120)
    run = Path(service.job(victim)["output_dir"])
    assert summary(run)["steps"] == summary(unbroken)["steps"] == STEPS
    assert final_weights(run) == final_weights(unbroken)


@pytest.mark.slow
def test_ten_jobs_of_mixed_size_priority_and_user(corpus: Path, service: ServiceProcess) -> None:
    """All wait for the first; then higher priorities come first, and of the same priority and usage the first one."""
    short = settings(corpus, 10)
    (first,) = service.submit("-np", 2, "--", *settings(corpus, 200))
    service.wait_for_state(first, "RUNNING")
    wanted = [
        # (priority, user, ranks), in the order in which they are to start
        (7, "ben", 2),
        (5, "ann", 2),
        (0, "ben", 2),
        (0, "cleo", 2),
        (0, "ann", 2),
        (-1, "cleo", 2),
        (-2, "ann", 2),
        (-3, "ben", 1),
        (-4, "cleo", 1),
    ]
    ids = {}
    for at in (2, 8, 3, 6, 0, 4, 7, 1, 5):
        priority, user, ranks = wanted[at]
        (ids[at],) = service.submit("-np", ranks, "--priority", priority, "--hold", "--", *short, user=user)
    for number in ids.values():
        service.command("release", number)
    service.command("wait", first, *ids.values(), timeout=400)
    began = {at: service.job(number)["attempts"][0]["began"] for at, number in ids.items()}
    order = sorted(began, key=lambda at: began[at])
    assert order[:7] == list(range(7))  # the last two need one rank each, and may be side by side
    assert {service.job(number)["owner"] for number in ids.values()} == {"ann", "ben", "cleo"}
    assert set(service.states().values()) == {"SUCCEEDED"}


@pytest.mark.slow
def test_arrays_dependencies_and_a_drained_host(corpus: Path, service: ServiceProcess) -> None:
    array = ["--array", "optimizer.lr=1e-3,3e-4", "--array", "seed=1,2", "--name", "sweep"]
    members = service.submit("-np", 1, *array, "--", *settings(corpus, 40))
    (after,) = service.submit(
        "-np", 2, *(word for job in members for word in ("--after", job)), "--", *settings(corpus, 5)
    )
    assert len(members) == 4
    service.wait_for(lambda: sum(state == "RUNNING" for state in service.states().values()) == 2)
    assert service.job(after)["reason"].startswith("waits for job")
    service.command("hosts", "drain", "h2")
    running = [job for job, state in service.states().items() if state == "RUNNING"]
    service.command("wait", *running, timeout=120)
    left = [job for job in members if job not in running]
    service.wait_for(lambda: service.states()[left[0]] == "SUCCEEDED")
    where = [part["host"] for job in left for attempt in service.job(job)["attempts"] for part in attempt["allocation"]]
    assert set(where) == {"h1"}
    service.command("hosts", "resume", "h2")
    service.command("wait", *members, after, timeout=240)
    rates = {(service.job(job)["config"]["optimizer.lr"], service.job(job)["config"]["seed"]) for job in members}
    assert rates == {(1e-3, 1), (1e-3, 2), (3e-4, 1), (3e-4, 2)}
    ends = [attempt["ended"] for job in members for attempt in service.job(job)["attempts"]]
    assert service.job(after)["attempts"][0]["began"] >= max(ends)


def test_what_is_wrong_is_refused_at_submit(corpus: Path, service: ServiceProcess) -> None:
    for words, line in (
        (["-np", 1, "--", "model.num_layer=2"], "did you mean model.num_layers?"),
        (["-np", 3, "--", *settings(corpus, 5)], "all hosts together have 2"),
        (["-np", 1, "--after", 99, "--", *settings(corpus, 5)], "99"),
    ):
        assert line in service.command("submit", *words, code=2)
    assert service.states() == {}


def test_a_second_service_on_the_same_state_is_refused(hosts: Hosts, service: ServiceProcess) -> None:
    words = ["serve", "--port", "0", "--runs", service.runs]
    assert "in use by hvd-transformer serve on host h1" in service.command(*words, code=2)
    assert service.process.poll() is None
