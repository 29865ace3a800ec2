"""The layers' collectives over NCCL on one GPU: a group of one rank, with two stages."""

import time

import pytest
import torch
import torch.distributed as dist

from hvd_transformer.comm.torch_group import TorchWorld
from hvd_transformer.comm.world import World
from hvd_transformer.parallel.tensor_parallel import RankTensorGroup

pytestmark = pytest.mark.gpu


NAP = 2_000_000_000  # clock cycles, about a second: longer than a busy host takes to look


def test_sums_never_make_the_host_wait_and_the_watchdog_sees_them() -> None:
    world, device = World(), torch.device("cuda", 0)
    connected = TorchWorld(world, world, "nccl", [device, device])
    groups = [RankTensorGroup(ranks, f"stage{number}") for number, ranks in enumerate(connected.communicators)]
    streams = [torch.cuda.Stream(device) for _ in groups]
    values = [torch.full((1 << 16,), number + 1.5, dtype=torch.bfloat16, device=device) for number in range(2)]

    def queue_sums(cycles: int) -> torch.Tensor:
        """A sum and a gathering of each stage; the last one's result."""
        for group, stream, own in zip(groups, streams, values, strict=True):
            with torch.cuda.stream(stream):
                wait = group.sum_(own)
                torch.cuda._sleep(cycles)  # what is computed beside the sum
                wait()
                gathered = group.gather(own.mul_(2))
        return gathered

    queue_sums(1)  # loads the kernels, for which CUDA may wait until all streams are idle
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        gathered = queue_sums(NAP)
        seen, wanted = set[str](), {"tensor.stage0.3", "tensor.stage1.3"}
        deadline = time.monotonic() + 20  # the card may run one stream's work after the other's
        while not wanted <= seen and time.monotonic() < deadline:
            seen |= {*world.link.waiting}
            time.sleep(0.005)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert wanted <= seen
    assert not world.link.waiting and world.link.ended == 8
    assert [own[0].item() for own in values] == [6.0, 10.0]
    assert gathered.shape == (1, 1 << 16) and bool((gathered == 10).all())
    connected.close()
    assert not dist.is_initialized()
