"""CUDA streams: what one stream has written is used by another only afterwards. On a CPU there is nothing to order.

Horovod has a stream of its own, and threads of its own, whose current stream is the device's default one. There
allgather and all-to-all allocate their results. With HOROVOD_ENABLE_ASYNC_COMPLETION `hvd.synchronize` returns when a
collective is queued, and its completion is an event for which only the default stream waits, from then on:

    Horovod's stream    | all-reduce 0 | all-reduce 1 |
    default stream       waits for 0 ..| waits for 1 .|     nothing else runs there, or it would wait, too
    computing           | backward | backward | backward | `adopt`: waits for the default stream |

Over NCCL no thread waits for a GPU there: Horovod's stream waits for an event of the default stream, on which the
result is allocated (`AllocateOutput` in horovod/common/ops/nccl_operations.cc). Over a CUDA-aware MPI its thread waits
for each collective, and answers no other rank meanwhile.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is queued on streams."""
    return device.type == "cuda"


def start_copy(values: Tensor) -> Callable[[], Tensor]:
    """Start to copy these values to the host; the function returned waits for this copy alone."""
    if not has_streams(values.device):
        return lambda: values
    copied = values.to("cpu", non_blocking=True)  # into pinned memory
    done = torch.cuda.current_stream(values.device).record_event()

    def wait() -> Tensor:
        done.synchronize()
        return copied

    return wait


def leave_default_stream(devices: Sequence[torch.device]) -> None:
    """This thread computes on other streams from now on, beside the collectives that the default ones wait for."""
    for device in reversed(devices):  # the first one stays the current device
        torch.cuda.set_stream(torch.cuda.Stream(device))


def adopt(result: Tensor) -> None:
    """Use a collective's result, for which this thread has waited, on the current stream."""
    if has_streams(result.device):
        stream = torch.cuda.current_stream(result.device)
        stream.wait_stream(torch.cuda.default_stream(result.device))
        result.record_stream(stream)  # or its memory may be the next result's before this stream has read it
