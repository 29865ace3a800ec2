"""`hvd-transformer bench` on real ranks: rank 0 alone prints and writes, and the figures are those of all ranks."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import BIN, rank_environment
from hosts import no_space
from jobs import started, tiny, write_corpus

from hvd_transformer.planning.constants import Constants, load, save
from hvd_transformer.processor import processor_name

pytestmark = pytest.mark.distributed

NUM_HOSTS = 2
ALLREDUCE = ["bench", "allreduce", "--sizes", "1K,8M", "--seconds", "0.05"]
FILES = ["--json", "figures.json", "--constants", "constants.yaml"]


def figures(folder: Path) -> dict:
    return json.loads((folder / "figures.json").read_text(encoding="utf-8"))


def check_allreduce(folder: Path, backend: str, libraries: list[str], text: str) -> None:
    values = figures(folder)
    assert (values["ranks"], len(values["hosts"]), values["backend"]) == (2, 1, backend)
    assert [row["size"] for row in values["sizes"]] == [1 << 10, 8 << 20]
    for row in values["sizes"]:
        assert list(row["libraries"]) == libraries
        for own in row["libraries"].values():
            assert own["bus_bandwidth"] == own["algorithm_bandwidth"] == pytest.approx(row["size"] / own["seconds"])
    constants = load(str(folder / "constants.yaml"))
    assert constants.links[backend]["host"].latency == values["sizes"][0]["libraries"]["ours"]["seconds"] / 2
    assert text.count("busbw") == len(libraries) + 1  # once: rank 0's; and in the line of units


def test_allreduce_over_gloo(world, tmp_path):
    name = f"{processor_name(torch.device('cpu'))}, 1 thread"
    known = {"device": name, "matmul": {"fp32": {64: 1.0}}, "memory_bandwidth": 1.0, "memory_bytes": 1}
    save(Constants.model_validate(known), tmp_path / "constants.yaml")
    done = world(2).command("hvd-transformer", *ALLREDUCE, *FILES, "--plot", "chart.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    check_allreduce(tmp_path, "gloo", ["ours", "torch gloo"], done.stdout)
    assert "raw MPI: left out, as the ranks run over gloo; start them with --mpi" in done.stdout
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    assert load(str(tmp_path / "constants.yaml")).matmul == known["matmul"]  # not measured again


def bench(world, folder: Path, *words: object) -> dict:
    done = world(2).command("hvd-transformer", "bench", *words, "--seconds", "0.1", *FILES[:2], folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("figures: figures.json") == 1
    values = figures(folder)
    assert (values["bench"], values["ranks"]) == (words[0], 2)
    return values


def test_training(world, tmp_path):
    values = bench(world, tmp_path, "train", "--vocab-size", "40", *FILES[2:], *tiny(tmp_path / "text"))
    assert values["targets_per_second"] == pytest.approx(2 * 8 * 12 / values["step_seconds"])
    assert values["parts"]["wait"] > 0 and values["step_seconds_without_communication"] > 0
    found = load(str(tmp_path / "constants.yaml"))
    assert found.jitter > 0 and 0 < found.training_fraction["fp32"] <= 1


@pytest.mark.slow
def test_checkpoints_and_data(world, tmp_path):
    words = tiny(write_corpus(tmp_path / "text", 4000))
    saved = bench(world, tmp_path, "checkpoint", "--vocab-size", "40", *words, "parallel.optimizer_shard=state")
    assert 0 < saved["stall"] < saved["save"]
    assert bench(world, tmp_path, "data", *words)["num_tokens"] == 4000 + 150 + 90
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "figures.json", "text"]


def test_what_one_rank_cannot_do_all_ranks_learn(world, tmp_path):
    words = ["bench", "checkpoint", "--vocab-size", "40", *tiny(tmp_path)]
    missing = [*words, "--folder", tmp_path / "absent"]
    done = world(2).commands(["hvd-transformer", *words], ["hvd-transformer", *missing])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "rank 1: --folder" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_allreduce_under_the_launcher(tmp_path, monkeypatch, backend):
    monkeypatch.chdir(tmp_path)
    launch = [BIN / "hvd-transformer", "launch", f"--{backend}", "-np", "2", "-H", "localhost:2", "--"]
    with started(1, [*launch, *ALLREDUCE, *FILES], "", tmp_path / "output") as job:
        assert job.wait(120) == 0, job.text()
    libraries = ["ours", *(["raw MPI"] if backend == "mpi" else []), "torch gloo"]
    check_allreduce(tmp_path, backend, libraries, job.text())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", pytest.param("mpi", marks=no_space)])
def test_allreduce_between_two_hosts(hosts, tmp_path, backend):
    """torch finds its peers on the hosts' own network, and the link is one between hosts."""
    launch = [BIN / "hvd-transformer", "launch", "-np", "2", "-H", "h1:1,h2:1", f"--{backend}", "--"]
    files = ["--json", tmp_path / "figures.json", "--constants", tmp_path / "constants.yaml"]
    with (tmp_path / "output").open("wb") as file:
        words = [*launch, *ALLREDUCE, *files]
        process = hosts.popen("h1", words, env=rank_environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        assert process.wait(120) == 0, (tmp_path / "output").read_text()
    values = figures(tmp_path)
    assert values["hosts"] == ["h1", "h2"]
    assert all("torch gloo" in row["libraries"] for row in values["sizes"])
    assert load(str(tmp_path / "constants.yaml")).links[backend].keys() == {"network"}
