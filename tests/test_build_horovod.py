"""docker/build_horovod.sh with a stand-in for Python: what a wheel is kept for, and the CUDA that it is built with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

# Says what it is asked about torch and its environment, and has a source of Horovod. It builds nothing: it writes down
# what a build would meet, and fails.
PYTHON = """#!/bin/bash
here=$(cd "$(dirname "$0")/.." && pwd)
case "$*" in
    -) echo "torch9.9-cp399-x $(cat "$here/cuda")" ;;
    -\\ *) echo 01234567 ;;
    -c\\ import\\ glob*) compgen -G "$here/nvidia/cu[0-9]*/bin/nvcc" || true ;;
    *"pip download"*)
        for file in CMakeLists.txt horovod/torch/CMakeLists.txt horovod/common/ops/cuda/CMakeLists.txt; do
            mkdir -p "$here/sdist/horovod-0.28.1/$(dirname $file)"
            printf 'set(CMAKE_CXX_STANDARD 14)\\nset(CMAKE_CUDA_STANDARD 11)\\n' >"$here/sdist/horovod-0.28.1/$file"
        done
        mkdir -p "$here/sdist/horovod-0.28.1/cmake/Modules"
        echo 'print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)' \\
            >"$here/sdist/horovod-0.28.1/cmake/Modules/FindPytorch.cmake"
        folder=$(printf '%s\\n' "$@" | grep /sdist) && mkdir "$folder"
        tar -C "$here/sdist" -czf "$folder/horovod-0.28.1.tar.gz" horovod-0.28.1 ;;
    *"pip wheel"*)
        env >"$here/built with"
        cp -r "${@: -1}" "$here/source"
        [ -z "${HOROVOD_CUDA_HOME:-}" ] || cp -rL "$HOROVOD_CUDA_HOME" "$here/toolkit"
        exit 1 ;;
esac
"""
KEY = "horovod0.28.1-wakeup_01234567-torch9.9-cp399-x-mpi4.1.8-gpu_"


class Environment:
    """A virtual environment with the stand-in, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        programs = {"python": PYTHON, "mpicxx": "#!/bin/sh\necho Open MPI 4.1.8\n"}
        programs |= {"g++": "#!/bin/sh\n", "make": "#!/bin/sh\n"}
        for name, text in programs.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "cuda").write_text("13.0")

    def build(self, *words: str, **variables: str) -> tuple[int, str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("HOROVOD_", "CUDA_"))}
        clean["HVD_TRANSFORMER_CACHE"] = str(self.folder / "cache")
        script = ["bash", REPOSITORY / "docker" / "build_horovod.sh", *words, self.folder / "bin" / "python"]
        done = subprocess.run(script, env={**clean, **variables}, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.strip(), done.stderr

    def keep(self, key: str) -> str:
        """A wheel that was built before."""
        wheel = self.folder / "cache" / "horovod" / (KEY + key) / "horovod-1.whl"
        wheel.parent.mkdir(parents=True)
        wheel.touch()
        return str(wheel)

    def package(self, *files: str) -> None:
        for file in files:
            (self.folder / "nvidia" / file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "nvidia" / file).write_text(file)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


def test_a_wheel_is_kept_for_its_gpu_operations_and_architectures(environment: Environment) -> None:
    kept = [environment.keep(key) for key in ("none", "nccl-sm_all", "nccl-sm_80_90", "mpi-sm_80_90")]
    asked = [("", ""), ("NCCL", ""), ("NCCL", "80,90"), ("MPI", "80,90")]
    found = [environment.build(HOROVOD_GPU_OPERATIONS=a, HOROVOD_BUILD_CUDA_CC_LIST=b)[:2] for a, b in asked]
    assert found == [(0, wheel) for wheel in kept]
    assert environment.build(HOROVOD_BUILD_CUDA_CC_LIST="80,90")[:2] == (0, kept[0])  # no kernels in it
    assert environment.build(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_BUILD_CUDA_CC_LIST="90")[0] == 1


@pytest.mark.parametrize(
    ("python", "variables", "said"),
    [
        ("exit 0", {}, ""),
        ("exit 0", {"CXX": "no-such-compiler"}, "no C++ compiler 'no-such-compiler'; install g++ (C++17) or set CXX"),
        ('case "$*" in *version_info*) exit 1;; -V) echo Python 3.9.1;; esac', {}, "is Python 3.9.1; Python 3.10 or "),
        ('case "$*" in *Python.h*) exit 1;; esac', {}, "install its headers (Debian, Ubuntu: python3-dev)"),
    ],
)
def test_a_check_says_what_is_missing_and_needs_no_torch(
    environment: Environment, python: str, variables: dict[str, str], said: str
) -> None:
    (environment.folder / "bin" / "python").write_text(f"#!/bin/sh\n{python}\n")
    code, _, found = environment.build("--check", **variables)
    assert code == (1 if said else 0)
    assert said in found and found.count("\n") == (1 if said else 0)


def test_a_torch_without_cuda_is_refused_at_once(environment: Environment) -> None:
    (environment.folder / "cuda").write_text("None")
    code, _, said = environment.build(HOROVOD_GPU_OPERATIONS="NCCL")
    assert code == 1
    assert said == "horovod: HOROVOD_GPU_OPERATIONS=NCCL needs a torch with CUDA; this is torch9.9-cp399-x\n"


def test_gpu_operations_that_horovod_does_not_have_are_refused_at_once(environment: Environment) -> None:
    code, _, said = environment.build(HOROVOD_GPU_OPERATIONS="CUDA")
    assert (code, said) == (1, "horovod: HOROVOD_GPU_OPERATIONS=CUDA: must be NCCL or MPI; leave it out for CPUs\n")


@pytest.mark.parametrize(("operations", "found"), [("", "False"), ("NCCL", "True")])
def test_without_gpu_operations_no_toolkit_is_used(environment: Environment, operations: str, found: str) -> None:
    """It may lack its headers, or be of another CUDA than torch's."""
    environment.package("cu13/bin/nvcc", "cu13/nvvm/bin/cicc", "cu13/include/cuda.h", "nccl/include/nccl.h")
    environment.package("cu13/lib/libcudart.so.13", "nccl/lib/libnccl.so.2")
    assert environment.build(HOROVOD_GPU_OPERATIONS=operations)[0] == 1
    line = (environment.folder / "source" / "cmake" / "Modules" / "FindPytorch.cmake").read_text()
    program = f"torch = CUDA_HOME = type('', (), {{'version': type('', (), {{'cuda': '13.0'}})}})\n{line}"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == found


def test_the_packages_of_pip_become_a_toolkit(environment: Environment) -> None:
    environment.package("cu13/bin/nvcc", "cu13/nvvm/bin/cicc", "cu13/include/cuda.h", "nccl/include/nccl.h")
    environment.package("cu13/lib/libcudart.so.13", "cu13/lib/libcudart_static.a", "nccl/lib/libnccl.so.2")
    assert environment.build(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_BUILD_CUDA_CC_LIST="")[0] == 1
    toolkit = environment.folder / "toolkit"
    found = {str(file.relative_to(toolkit)): file.read_text() for file in toolkit.rglob("*") if file.is_file()}
    assert found == {
        "bin/nvcc": "cu13/bin/nvcc",
        "nvvm/bin/cicc": "cu13/nvvm/bin/cicc",
        "include/cuda.h": "cu13/include/cuda.h",
        "include/nccl.h": "nccl/include/nccl.h",
        "lib64/libcudart_static.a": "cu13/lib/libcudart_static.a",
        **{f"lib64/libcudart.so{end}": "cu13/lib/libcudart.so.13" for end in ("", ".13")},
        **{f"lib64/libnccl.so{end}": "nccl/lib/libnccl.so.2" for end in ("", ".2")},
    }
    variables = dict(line.split("=", 1) for line in (environment.folder / "built with").read_text().splitlines())
    assert variables["HOROVOD_NCCL_LINK"] == "shared"
    assert variables["CUDA_HOME"] == variables["HOROVOD_NCCL_HOME"] == variables["HOROVOD_CUDA_HOME"]
    assert "HOROVOD_BUILD_CUDA_CC_LIST" not in variables
    kernels = environment.folder / "source" / "horovod" / "common" / "ops" / "cuda" / "CMakeLists.txt"
    assert "set(CMAKE_CUDA_STANDARD 17)" in kernels.read_text()


def test_a_toolkit_that_is_named_is_used(environment: Environment) -> None:
    environment.package("cu13/bin/nvcc", "own/bin/nvcc")
    own = str(environment.folder / "nvidia" / "own")
    assert environment.build(HOROVOD_GPU_OPERATIONS="NCCL", HOROVOD_CUDA_HOME=own)[0] == 1
    assert (environment.folder / "toolkit" / "bin" / "nvcc").read_text() == "own/bin/nvcc"
    variables = (environment.folder / "built with").read_text().splitlines()
    assert f"CUDA_HOME={own}" in variables
    assert not [line for line in variables if line.startswith("HOROVOD_NCCL")]
