"""Has glibc keep the memory of one training step for the next.

By itself it returns the free end of the heap to the kernel whenever that is large, and the next step gets the same
memory back as zeroed pages, one page fault per 4 KiB: up to a twentieth of a step on the CPU, more on one rank than on
another, and all wait for the slowest (benchmarks/RESULTS.md).
"""

import ctypes
import os

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Larger blocks come from the kernel and go back to it. This is where glibc's own sliding threshold ends up.
LARGEST_KEPT_BLOCK = 32 * 2**20
# The free end of the heap may be as long as this.
KEPT_END = 2**30


def keep_freed_memory() -> bool:
    """Sets it for this process; False where the user has own settings or the C library is not glibc."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_END))
