"""Hosts that do not share a folder: rank 0's has the whole checkpoint, also of what other hosts' ranks hold."""

from pathlib import Path

import pytest
from conftest import BIN, rank_environment
from hosts import Hosts, missing
from jobs import tiny, write_corpus
from safetensors.torch import load_file

from hvd_transformer.checkpoint import manifest

pytestmark = pytest.mark.distributed
LAYOUTS = [["parallel.optimizer_shard=state"], ["parallel.tensor=2", "parallel.vocab_parallel=true"]]


def near(apart: Path, together: Path) -> None:
    """Two checkpoints hold the same numbers."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        found, wanted = load_file(apart / name), load_file(together / name)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert (found[key] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), key


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.slow)],
    ids=["shared state", "shared matrices"],
)
def test_the_parts_of_a_host_with_its_own_disk_are_sent(layout: list[str]) -> None:
    if reason := missing():
        pytest.skip(reason)
    with Hosts(2, private_tmp=True) as hosts:
        corpus = write_corpus(hosts.folder / "text", train=4000)
        common = [*tiny(corpus), *layout, "training.precision=fp64", "checkpoint.every_steps=4", "training.epochs=9"]
        launch = [BIN / "hvd-transformer", "launch", "--no-preflight", "-np", "2", "--gloo"]

        def train(where: str, run: str, *words: str) -> Path:
            """What the run leaves, copied to where this process sees it."""
            command = [*launch, "-H", where, "--", *common, f"output_dir={run}", *words]
            result = hosts.run("h1", command, env=rank_environment(), timeout=120)
            assert result.returncode == 0, result.stdout + result.stderr
            copy = hosts.folder / f"{Path(run).name}-{len(words)}"
            assert hosts.run("h1", ["cp", "-r", run, copy]).returncode == 0
            return copy / "checkpoints" / "latest"

        apart = train("h1:1,h2:1", "/tmp/apart", "training.max_steps=8")
        seen = hosts.run("h2", ["find", "/tmp/apart", "-name", "*.safetensors"])
        assert seen.stdout == ""  # its own folder has logs alone
        together = train("h1:2", f"{hosts.folder}/together", "training.max_steps=8")
        manifest.verify(apart)
        near(apart, together)
        # And it goes on from there, the second host's rank too, which reads nothing itself.
        further = train("h1:1,h2:1", "/tmp/apart", "training.max_steps=12", "training.log_every=1")
        manifest.verify(further)
        assert "step-00000012" in str(further.resolve())
        longer = train("h1:2", f"{hosts.folder}/together", "training.max_steps=12", "training.log_every=1")
        near(further, longer)
