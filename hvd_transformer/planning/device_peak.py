"""The peak of this rank's device, which model FLOPs utilization (MFU) is relative to."""

from typing import NamedTuple

import torch

from hvd_transformer.errors import UserError
from hvd_transformer.planning.constants import MEASURED, Constants, Precision, device_names, load
from hvd_transformer.processor import processor_name


class Peak(NamedTuple):
    """FLOP/s of one device, and where the figure comes from."""

    rate: float
    origin: str


def device_name(device: torch.device) -> str:
    """The name of the processor; on a CPU also the number of threads of a rank."""
    if device.type == "cuda":
        return processor_name(device)
    threads = torch.get_num_threads()
    return f"{processor_name(device)}, {threads} thread{'s' if threads > 1 else ''}"


def device_peak(device: torch.device, precision: Precision) -> Peak | None:
    """The fastest matrix product that `hvd-transformer bench` measured on this kind of device, else a GPU's published
    peak; None: neither is known. Raises `UserError` if the file of the measurements is damaged."""
    name = device_name(device)
    file = MEASURED.expanduser()
    if file.exists():
        found = load(str(file))
        if found.device == name and precision in found.matmul:
            return _peak(found, precision, f"measured, {file}")
    if device.type == "cuda" and "MIG" not in name:  # a slice of a GPU
        for built_in in map(load, device_names()):
            if precision in built_in.matmul and any(part in name for part in built_in.gpu_names or ()):
                return _peak(built_in, precision, f"published for {built_in.device}")
    return None


def _peak(constants: Constants, precision: Precision, origin: str) -> Peak:
    side, rate = constants.fastest_matmul(precision)
    return Peak(rate, f"a matrix product of side {side} on {constants.device}, {origin}")


def find_peak(device: torch.device, precision: Precision) -> tuple[Peak | None, str]:
    """The peak, and a line for the log: which peak `mfu` is relative to, or why there is none."""
    try:
        peak = device_peak(device, precision)
    except (UserError, OSError, RuntimeError) as error:  # without a home folder, or with another user's
        return None, f"no mfu: {error}"
    if peak is None:
        return None, f"no mfu: the peak of {device_name(device)} in {precision} is not known; `bench train` measures it"
    return peak, f"mfu: of {peak.rate / 1e9:,.1f} GFLOP/s per device, {peak.origin}"
