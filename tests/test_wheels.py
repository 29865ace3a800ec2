"""The two wheels on a host without a compiler: pip installs them, and two ranks train."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|cc|c\+\+|c89|c99|clang|clang\+\+|tcc|cpp|as|ld|nvcc)([-.].*)?|ccache")
OWN = ("PYTHON", "VIRTUAL_ENV", "HOROVOD_", "PYTEST_", "CC", "CXX", "LD_")


def programs(folder: Path) -> Path:
    """Links to the system's programs, compilers excepted."""
    folder.mkdir()
    for program in [*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()]:
        link = folder / program.name
        if not COMPILERS.fullmatch(program.name) and not link.is_symlink():
            link.symlink_to(program)
    assert shutil.which("bash", path=folder)
    assert not any(shutil.which(name, path=folder) for name in ("gcc", "cc", "g++", "c++", "clang++", "ld"))
    return folder


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_train_where_the_wheels_are_installed_and_no_compiler_is(tmp_path: Path) -> None:
    def run(*words: object, **variables: str) -> str:
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment | variables, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    environment = dict(os.environ)
    sources, wheels, venv = tmp_path / "sources", tmp_path / "wheels", tmp_path / "venv"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "hvd_transformer", sources / "hvd_transformer", ignore=ignored)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.cfg"):
        shutil.copy(REPOSITORY / name, sources)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", wheels, sources)
    (package,) = wheels.iterdir()
    horovod = run("bash", REPOSITORY / "docker" / "build_horovod.sh", sys.executable).strip()

    environment = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    environment["PATH"] = f"{venv / 'bin'}:{programs(tmp_path / 'programs')}"
    run(sys.executable, "-m", "venv", venv)
    run(venv / "bin" / "pip", "install", "-c", REPOSITORY / "constraints.txt", f"{package}[distributed]")
    run(venv / "bin" / "pip", "install", "--no-deps", horovod)
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    horovodrun = [venv / "bin" / "horovodrun", "-np", "2", "-H", "localhost:2", "--gloo"]
    # A cache of its own: in the user's there may be kernels that were compiled before.
    words = ["--preset", "tiny", "training.compile=true", "output_dir=run", f"data.cache_dir={tmp_path / 'data'}"]
    shown = run(*horovodrun, "hvd-train", *words, **variables)
    assert "training.compile: off, rank 0: there is no C++ compiler (g++)" in shown
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["world"], summary["steps"]) == ("finished", 2, 20)
