"""Hosts whose kernels cache the pages of a shared folder, as clients of NFS do: none loses what another one wrote."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import BIN, rank_environment
from hosts import Hosts, missing
from jobs import tiny, write_corpus

from hvd_transformer.checkpoint import manifest
from hvd_transformer.checkpoint.store import MODEL, OPTIMIZER
from hvd_transformer.checkpoint.stored_tensors import StoredTensors

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
# Writes a part of a file, and sends it to the server once it may.
WRITE = """
import os, sys
file, text, start = os.open(sys.argv[1], os.O_WRONLY), sys.argv[2].encode(), int(sys.argv[3])
os.pwrite(file, text * 5000, start)
print("written", flush=True)
sys.stdin.readline()
os.fsync(file)
"""


@pytest.fixture
def caching() -> Iterator[Hosts]:
    """Two hosts with a folder `shared`, whose files are on a `server`."""
    if reason := missing():
        pytest.skip(reason)
    if shutil.which("mergerfs") is None:
        pytest.skip("needs the command mergerfs, a file system with a cache of its own")
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    with Hosts(2) as hosts:
        server, shared = hosts.folder / "server", hosts.folder / "shared"
        server.mkdir()
        shared.mkdir()
        mounted = []
        try:
            for host in hosts.names:
                options = "cache.files=full,cache.writeback=true"
                result = hosts.run(host, ["mergerfs", "-o", options, server, shared])
                assert result.returncode == 0, result.stderr
                mounted.append(host)
            yield hosts
        finally:
            for host in mounted:
                hosts.run(host, ["umount", shared])


def test_two_hosts_that_write_one_page_lose_bytes(caching: Hosts) -> None:
    """Why each host has files of its own: without this the next test could not fail."""
    file = caching.folder / "server" / "file"
    file.write_bytes(bytes(10_000))
    writers = []
    for number, host in enumerate(caching.names):
        command = [BIN / "python", "-c", WRITE, caching.folder / "shared" / "file", "ab"[number], str(5000 * number)]
        writers.append(caching.popen(host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert writers[-1].stdout.readline() == "written\n"
    for writer in writers:
        writer.communicate("\n", timeout=30)
        assert writer.returncode == 0
    assert 0 in file.read_bytes()


@pytest.mark.parametrize("layout", [[], ["parallel.optimizer_shard=state"]], ids=["replicas", "shared state"])
def test_checkpoints_of_two_hosts_are_whole(layout: list[str], caching: Hosts) -> None:
    corpus = write_corpus(caching.folder / "text", train=4000)
    settings = [*tiny(corpus), *layout, "parallel.tensor=2", "training.max_steps=8", "training.epochs=9"]
    settings += ["checkpoint.every_steps=2", "checkpoint.keep_last=9"]

    def train(run: Path, *words: str) -> None:
        launch = [BIN / "hvd-transformer", "launch", "--no-preflight", "-np", "4", "-H", "h1:2,h2:2", "--gloo", "--"]
        result = caching.run(
            "h1", [*launch, *settings, f"output_dir={run}", *words], env=rank_environment(), timeout=180
        )
        assert result.returncode == 0, result.stdout + result.stderr

    train(caching.folder / "shared" / "run")
    train(caching.folder / "plain")  # no cache between the hosts and the disk
    for step in (2, 4, 6, 8):
        found, wanted = (caching.folder / name / f"checkpoints/step-{step:08d}" for name in ("server/run", "plain"))
        assert len(list(found.glob("*.safetensors"))) == 4
        manifest.verify(found)
        for kind in (MODEL, OPTIMIZER):
            tensors, others = StoredTensors(found, kind), StoredTensors(wanted, kind)
            assert tensors.names == others.names
            assert all(torch.equal(tensors.whole(name), others.whole(name)) for name in tensors.names), (step, kind)
    train(caching.folder / "shared" / "run", "training.max_steps=10")
    assert (caching.folder / "server/run/checkpoints/step-00000010").is_dir()
