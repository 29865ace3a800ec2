"""Attention of a CPU, forward and backward, over ever more tokens in a sample: the kernel's against torch's own.

Both compute the same samples in turn, on one thread, and their gradients are compared before anything is measured.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bootstrap import median_interval
from benchmarks.command_line import write_figures
from benchmarks.machine import machine
from hvd_transformer.native_library import CannotCompile
from hvd_transformer.nn.kernel_library import load_library
from hvd_transformer.nn.kernels import Kernels

Attend = Callable[[Tensor, bool], Tensor]
_FOLDER = Path("~/.cache/hvd-transformer/kernels").expanduser()  # as in training


def kernel(kernels: Kernels, stacked: Tensor, causal: bool) -> Tensor:
    """Query, key and value [B, T, 3, H, D/H] to [B, T, H, D/H]."""
    return kernels.self_attention(stacked, causal, None, None)


def torch_attention(stacked: Tensor, causal: bool) -> Tensor:
    """The same by torch."""
    query, key, value = (part.transpose(1, 2) for part in stacked.unbind(2))
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal).transpose(1, 2)


def gradient(attend: Attend, stacked: Tensor, causal: bool, grad: Tensor) -> Tensor:
    """Forward and backward once; the gradient of the three."""
    (found,) = torch.autograd.grad(attend(stacked, causal), stacked, grad)
    return found


def measure(ways: Sequence[Attend], stacked: Tensor, causal: bool, rounds: int) -> list[list[float]]:
    """Seconds of each way in each round. Raises `AssertionError` where their gradients differ."""
    grad = torch.randn_like(stacked[:, :, 0])
    first, *others = (gradient(attend, stacked, causal, grad) for attend in ways)
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-4, atol=1e-5)
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for attend, own in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            gradient(attend, stacked, causal, grad)
            own.append(time.perf_counter() - start)
    return seconds


@click.command(help=__doc__)
@click.option("--tokens", "lengths", multiple=True, default=(64, 256, 1024, 2048, 4096), show_default=True, type=int)
@click.option("--heads", default=4, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--rounds", default=21, show_default=True, type=click.IntRange(1))
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(lengths: Sequence[int], heads: int, head_dim: int, rounds: int, file: Path | None) -> None:
    torch.set_num_threads(1)
    try:
        kernels = Kernels(load_library(_FOLDER))
    except CannotCompile as error:
        click.echo(f"benchmark: {error}", err=True)
        sys.exit(1)
    rows = []
    click.echo(f"{'tokens':>7} {'keys':>7} {'kernel, ms':>11} {'torch, ms':>10} {'kernel / torch':>15}")
    for length in lengths:
        for causal in (True, False):
            generator = torch.Generator().manual_seed(1)
            stacked = torch.randn(max(1, 1024 // length), length, 3, heads, head_dim, generator=generator)
            own, other = measure([partial(kernel, kernels), torch_attention], stacked.requires_grad_(), causal, rounds)
            ratios = [left / right for left, right in zip(own, other, strict=True)]
            low, high = median_interval(ratios)
            row = {
                "tokens": length,
                "causal": causal,
                "kernel_ms": statistics.median(own) * 1e3,
                "torch_ms": statistics.median(other) * 1e3,
                "ratio": statistics.median(ratios),
                "interval": [low, high],
            }
            rows.append(row)
            click.echo(
                f"{length:7} {'causal' if causal else 'all':>7} {row['kernel_ms']:11.2f} {row['torch_ms']:10.2f} "
                f"{row['ratio']:6.2f} ({low:.2f} to {high:.2f})"
            )
    click.echo(f"\n{heads} heads of {head_dim}, at least 1,024 tokens in all, {rounds} rounds\n{machine()}")
    write_figures(file, {"machine": machine(), "heads": heads, "head_dim": head_dim, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
