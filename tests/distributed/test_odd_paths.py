"""A job on two hosts whose working folder has a name that means something to shells, and files that do to Python."""

import sys
from pathlib import Path

import pytest
from conftest import BIN, rank_environment
from hosts import Hosts, no_space
from jobs import summary, tiny, write_corpus

pytestmark = pytest.mark.distributed

NUM_HOSTS = 2
ODD = """a b&c;d'e"f$HOME(g)*`h`\\i"""


@pytest.mark.parametrize("how", ["gloo", pytest.param("mpi", marks=[no_space, pytest.mark.slow])])
def test_a_folder_of_odd_names(hosts: Hosts, tmp_path: Path, how: str) -> None:
    folder = tmp_path / ODD
    write_corpus(folder / "text", train=4000)
    words = [*tiny(folder / "text"), "output_dir=run", "training.max_steps=2", "training.epochs=9"]
    if sys.version_info >= (3, 11):  # else Python takes them for its own
        for name in ("json", "socket", "horovod", "psutil", "torch"):
            (folder / f"{name}.py").write_text("raise SystemExit('imported from the working folder')")
    launch = [BIN / "hvd-transformer", "launch", "-np", "2", "-H", "h1:1,h2:1", f"--{how}", "--timeline", folder / "t"]
    done = hosts.run("h1", [*launch, "--", *words], cwd=folder, env=rank_environment(), timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert summary(folder / "run")["world"] == 2
    assert [log.name for log in sorted((folder / "run" / "logs").glob("rank-*.log"))] == [
        "rank-000.log",
        "rank-001.log",
    ]
    assert (folder / "t").stat().st_size > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [ODD]
