"""What make runs, with stand-ins for Python and for the Horovod build, in a folder whose name has a space."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY

# Writes its arguments down, makes the virtual environment when asked to, and fails where the file `fails` says so.
PYTHON = """#!/bin/sh
echo "python $*" >>log
[ "$2" != venv ] || { mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }
case "$*" in *"$(cat fails)"*) exit 1 ;; esac
"""
BUILD = """#!/bin/sh
if [ "$1" = --check ]; then
    echo "check $2" >>log
    case "check" in *"$(cat fails)"*) exit 1 ;; esac
    exit 0
fi
case "a build" in *"$(cat fails)"*) exit 1 ;; esac
operations=${HOROVOD_GPU_OPERATIONS:-CPUs}
echo "horovod for $operations" >>log
mkdir -p "kept wheels/$operations" && echo "$operations" >"kept wheels/$operations/horovod.whl"
echo "kept wheels/$operations/horovod.whl"
"""


class Checkout:
    """A folder with the Makefile and what it depends on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "docker").mkdir(parents=True)
        for name in ("Makefile", "setup.cfg", "constraints.txt"):
            shutil.copy(REPOSITORY / name, folder)
        if (patches := REPOSITORY / "docker" / "patches").is_dir():
            shutil.copytree(patches, folder / "docker" / "patches")
        (folder / "docker" / "build_horovod.sh").write_text(BUILD)
        (folder / "python").write_text(PYTHON)
        (folder / "python").chmod(0o755)
        (folder / "fails").write_text("nothing fails")

    def make(self, target: str, **variables: str) -> tuple[int, list[str]]:
        """The exit code, and what was run."""
        (self.folder / "log").write_text("")
        others = ("HOROVOD_", "MAKE", "PYTEST_ARGS")
        clean = {key: value for key, value in os.environ.items() if not key.startswith(others)}
        done = subprocess.run(
            ["make", "--silent", "PYTHON=./python", target],
            cwd=self.folder, env={**clean, **variables}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        return done.returncode, (self.folder / "log").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


def test_install_runs_once(checkout: Checkout) -> None:
    code, ran = checkout.make("install")
    assert code == 0
    assert ran[:2] == ["check ./python", "python -m venv .venv"]
    assert "horovod for CPUs" in ran
    assert ran[-1].endswith("--force-reinstall kept wheels/CPUs/horovod.whl")
    assert checkout.make("install") == (0, [])
    os.utime(checkout.folder / "setup.cfg", (2**32, 2**32))
    assert checkout.make("install")[1] == ran


def test_other_gpu_operations_are_another_installation(checkout: Checkout) -> None:
    assert "horovod for CPUs" in checkout.make("install")[1]
    assert "horovod for NCCL" in checkout.make("install", HOROVOD_GPU_OPERATIONS="NCCL")[1]
    assert checkout.make("install", HOROVOD_GPU_OPERATIONS="NCCL") == (0, [])
    assert checkout.make("install") == (0, [])  # not set: as it is
    os.utime(checkout.folder / "setup.cfg", (2**32, 2**32))
    assert "horovod for NCCL" in checkout.make("install")[1]
    assert "horovod for CPUs" in checkout.make("install", HOROVOD_GPU_OPERATIONS="")[1]


def test_what_a_build_lacks_is_told_before_anything_is_made(checkout: Checkout) -> None:
    (checkout.folder / "fails").write_text("check")
    assert checkout.make("install") == (2, ["check ./python"])
    assert not (checkout.folder / ".venv").exists()


def test_a_build_that_fails_is_not_followed_by_an_installation(checkout: Checkout) -> None:
    (checkout.folder / "fails").write_text("a build")
    code, ran = checkout.make("install")
    assert code == 2
    assert not any("--force-reinstall" in line for line in ran)


def test_an_installation_that_failed_is_tried_again(checkout: Checkout) -> None:
    checkout.make("install")
    (checkout.folder / "fails").write_text("--force-reinstall")
    assert checkout.make("install", HOROVOD_GPU_OPERATIONS="NCCL")[0] == 2
    (checkout.folder / "fails").write_text("nothing fails")
    assert "horovod for NCCL" in checkout.make("install", HOROVOD_GPU_OPERATIONS="NCCL")[1]


@pytest.mark.parametrize(("failing", "code"), [("nothing fails", 0), ("-m not distributed", 2), ("-m distributed", 2)])
def test_both_halves_of_the_tests_run_and_either_fails_the_whole(checkout: Checkout, failing: str, code: int) -> None:
    checkout.make("install")
    (checkout.folder / "fails").write_text(failing)
    found, ran = checkout.make("test")
    assert found == code
    assert [line.split(" -m ")[2].split(" -")[0] for line in ran] == [
        "not distributed and not slow", "distributed and not slow"
    ]  # fmt: skip


def test_all_tests_leave_nothing_out(checkout: Checkout) -> None:
    checkout.make("install")
    code, ran = checkout.make("test-all")
    assert code == 0
    assert [line.split(" -m ")[2].split(" -")[0] for line in ran if "distributed" in line] == [
        "not distributed",
        "distributed",
    ]
    assert any("tests/docker" in line for line in ran)


def test_gpu_tests_find_what_the_caller_has_added(checkout: Checkout) -> None:
    (checkout.folder / "python").write_text('#!/bin/sh\necho "$PYTHONPATH $*" >>log\n')
    assert checkout.make("test-gpu", PYTHONPATH="/more") == (0, [".:/more -m pytest -m gpu tests/gpu"])
    assert checkout.make("test-gpu", PYTHONPATH="") == (0, [". -m pytest -m gpu tests/gpu"])


def test_the_package_is_built_and_checked(checkout: Checkout) -> None:
    checkout.make("install")
    dist = checkout.folder / "dist"
    dist.mkdir()
    for name in ("hvd_transformer-0.0.1.tar.gz", "horovod.whl"):
        (dist / name).touch()
    code, ran = checkout.make("dist")
    assert code == 0
    assert [line.split()[2] for line in ran] == ["build", "twine"]
    assert [path.name for path in dist.iterdir()] == ["horovod.whl"]  # no old sdist that twine would check, too
    (checkout.folder / "fails").write_text("twine")
    assert checkout.make("dist")[0] == 2


@pytest.mark.parametrize(("installed", "operations", "built"), [
    ("", None, ["CPUs"]), ("", "", ["CPUs"]), ("", "NCCL", ["CPUs", "NCCL"]), ("NCCL", None, ["CPUs", "NCCL"]),
])  # fmt: skip
def test_horovod_wheels_are_built_beside_the_one_that_is_installed(
    checkout: Checkout, installed: str, operations: str | None, built: list[str]
) -> None:
    checkout.make("install", HOROVOD_GPU_OPERATIONS=installed)
    variables = {} if operations is None else {"HOROVOD_GPU_OPERATIONS": operations}
    code, ran = checkout.make("horovod-wheels", **variables)
    assert code == 0
    found = sorted(checkout.folder.glob("dist/*/horovod.whl"))
    assert [(path.parent.name, path.read_text().strip()) for path in found] == [(name, name) for name in built]
    looked_at = [f"python -m auditwheel show dist/{name}/horovod.whl" for name in built]
    assert [line for line in ran if line.startswith("python")] == looked_at  # nothing is installed
    assert (checkout.folder / ".venv" / "installed").read_text().strip() == installed


@pytest.mark.parametrize("failing", ["auditwheel", "horovod"])
def test_a_horovod_wheel_that_fails_is_not_passed_over(checkout: Checkout, failing: str) -> None:
    checkout.make("install")
    if failing == "horovod":
        (checkout.folder / "docker" / "build_horovod.sh").write_text(BUILD + "[ $operations = NCCL ]\n")
        os.utime(checkout.folder / "docker" / "build_horovod.sh", (0, 0))  # .venv is up to date
    (checkout.folder / "fails").write_text("auditwheel show dist/CPUs" if failing == "auditwheel" else "nothing fails")
    code, ran = checkout.make("horovod-wheels", HOROVOD_GPU_OPERATIONS="NCCL")
    assert code == 2
    assert [line for line in ran if line.startswith("horovod")] == ["horovod for CPUs"]
