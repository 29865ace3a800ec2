"""Peak memory of the label-smoothed loss over a vocabulary, with backward: ours in chunks, torch's of all logits.

Each in a process of its own, which computes it twice and counts in two ways:

allocated  the bytes of all tensors that were made and are alive at the peak, both gradients among them. The hidden
           states and the weight were there before.
process    how far the process's peak (VmHWM) lies above what it had before; large blocks go back to the kernel when
           they are freed
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F

from benchmarks.machine import machine
from benchmarks.pipeline_memory import reset_peak, status
from hvd_transformer.atomic import write_text
from hvd_transformer.nn.cross_entropy import fused_cross_entropy
from hvd_transformer.planning.pass_memory import AllocationTracker

CHUNKED, WHOLE = "in chunks", "all logits"
_MIB = 2**20


@dataclass(frozen=True)
class Size:
    """Of the problem, float32."""

    tokens: int
    vocabulary: int
    width: int
    smoothing: float

    @property
    def logits(self) -> int:
        """Bytes of all of them."""
        return 4 * self.tokens * self.vocabulary


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak, and the loss."""

    way: str
    allocated: int
    process: int
    loss: float


def measure(way: str, size: Size) -> Memory:
    """In this process: once to count tensors, once to see the process grow."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(size.tokens, size.width, generator=generator, requires_grad=True)
    weight = torch.randn(size.vocabulary, size.width, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(size.vocabulary, (size.tokens,), generator=generator)

    def step() -> float:
        hidden.grad = weight.grad = None
        if way == CHUNKED:
            loss = fused_cross_entropy(hidden, weight, None, targets, smoothing=size.smoothing)
        else:
            loss = F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum", label_smoothing=size.smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    with AllocationTracker() as counted:
        loss = step()
    hidden.grad = weight.grad = None
    before = reset_peak()
    step()
    return Memory(way, counted.peak, status("VmHWM") - before, loss)


def measure_all(size: Size) -> list[Memory]:
    """Each in a new process, one after the other."""
    memories = []
    for way in (CHUNKED, WHOLE):
        command = [sys.executable, "-m", "benchmarks.loss_memory", "--one", way, *_words(size)]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        memories.append(Memory(**json.loads(done.stdout)))
    return memories


def _words(size: Size) -> list[str]:
    return [word for name, value in asdict(size).items() for word in (f"--{name}", str(value))]


def table(size: Size, memories: Sequence[Memory]) -> str:
    """The figures for people."""
    chunked, whole = memories
    lines = [f"{'MiB at the peak':<18}{'allocated':>10}{'process':>10}{'loss a token':>15}"]
    for own in memories:
        allocated, process = own.allocated / _MIB, own.process / _MIB
        lines.append(f"{own.way:<18}{allocated:>10.1f}{process:>10.1f}{own.loss / size.tokens:>15.5f}")
    ratios = whole.allocated / chunked.allocated, whole.process / chunked.process
    lines.append(f"{'times less':<18}{ratios[0]:>10.2f}{ratios[1]:>10.2f}")
    lines += [
        "",
        f"{size.tokens:,} tokens × vocabulary {size.vocabulary:,}, width {size.width}, smoothing {size.smoothing}: "
        f"all logits are {size.logits / _MIB:.1f} MiB; {machine()}",
    ]
    return "\n".join(lines)


@click.command()
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(1))
@click.option("--vocabulary", default=32_000, show_default=True, type=click.IntRange(2))
@click.option("--width", default=256, show_default=True, type=click.IntRange(1))
@click.option("--smoothing", default=0.1, show_default=True, type=click.FloatRange(0, 1))
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write the figures to this file, too.")
@click.option("--one", type=click.Choice([CHUNKED, WHOLE]), hidden=True)
def main(tokens: int, vocabulary: int, width: int, smoothing: float, file: Path | None, one: str | None) -> None:
    """Measure the peak memory of the loss; fails where that in chunks takes as much as all logits."""
    size = Size(tokens, vocabulary, width, smoothing)
    if one is not None:
        click.echo(json.dumps(asdict(measure(one, size))))
        return
    memories = measure_all(size)
    click.echo(table(size, memories))
    if file is not None:
        figures = {"size": asdict(size), "memories": list(map(asdict, memories))}
        write_text(file, json.dumps(figures, indent=1) + "\n")
    sys.exit(memories[0].allocated >= size.logits)


if __name__ == "__main__":
    main()
