"""The processor of a device: its name, its vendor, and the number formats that it has instructions for."""

import platform
from contextlib import suppress
from pathlib import Path

import torch

_FORMATS = {"bf16": {"avx512_bf16", "amx_bf16"}, "fp16": {"avx512_fp16", "amx_fp16"}}  # their instructions on x86


def processor_name(device: torch.device) -> str:
    """The model of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_line("model name") or platform.processor() or platform.machine()


def amd_family() -> int | None:
    """The family of this host's AMD CPU: 25 is Zen 3 and Zen 4, 26 is Zen 5. None for another vendor's."""
    family = _cpu_line("cpu family")
    return int(family) if family is not None and _cpu_line("vendor_id") == "AuthenticAMD" else None


def has_instructions(name: str) -> bool:
    """Whether this host's CPU has these instructions, named as Linux does: "avx512f"."""
    return name in (_cpu_line("flags") or "").split()


def number_formats() -> list[str]:
    """The 16-bit formats, of bf16 and fp16, that this host's CPU has instructions for.

    Both for processors other than x86, of which it is not known.
    """
    flags = _cpu_line("flags")
    return [name for name, instructions in _FORMATS.items() if flags is None or instructions & set(flags.split())]


def _cpu_line(name: str) -> str | None:
    """A line about the first core. Linux only: elsewhere `platform` knows just the architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return None
