"""Fixtures that every test may use: real data, and real ranks."""

import gc
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from allowed_skips import UnexpectedSkips
from hosts import Hosts, missing
from node_agents import folders

from hvd_transformer.launch.connection.connections import HostConnections
from hvd_transformer.launch.connection.ssh import Ssh

if TYPE_CHECKING:
    from worlds import Worlds

torch.set_num_threads(1)  # the cores are shared by several tests, or by the ranks that a test starts

REPOSITORY = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

# Files of few tests, which take long.
LONG_TESTS = {
    "test_allowed_skips", "test_checkpoint_epochs", "test_crash", "test_evaluate_kept_code", "test_export_ctranslate2",
    "test_export_gguf", "test_pass_memory", "test_pretrained_translation", "test_real_queue", "test_real_service",
    "test_recipes", "test_start_up", "test_using",
}  # fmt: skip

Ranks = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("CI") == "true" and not hasattr(config, "workerinput"):  # xdist's workers report to one process
        config.pluginmanager.register(UnexpectedSkips())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the files: long tests first, then files of many tests, so that all end together."""
    if hasattr(config, "workerinput"):
        counts = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.path.stem not in LONG_TESTS, -counts[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    """Every command that runs in this process ends with a full collection; the modules and tests need no look."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The public data sets beside the checkout."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the data sets in {folder}")
    return folder


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Real hosts with sshd, as many as the test file's NUM_HOSTS."""
    if reason := missing():
        pytest.skip(reason)
    with Hosts(request.module.NUM_HOSTS) as made:
        yield made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The sums of a matrix product depend on the number of threads; stages share this process's among them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for ssh: writes its arguments there, then runs the command here, as a server's shell would."""
    commands, log = tmp_path / "bin", tmp_path / "ssh.log"
    commands.mkdir()
    script = f"""#!/bin/sh
printf '%s ' "$@" | tr '\\n' ' ' >>{log}; echo >>{log}
for last; do :; done
case "$*" in
*refused*) echo 'Permission denied (publickey).' >&2; exit 255;;
*busy*) [ $(grep -c busy {log}) -gt 2 ] || {{ echo 'kex_exchange_identification: Connection closed' >&2; exit 255; }};;
*noisy*) head -c 40000000 /dev/zero | tr '\\0' x >&2; echo >&2;;
*jumps*) sleep 60 & echo $! >{tmp_path}/jump; setsid sleep 6 & sleep 60;;
*waits*) until [ -e {tmp_path}/go ]; do sleep 0.02; done;;
esac
exec sh -c "exec $last"
"""
    (commands / "ssh").write_text(script)
    (commands / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    return log


@pytest.fixture
def connections(ssh_log: Path) -> Iterator[HostConnections]:
    with closing(HostConnections(Ssh(), dict(os.environ))) as made:
        yield made
    assert not folders(made)


def rank_environment() -> dict[str, str]:
    """One thread a rank, the venv's own commands first, and Open MPI allowed to run as root."""
    return {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PYTHONUNBUFFERED": "1",
    }


def launcher(num_ranks: int, backend: str) -> list[str]:
    """The words that start `num_ranks` ranks on this machine: backend gloo, mpi (both horovodrun) or mpirun."""
    if num_ranks == 1:
        return []
    if backend == "mpirun":
        return ["mpirun", "-np", str(num_ranks), "--oversubscribe"]
    return ["horovodrun", "-np", str(num_ranks), "-H", f"localhost:{num_ranks}", f"--{backend}"]


@pytest.fixture(scope="session")
def world() -> Iterator["Worlds"]:
    """Ranks that are there already and run many cases: world(2), world(3, "mpi"); see distributed/worlds.py."""
    pytest.importorskip("horovod", reason="needs Horovod")
    from worlds import Worlds

    with Worlds() as worlds:
        yield worlds


@pytest.fixture(scope="session")
def ranks() -> Ranks:
    """Runs a command on real ranks and returns what it printed: ranks(2, ["hvd-train", …], backend="gloo")."""
    pytest.importorskip("horovod", reason="needs Horovod")

    def run(
        num_ranks: int, command: Sequence[str | Path], backend: str = "gloo", timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        words = [*launcher(num_ranks, backend), *map(str, command)]
        if shutil.which(words[0], path=str(BIN)) is None and shutil.which(words[0]) is None:
            pytest.skip(f"needs {words[0]}")
        return subprocess.run(words, env=rank_environment(), capture_output=True, text=True, timeout=timeout)

    return run
