"""A trial allreduce on two GPUs of a host: two short-lived ranks sum a tensor with Horovod over NCCL.

Everything else may be right where NCCL fails: in a container without shared memory, on cards that cannot reach each
other's memory, or with a driver too old for its CUDA.
"""

import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hvd_transformer.launch.doctor.findings import Answer, Finding

SECONDS = 60.0  # in which the ranks import torch, connect and run the allreduce
RANKS = 2
_ALARM = 128 + 14  # what horovodrun says of a rank that SIGALRM has ended
_RIGHT, _WRONG = "the sum is right", "the sum is wrong"
# Ranks that wait for each other in NCCL hear no signal but one whose default action ends them.
_SUM = f"""
import signal, sys
signal.alarm(int(sys.argv[2]))
import horovod.torch as hvd, torch
hvd.init()
if sys.argv[1] == "cuda":
    torch.cuda.set_device(hvd.local_rank())
numbers = torch.arange(1 << 20, device=sys.argv[1])
found = hvd.allreduce(numbers * (1 + hvd.rank()), op=hvd.Sum)
wanted = numbers * sum(range(1, 1 + hvd.size()))
print("{_RIGHT}" if torch.equal(found, wanted) else "{_WRONG}", flush=True)
hvd.shutdown()
"""

Run = Callable[[list[str], float], Awaitable[Mapping[str, Any]]]  # a command and seconds → `probe.run`'s answer


class GpuAllreduce(NamedTuple):
    """The result on one host: `why_not` it was not tried, its `error`, or neither if the sum is right."""

    why_not: str | None = None
    error: str | None = None

    def __str__(self) -> str:
        if self.why_not is not None:
            return f"not checked: {self.why_not}"
        return "right" if self.error is None else self.error


def why_not(device: str, answer: Answer) -> str | None:
    """Why two ranks of a job on this device (training.device) cannot be tried on this host; None if they can."""
    devices, horovod = len(answer["devices"]), answer["horovod"]
    if device == "cpu":
        return "training.device=cpu"
    if devices < RANKS:
        return "no GPU" if devices == 0 else "one GPU"
    if horovod is None:
        return "Horovod is not installed"
    lacking = [name for name in ("gloo", "NCCL") if name not in horovod["features"]]
    return f"Horovod is built without {' and '.join(lacking)}" if lacking else None


def command(kind: str = "cuda", seconds: float = SECONDS) -> list[str]:
    """The command for a host: horovodrun beside its Python, which has the same path everywhere."""
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    ranks = ["-np", str(RANKS), "-H", f"localhost:{RANKS}", "--gloo", "--start-timeout", str(int(seconds))]
    return [horovodrun, *ranks, sys.executable, "-c", _SUM, kind, str(int(seconds))]


async def try_allreduce(device: str, answer: Answer, run: Run) -> GpuAllreduce:
    """Run it on the host that gave this answer."""
    if (reason := why_not(device, answer)) is not None:
        return GpuAllreduce(why_not=reason)
    return read(await run(command(), SECONDS + 10))


def read(result: Mapping[str, Any]) -> GpuAllreduce:
    """The result from the output of the ranks."""
    lines = str(result["output"]).splitlines()
    of_ranks = [line.partition(">:")[2].strip() for line in lines if re.match(r"\[\d+\]<std(out|err)>:", line)]
    if result["code"] == 0 and of_ranks.count(_RIGHT) == RANKS:
        return GpuAllreduce()
    if result["code"] is None or f"Exit code: {_ALARM}" in lines:
        return GpuAllreduce(error=f"no answer within {SECONDS:.0f} seconds")
    telling = [line for line in of_ranks if re.match(rf"[\w.]*(Error|Exception)\b|{_WRONG}", line)]
    said = telling or [line for line in of_ranks or lines if line.strip()] or [f"exit code {result['code']}"]
    return GpuAllreduce(error=said[-1])


def about_gpu_allreduces(sums: Mapping[str, GpuAllreduce]) -> list[Finding]:
    """A problem for each host on which it failed."""
    cure = "`NCCL_DEBUG=INFO hvd-transformer launch -H {host}:2 -- bench allreduce` shows where NCCL stops"
    return [
        Finding(host, f"the allreduce of two GPUs failed: {result.error}", cure.format(host=host))
        for host, result in sums.items()
        if result.error is not None
    ]
