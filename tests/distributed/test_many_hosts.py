"""Jobs of many hosts and many ranks: simulated hosts with ranks that only sleep, real hosts and real ranks.

MANY_RANKS=1 also trains on 64 real ranks on 16 hosts, which takes 14 GB of memory.
"""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, rank_environment
from hosts import Hosts, missing, no_space
from jobs import steps, summary, tiny, write_corpus
from worlds import Worlds

from benchmarks.launch_hosts import hosts as launch_on

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]
SMALL = {"MALLOC_ARENA_MAX": "1"}


@pytest.mark.parametrize(("number", "slots"), [(3, 2), pytest.param(128, 8, marks=pytest.mark.slow)])
def test_simulated_hosts_start_lose_one_and_end_with_one_ssh_each(number: int, slots: int) -> None:
    if reason := missing():
        pytest.skip(reason)
    costs = launch_on(number, slots, run_seconds=2.0)
    print(costs)
    assert costs["exit code"] == 0
    assert costs["starts"] == 2
    assert sum(costs[f"{phase}: ssh"] for phase in ("preflight", "start", "running", "restart")) == number
    # Once a second from each host, with the heartbeats of all its ranks.
    assert costs["running: messages"] <= number * (costs["running: s"] + 1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=60_000)


def settings(corpus: Path, run: Path, num_ranks: int) -> list[str]:
    """The same global batch and learning rate on any number of ranks; 192 is a multiple of 2, 8, 16, 24 and 64."""
    return [
        *tiny(corpus), f"output_dir={run}", "training.max_steps=5", "training.precision=fp64",
        "training.global_batch_size=192", f"training.batch_size={min(8, 192 // num_ranks)}",
        "optimizer.lr_scaling=none",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(world: Worlds, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    run = tmp_path_factory.mktemp("two") / "run"
    world(2).train(settings(corpus, run, 2))
    return losses(run)


def losses(run: Path) -> list[float]:
    return [loss for _, loss in steps(run, "loss")]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=no_space)])
@pytest.mark.parametrize("num_ranks", [8, 16, 24])
def test_many_ranks_learn_as_two_do(
    two_ranks: list[float], corpus: Path, tmp_path: Path, num_ranks: int, backend: str
) -> None:
    run = tmp_path / "run"
    words = [BIN / "hvd-transformer", "launch", "-np", str(num_ranks), f"--{backend}", "--"]
    environment = {**rank_environment(), **SMALL}
    done = subprocess.run([*words, *settings(corpus, run, num_ranks)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(run)["world"] == num_ranks
    assert losses(run) == pytest.approx(two_ranks, rel=1e-6, abs=0)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MANY_RANKS") != "1", reason="needs MANY_RANKS=1 and 14 GB of memory")
def test_64_ranks_on_16_hosts_learn_as_two_do(two_ranks: list[float], corpus: Path, tmp_path: Path) -> None:
    if reason := missing():
        pytest.skip(reason)
    run = tmp_path / "run"
    with Hosts(16) as hosts:
        names = ",".join(f"{host}:4" for host in hosts.names)
        words = [BIN / "hvd-transformer", "launch", "-H", names, "--env", "MALLOC_ARENA_MAX", "--gloo", "--"]
        environment = {**rank_environment(), **SMALL}
        more = ["training.stall_seconds=600"]  # two cores start 64 ranks
        done = hosts.run("h1", [*words, *settings(corpus, run, 64), *more], env=environment, timeout=1500)
        assert done.returncode == 0, done.stdout + done.stderr
        for host in hosts.names[1:]:
            assert (hosts.folder / f"{host}.log").read_text().count("Accepted publickey") == 1
    assert summary(run)["world"] == 64
    assert losses(run) == pytest.approx(two_ranks, rel=1e-6, abs=0)
