"""What CI runs: the targets of `make`, and for a release older ones of torch and Horovod's NCCL operations."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY


def script(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("words", "ran"),
    [
        ([], ["make lint", "make docs", "make test"]),
        (["test-all"], ["make lint", "make docs", "make test-all"]),
        (["release"], ["make lint", "make docs", "make test-all", "torch_range", "nccl_build"]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_each_kind_of_run(words: list[str], ran: list[str], fails: bool, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / ".ci", tmp_path / ".ci")
    code = f'[ "$*" != "{ran[2].partition(" ")[2]}" ]' if fails else "true"
    script(tmp_path / "bin" / "make", f'echo "make $*" >> log; {code}')
    script(tmp_path / "bin" / "apt-get", "true")
    for name in ("torch_range", "nccl_build"):
        script(tmp_path / ".ci" / name, f"echo {name} >> log")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run([tmp_path / ".ci" / "run", *words], env={**os.environ, "PATH": path}, cwd="/")
    assert (tmp_path / "log").read_text().splitlines() == (ran[:3] if fails else ran)
    assert bool(done.returncode) == fails


def test_nccl_is_compiled_for_the_gpus_of_the_image() -> None:
    text = (REPOSITORY / ".ci" / "nccl_build").read_text(encoding="utf-8")
    (line,) = re.findall(r"^HOROVOD_BUILD_CUDA_CC_LIST=.*$", text, re.MULTILINE)
    words = ["bash", "-c", f'{line}; echo "$HOROVOD_BUILD_CUDA_CC_LIST"']
    found = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
    image = (REPOSITORY / "docker" / "Dockerfile.gpu").read_text(encoding="utf-8")
    assert found and f"\nARG HOROVOD_BUILD_CUDA_CC_LIST={found}\n" in image


def test_the_tests_run_with_each_older_torch_that_is_allowed() -> None:
    text = (REPOSITORY / ".ci" / "torch_range").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^versions=\(([\d. ]+)\)$", text, re.MULTILINE)
    minors = [int(version.split(".")[1]) for version in listed.split()]
    setup = (REPOSITORY / "setup.cfg").read_text(encoding="utf-8")
    ((oldest, after),) = re.findall(r"^    torch>=2\.(\d+),<2\.(\d+)$", setup, re.MULTILINE)
    assert minors == [*range(int(oldest), int(after) - 1)]  # the newest one is what `make install` installs


def test_what_is_left_out_with_an_older_torch_is_there() -> None:
    text = (REPOSITORY / ".ci" / "torch_range").read_text(encoding="utf-8")
    found = re.findall(r"^    (tests/\S+)::(\w+)$", text, re.MULTILINE)
    assert found
    for file, name in found:
        assert f"def {name}(" in (REPOSITORY / file).read_text(encoding="utf-8")
