"""Cases for the ranks of a world: Horovod's collectives between processes of one host, against torch alone.

Every rank can compute what every other rank sends, so it knows each result without a message.
"""

import gc
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor

from hvd_transformer.comm.shared_buffers import SharedBuffers

# A slot has 512 KiB: one value, a few, whole slots and a bit more, and more chunks than there are slots.
COUNTS = (1, 7, 131_072, 131_073, 900_001)
TYPES = (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64)
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Sum": torch.add,
    "Min": torch.minimum,
    "Max": torch.maximum,
}


def sharing() -> bool:
    """Whether this process has mapped a block of Horovod's."""
    return "/dev/shm/horovod-" in Path("/proc/self/maps").read_text(encoding="utf-8")


def left_behind() -> list[str]:
    """Names of blocks that are still there."""
    return [file.name for file in Path("/dev/shm").glob("horovod-*")]


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank sends: small whole numbers, and for floats fractions too."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 20, (count,), generator=generator).to(dtype)


def all_reduce() -> int:
    """Every type, operation and size, in place and not; returns the number of checks."""
    checks = 0
    for dtype in TYPES:
        for name, operation in OPERATIONS.items():
            for count in COUNTS:
                each = [values(rank, count, dtype) for rank in range(hvd.size())]
                if dtype == torch.float16 and name == "Sum":  # added in float32, rounded once
                    wanted = reduce(operation, [one.float() for one in each]).half()
                else:
                    wanted = reduce(operation, each)  # in rank order
                own, options = each[hvd.rank()], {"op": getattr(hvd, name)}
                found = hvd.allreduce(own, name=f"sum.{dtype}.{name}.{count}", **options)
                _same(found, wanted, f"{name} of {count} {dtype}")
                hvd.allreduce_(own, name=f"in_place.{dtype}.{name}.{count}", **options)
                _same(own, wanted, f"{name} in place of {count} {dtype}")
                checks += 2
    return checks


def scaled() -> None:
    """Averages, factors, and several tensors as one."""
    each = [values(rank, 1000, torch.float64) for rank in range(hvd.size())]
    own = each[hvd.rank()]
    found = hvd.allreduce(own, name="scaled", op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    torch.testing.assert_close(found, 2 * sum(each))
    torch.testing.assert_close(hvd.allreduce(own, name="mean", op=hvd.Average), sum(each) / hvd.size())
    for part, found in zip(
        own.split(300), hvd.grouped_allreduce(own.split(300), name="group", op=hvd.Sum), strict=True
    ):
        start = part.storage_offset()
        torch.testing.assert_close(found, sum(each)[start : start + part.numel()])


def gathered() -> None:
    """Blocks of different sizes, one of them empty."""
    for width in (1, 3, 40_000):
        rows = [0, 5, 1, 17][: hvd.size()]
        each = [values(rank, number * width, torch.float32).view(number, width) for rank, number in enumerate(rows)]
        found = hvd.allgather(each[hvd.rank()], name=f"rows.{width}")
        _same(found, torch.cat(each), f"rows of {width}")
    text = hvd.allgather(torch.full((hvd.rank() + 1,), hvd.rank(), dtype=torch.uint8), name="bytes")
    assert text.tolist() == [rank for rank in range(hvd.size()) for _ in range(rank + 1)]


def reduce_scattered() -> None:
    """Parts of equal numbers of rows, and of numbers that differ by one."""
    for rows in (hvd.size(), hvd.size() + 1, 50_000):
        each = [values(rank, rows * 7, torch.float32).view(rows, 7) for rank in range(hvd.size())]
        total = reduce(torch.add, each)
        sizes = [rows // hvd.size() + (rank < rows % hvd.size()) for rank in range(hvd.size())]
        found = hvd.reducescatter(each[hvd.rank()], name=f"parts.{rows}", op=hvd.Sum)
        _same(found, total.split(sizes)[hvd.rank()], f"parts of {rows}")


def reduced_in_place() -> int:
    """Tensors that the other ranks can map, alone and beside one that they cannot; returns the bytes of others."""
    buffers = SharedBuffers.find(hvd)
    assert buffers is not None
    gc.collect()  # earlier calls of this world may have left buffers that others have mapped
    hvd.barrier()
    # These forget what is free when they next reduce in place. A process set that does nothing more keeps its own.
    first = hvd.allreduce_(buffers.zeros_like(torch.empty(131_072)), name="shared.first", op=hvd.Sum)
    its_part = first.nbytes // hvd.size() if sharing() else 0
    earlier = buffers.bytes_of_others - (hvd.size() - 1) * its_part
    del first
    for dtype in TYPES:
        # A part of a buffer that begins somewhere else on each rank.
        own = buffers.zeros_like(torch.empty(1_000_100, dtype=dtype))[3 * hvd.rank() :][:900_001]
        assert not own.any()
        for name, operation in OPERATIONS.items():
            for count in COUNTS:
                each = [values(rank, count, dtype) for rank in range(hvd.size())]
                if dtype == torch.float16 and name == "Sum":
                    wanted = reduce(operation, [one.float() for one in each]).half()
                else:
                    wanted = reduce(operation, each)
                sent = own[:count].copy_(each[hvd.rank()])
                hvd.allreduce_(sent, name=f"shared.{dtype}.{name}.{count}", op=getattr(hvd, name))
                _same(sent, wanted, f"{name} in shared memory of {count} {dtype}")
                # Not of this rank, or not in place: all copy.
                mixed = own[:count].copy_(each[hvd.rank()]) if hvd.rank() else each[0].clone()
                hvd.allreduce_(mixed, name=f"mixed.{dtype}.{name}.{count}", op=getattr(hvd, name))
                _same(mixed, wanted, f"{name} of {count} {dtype} in two kinds of memory")
    of_others = buffers.bytes_of_others - earlier
    rows = 50_001
    each = [values(rank, rows * 7, torch.float32).view(rows, 7) for rank in range(hvd.size())]
    sent = buffers.zeros_like(each[0]).copy_(each[hvd.rank()])
    sizes = [rows // hvd.size() + (rank < rows % hvd.size()) for rank in range(hvd.size())]
    found = hvd.reducescatter(sent, name="shared.parts", op=hvd.Sum)
    sent.fill_(7)  # nobody reads it any more
    _same(found, reduce(torch.add, each).split(sizes)[hvd.rank()], "parts of shared memory")
    return of_others


def freed() -> None:
    """What counts in this rank's resident set; memory that is freed is free, although others have mapped it."""
    buffers = SharedBuffers.find(hvd)
    assert buffers is not None

    def resident() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in status if line.startswith("RssShmem:")).split()[1])

    hvd.barrier()  # earlier buffers are free
    before, close = resident(), 1 << 20
    for turn in range(4):
        own = buffers.zeros_like(torch.empty(4 << 20, dtype=torch.float32)).fill_(hvd.rank() + 1)
        hvd.allreduce_(own, name=f"freed.{turn}", op=hvd.Sum)
        assert (own == hvd.size() * (hvd.size() + 1) // 2).all()
        of_others = buffers.bytes_of_others  # no longer of those that are free
        assert abs(resident() - before - own.nbytes - of_others) < close, f"{resident() - before:,}, {of_others:,}"
        hvd.barrier()  # all ranks have looked
        del own
        hvd.barrier()
    kept = resident() - before
    assert kept < close, f"{kept:,} bytes are not free"


def in_order() -> bool:
    """Many collectives in flight at once come back with the right sums, each time the same bits."""
    for turn in range(3):
        sent = {number: values(hvd.rank(), 1 + number * 5_000, torch.float32) for number in range(40)}
        order = sorted(sent, key=lambda number: (number * 7 + 13 * hvd.rank()) % 40)
        handles = {number: hvd.allreduce_async(sent[number], name=f"{turn}.{number}", op=hvd.Sum) for number in order}
        for number, handle in handles.items():
            each = [values(rank, 1 + number * 5_000, torch.float32) for rank in range(hvd.size())]
            _same(hvd.synchronize(handle), reduce(torch.add, each), f"{number} in turn {turn}")
    return True


def everything() -> dict[str, Any]:
    """All cases, and what they leave."""
    checks = all_reduce()
    scaled()
    gathered()
    reduce_scattered()
    in_order()
    of_others = reduced_in_place()
    freed()
    return {"checks": checks, "of_others": of_others, "sharing": sharing(), "left": left_behind()}


def _same(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape, f"{what}: {found.shape}, not {wanted.shape}"
    assert torch.equal(found, wanted), f"{what}: {int((found != wanted).sum())} of {wanted.numel()} differ"


if __name__ == "__main__":
    import json
    import os
    import sys

    if len(sys.argv) > 1 and os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == sys.argv[1]:
        os.environ["HOROVOD_SHARED_MEMORY"] = "0"
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])] if len(sys.argv) == 1 else []
    hvd.init(process_sets=sets)
    if sets:
        own = sets[hvd.rank() // 2]
        for count in COUNTS:
            each = [values(rank, count, torch.float32) for rank in own.ranks]
            found = hvd.allreduce(
                values(hvd.rank(), count, torch.float32), name=f"set.{count}", op=hvd.Sum, process_set=own
            )
            _same(found, sum(each), f"{count} in a set")
    done = {"rank": hvd.rank(), **everything()}
    print(json.dumps(done), flush=True)
    hvd.shutdown()
