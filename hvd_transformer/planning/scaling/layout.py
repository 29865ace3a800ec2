"""A layout dp × tp × pp and the machine it runs on: which ranks are on which host, and who shares a link."""

import math
from typing import NamedTuple

from hvd_transformer.planning.constants import Backend, Constants
from hvd_transformer.planning.scaling.collectives import Collective, Group, Seconds, collective_time


class Layout(NamedTuple):
    """dp replicas of tp ranks with pp stages each. A step of a replica: `accumulation` times `micro_batches`."""

    dp: int
    tp: int
    pp: int
    micro_batches: int = 1  # per accumulation step
    micro_batch_size: int = 1  # samples
    accumulation: int = 1

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def passes(self) -> int:
        """Micro-batches of a replica in a step."""
        return self.micro_batches * self.accumulation


class Machine(NamedTuple):
    """What the job runs on."""

    constants: Constants
    backend: Backend
    devices_per_host: int

    @property
    def device(self) -> str:
        """The type of the devices: "cpu" or "cuda"."""
        return "cuda" if self.backend == "nccl" else "cpu"

    def seconds(self, kind: Collective, group: Group, num_bytes: float) -> Seconds:
        """The time of a collective. Raises `UserError` if the constants lack its link."""
        return collective_time(self.constants, self.backend, kind, group, num_bytes)

    def num_hosts(self, layout: Layout) -> int:
        return math.ceil(layout.devices / self.devices_per_host)

    def world(self, layout: Layout) -> Group:
        """All ranks."""
        return Group(layout.dp * layout.tp, self.num_hosts(layout))

    def data_group(self, layout: Layout) -> Group:
        """The ranks that reduce their gradients together: every tp-th, so tp such groups share each host's link."""
        hosts = min(self.num_hosts(layout), layout.dp)
        return Group(layout.dp, hosts, sharing=layout.tp if hosts > 1 else 1)

    def tensor_group(self, layout: Layout) -> Group:
        """Neighbouring ranks, on one host where they fit."""
        return Group(layout.tp, min(layout.tp, math.ceil(layout.tp * layout.pp / self.devices_per_host)))

    def crowding(self, layout: Layout) -> float:
        """How much slower a device is because others of its host compute, too."""
        most = self.devices_per_host
        busy = min(layout.devices, most)
        return 1 + (self.constants.crowding - 1) * (busy - 1) / (most - 1) if most > 1 else 1.0
