"""The memory of one step serves the next, counted in page faults in processes of their own; garbage collection."""

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvd_transformer.training.process import only_new_garbage

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

# Five times 30 blocks of 4 MiB, written and freed: 30,720 pages of 4 KiB a time if they come from the kernel anew.
PROGRAM = """
import ctypes, resource, sys
from hvd_transformer.training.process import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(4 * 2**20) for _ in range(30)]
    for block in blocks:
        ctypes.memset(block, 1, 4 * 2**20)
    for block in reversed(blocks):
        libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(word: str, **environment: str) -> tuple[str, int]:
    """(what `keep_freed_memory` answered, page faults of five steps after the first)."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM, word],
        env=clean | environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return output[0], int(output[1])


@needs_glibc
def test_freed_blocks_are_used_again() -> None:
    answer, count = faults("keep")
    assert answer == "True"
    assert count < 1_000
    assert faults("leave")[1] > 100_000  # else this test shows nothing


@needs_glibc
@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_the_users_own_settings_stand(environment: dict[str, str]) -> None:
    assert faults("keep", **environment)[0] == "False"


@pytest.fixture
def thawed() -> Iterator[None]:
    """As in a new process; conftest.py has frozen the tests' own."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def test_collections_visit_what_is_made_meanwhile_and_everything_afterwards(thawed: None) -> None:
    before = len(gc.get_objects())
    with only_new_garbage():
        assert len(gc.get_objects()) < before / 10
        loop: list[object] = []
        loop.append(loop)
        del loop
        assert gc.collect() == 1
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > before / 2


def test_a_failure_ends_it_too(thawed: None) -> None:
    with pytest.raises(KeyError), only_new_garbage():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_the_process_has_frozen_stays_so(thawed: None) -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with only_new_garbage():
        assert gc.get_freeze_count() > 0.9 * frozen
    assert gc.get_freeze_count() > 0.9 * frozen > 0
