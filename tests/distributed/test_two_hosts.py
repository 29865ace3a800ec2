"""A job on two real hosts is the job on one, and shows no secret on either."""

import subprocess
import time
from pathlib import Path

import pytest
from conftest import BIN, rank_environment
from hosts import Hosts, no_space
from jobs import TRAIN, steps, summary, tiny, write_corpus
from worlds import Worlds

pytestmark = pytest.mark.distributed

NUM_HOSTS = 2
SECRET = "the-token-nobody-sees"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=12_000)


def settings(corpus: Path, run: Path) -> list[str]:
    return [*tiny(corpus), f"output_dir={run}", "training.max_steps=30", "training.epochs=100"]


@pytest.fixture(scope="module")
def one_host(world: Worlds, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("one") / "run"
    world(2).train(settings(corpus, run))
    return run


def logins_on(hosts: Hosts, host: str) -> int:
    return (hosts.folder / f"{host}.log").read_text().count("Accepted publickey")


ALSO = [no_space, pytest.mark.slow]


@pytest.mark.parametrize("how", ["gloo", pytest.param("mpi", marks=ALSO), pytest.param("bare horovodrun", marks=ALSO)])
def test_two_hosts_train_as_one_does(hosts: Hosts, one_host: Path, corpus: Path, tmp_path: Path, how: str) -> None:
    run, where = tmp_path / "run", ["-np", "2", "-H", "h1:1,h2:1"]
    if how == "bare horovodrun":
        command = [BIN / "horovodrun", *where, "--gloo", TRAIN]
    else:
        command = [BIN / "hvd-transformer", "launch", *where, f"--{how}", "--env", "HF_TOKEN", "--"]
    environment = {**rank_environment(), "HF_TOKEN": SECRET}
    if how == "bare horovodrun":
        del environment["HF_TOKEN"]  # it would show it
    seen: dict[str, set[str]] = {host: set() for host in hosts.names}
    logins = logins_on(hosts, "h2")
    with (tmp_path / "output").open("wb") as file:
        words = [*command, *settings(corpus, run)]
        process = hosts.popen("h1", words, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        while process.poll() is None:
            for host in hosts.names:
                seen[host] |= set(hosts.processes(host).values())
            time.sleep(0.1)
    text = (tmp_path / "output").read_text(encoding="utf-8")
    assert process.returncode == 0, text
    assert steps(run, "lr") == steps(one_host, "lr")
    found, wanted = steps(run, "loss"), steps(one_host, "loss")
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-6, abs=0)
    assert summary(run)["world"] == 2
    if how != "bare horovodrun":  # one for preflight, agent and ranks, and MPI's own
        assert logins_on(hosts, "h2") - logins == {"gloo": 1, "mpi": 2}[how]
    for host in hosts.names:
        assert any("hvd-train" in line for line in seen[host])
        assert not [line for line in seen[host] if SECRET in line]
        if how != "bare horovodrun":
            assert not [line for line in hosts.processes(host).values() if line and "sshd" not in line]
    assert SECRET not in text
