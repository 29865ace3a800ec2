"""The machine that a benchmark runs on: cores, processor, the instructions that decide its speed, load."""

import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

# Vector and matrix instructions that torch's kernels have versions for; the last three multiply bfloat16 or int8.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")


class Processor(NamedTuple):
    """What /proc/cpuinfo says of the first core."""

    model: str
    flags: Sequence[str]


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """Its name, and which of the instructions that matter it has; "unknown" and none where there is no such file."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""
    fields = dict(re.findall(r"^(model name|flags)\s*:\s*(.*)$", text, re.MULTILINE)[:2])
    present = set(fields.get("flags", "").split())
    return Processor(fields.get("model name", "unknown"), [flag for flag in _FLAGS if flag in present])


def machine() -> str:
    """Where this was measured, and how busy it is."""
    cores, (model, flags) = len(os.sched_getaffinity(0)), processor()
    return (
        f"{cores} {platform.machine()} cores ({model}: {' '.join(flags) or 'no vector instructions known'}), "
        f"load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, torch {version('torch')}"
    )
