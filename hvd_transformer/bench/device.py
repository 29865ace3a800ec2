"""What this rank's device can do: matrix products by precision and size, memory bandwidth, memory."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch

from hvd_transformer.bench.timing import repeats, series, warm_up
from hvd_transformer.comm.horovod_env import usable_cores
from hvd_transformer.comm.world import World
from hvd_transformer.monitoring.host_usage import HostMemory, host_memory_left
from hvd_transformer.nn.matmul import matmul
from hvd_transformer.planning.constants import Constants
from hvd_transformer.planning.device_peak import device_name

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_SIDES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192)}
_SECONDS = 0.05  # per product
_MOST_SECONDS = 1.0  # larger products are left out
_CALLS = {"cpu": 1, "cuda": 20}  # per timing: a GPU is to be kept busy, as in training
# Copied for the memory bandwidth: more than the caches of a processor hold.
_COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}


@torch.no_grad()  # as the layers multiply: autograd would have another library's products
def measure_device(device: torch.device) -> Constants:
    """The constants of the device alone, without links and training. Takes a few seconds."""
    threads = torch.get_num_threads()
    if device.type == "cuda":
        per_host, memory = torch.cuda.device_count(), torch.cuda.get_device_properties(device).total_memory
    else:
        per_host = max(1, usable_cores() // threads)
        memory = _host_memory().total // per_host
    found = {
        "device": device_name(device),
        "threads": threads if device.type == "cpu" else 1,
        "devices_per_host": per_host,
        "matmul": {precision: dict(_matmul_rates(device, dtype)) for precision, dtype in _DTYPES.items()},
        "memory_bandwidth": _memory_bandwidth(device),
        "memory_bytes": memory,
    }
    return Constants.model_validate(found)


def free_bytes(device: torch.device) -> int:
    """The memory that is free: of the GPU, or of this host or container."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _host_memory().available


def _host_memory() -> HostMemory:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host_memory_left() or HostMemory(total, total)


def _matmul_rates(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[int, float]]:
    """FLOP/s of products of square matrices, by their side."""
    for side in _SIDES[device.type]:
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        seconds = _seconds(partial(matmul, left, right), device)
        yield side, 2 * side**3 / seconds
        if 2**3 * seconds > _MOST_SECONDS:  # the next product
            return


def _memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy reads and writes together."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """The median time of one call."""
    alone, calls = World(), _CALLS[device.type]

    def run() -> None:
        for _ in range(calls):
            action()

    count = repeats(_SECONDS, warm_up(alone, run, device))
    return median(series(alone, run, device, count)) / calls
