"""What the steps between two lines of metrics.jsonl cost: MFU, memory, waiting, the hosts' CPUs and network.

Each rank adds up its own steps. What they sum to travels with the sums of the step that is logged (`step_stats`), so
nothing is sent for it, and nothing is measured in other steps. The step itself has not ended then, nor on a GPU the one
before: they count toward the next line.
"""

from collections.abc import Mapping, Sequence

import torch

from hvd_transformer.comm.world import World
from hvd_transformer.monitoring.host_usage import HostMeter, HostUsage, peak_resident_bytes
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.parallel.pipeline import worker_threads
from hvd_transformer.training.state import StepResult


class StepCosts:
    """`peak`: FLOP/s of a device; None: not known."""

    def __init__(self, world: World, mesh: ParallelMesh, peak: float | None = None) -> None:
        self._world, self._mesh, self._peak = world, mesh, peak
        stages = len(mesh.devices)
        # Of a rank. The stages on a CPU share its threads, whose peak it is.
        shared = worker_threads(stages) / torch.get_num_threads() if mesh.device.type == "cpu" else 1.0
        self._devices = stages * shared
        first_on_host = world.hosts.index(world.hosts[world.rank]) == world.rank
        self._meter = HostMeter() if first_on_host else None
        self._begin()

    def _begin(self) -> None:
        self._steps, self._flops, self._seconds, self._data, self._communication = 0, 0.0, 0.0, 0.0, 0.0

    def add(self, result: StepResult) -> None:
        """Add one step."""
        self._steps += 1
        self._flops += result.flops if self._mesh.tp_rank == 0 else 0.0  # the others have the same samples
        self._seconds += result.seconds
        self._data += result.data
        self._communication += result.seconds - result.work

    def take(self) -> list[float]:
        """This rank's part of the sums over the ranks, which `metrics` takes; then begin anew.

        A maximum cannot be had from sums: each rank's memory has a place of its own.
        """
        usage = None if self._meter is None else self._meter.read()
        host = (0.0, *HostUsage(0.0, 0.0, 0.0)) if usage is None else (1.0, *usage)
        memory = [0.0] * self._world.size
        memory[self._world.rank] = float(self._peak_memory())
        own = [float(self._steps), self._flops, self._seconds, self._data, self._communication, *host, *memory]
        self._begin()
        return own

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The values for metrics.jsonl, from the sums over the ranks of what they last took; none before any step."""
        steps, flops, seconds, data, communication, hosts, cpu, sent, received, *memory = sums
        if not steps:
            return {}
        found: dict[str, float] = {}
        if self._peak is not None and flops:
            found["mfu"] = flops / seconds / (self._devices * self._peak)
        found["peak_memory_bytes"] = int(max(memory))
        found["data_wait_milliseconds"] = 1000 * data / steps
        if self._world.size > 1:  # alone, a GPU computes while the host waits
            found["communication_wait_milliseconds"] = 1000 * communication / steps
        if hosts:
            found["host_cpu_share"] = cpu / hosts
            found["network_sent_bytes_per_second"] = sent / hosts
            found["network_received_bytes_per_second"] = received / hosts
        return found

    def _peak_memory(self) -> int:
        """Peak bytes of this rank's fullest GPU, or of its process on a CPU."""
        if self._mesh.device.type == "cpu":
            return peak_resident_bytes() - self._world.bytes_of_others
        return max(torch.cuda.max_memory_allocated(device) for device in set(self._mesh.devices))


def show_costs(metrics: Mapping[str, float]) -> str:
    """The costs in words, for the log; empty if there are none."""
    words = []
    if "mfu" in metrics:
        words.append(f"MFU {100 * metrics['mfu']:.1f} %")
    if "peak_memory_bytes" in metrics:
        words.append(f"peak memory {metrics['peak_memory_bytes'] / 2**30:.2f} GiB on the worst rank")
    for name in ("data", "communication"):
        if (key := f"{name}_wait_milliseconds") in metrics:
            words.append(f"waiting for {name} {metrics[key]:.2f} ms a step")
    if "host_cpu_share" in metrics:
        sent, received = (metrics[f"network_{way}_bytes_per_second"] / 1e6 for way in ("sent", "received"))
        words.append(
            f"host CPU {100 * metrics['host_cpu_share']:.0f} %, network {sent:.2f} MB/s sent, {received:.2f} received"
        )
    return ", ".join(words)
