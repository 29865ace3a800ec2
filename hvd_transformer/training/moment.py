"""When a GPU reaches a place in its stream: the host queues work ahead, and its own clock says nothing of it."""

import time
from collections.abc import Collection

import torch

from hvd_transformer.comm.streams import has_streams


class Moment:
    """Now on the host, and on each GPU of `devices` when it has done what is queued so far."""

    def __init__(self, devices: Collection[torch.device]) -> None:
        self.host = time.perf_counter()
        self._events: dict[torch.device, torch.cuda.Event] = {}
        for device in set(devices):
            if has_streams(device):
                event = self._events[device] = torch.cuda.Event(enable_timing=True)
                event.record(torch.cuda.current_stream(device))

    def since(self, earlier: "Moment") -> float:
        """Seconds from an earlier moment: of the GPU that was the last to reach that one. Waits for this one."""
        if not self._events:
            return self.host - earlier.host
        for event in self._events.values():
            event.synchronize()
        milliseconds = [earlier._events[device].elapsed_time(event) for device, event in self._events.items()]
        return float(min(milliseconds)) / 1000
