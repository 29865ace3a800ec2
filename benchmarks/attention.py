"""Attention of a CPU, forward and backward, over ever more tokens in a sample: the kernel's against torch's own.

Both compute the same samples in turn, on one thread, and their results and gradients are compared before anything is
measured. torch's time includes that it joins the gradients of query, key and value, as training without the kernel
does. With dropout, torch stores all weights.
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
_SEED = 1
_TOKENS = 1024  # of all samples; a longer one is alone


def kernel(kernels: Kernels, dropout: float, stacked: Tensor, causal: bool) -> Tensor:
    """Query, key and value [B, T, 3, H, D/H] to [B, T, H, D/H]."""
    batch_size, length, _, num_heads, _ = stacked.shape
    drawn = kernels.draw((batch_size, num_heads, length, length), dropout, _SEED) if dropout else None
    return kernels.self_attention(stacked, causal, None, drawn)


def torch_attention(dropout: float, stacked: Tensor, causal: bool) -> Tensor:
    """The same by torch."""
    query, key, value = (part.transpose(1, 2) for part in stacked.unbind(2))
    mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=causal)
    return mixed.transpose(1, 2)


def once(attend: Attend, stacked: Tensor, causal: bool, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward: the result, and the gradient of the three."""
    result = attend(stacked, causal)
    return result, torch.autograd.grad(result, stacked, grad)[0]


def measure(ways: Sequence[Attend], stacked: Tensor, causal: bool, grad: Tensor, rounds: int) -> list[list[float]]:
    """Seconds of each way in each round, in which they take turns to be the first."""
    seconds: list[list[float]] = [[] for _ in ways]
    for number in range(-1, rounds):  # one before, unmeasured
        for place in range(len(ways)):
            way = (place + number) % len(ways)
            start = time.perf_counter()
            once(ways[way], stacked, causal, grad)
            if number >= 0:
                seconds[way].append(time.perf_counter() - start)
    return seconds


@click.command(help=__doc__)
@click.option("--tokens", "lengths", multiple=True, default=(64, 256, 1024, 2048, 4096), type=click.IntRange(1))
@click.option("--heads", default=4, show_default=True, type=click.IntRange(1))
@click.option("--head-dim", default=64, show_default=True, type=click.IntRange(1))
@click.option("--dropout", default=0.0, show_default=True, type=click.FloatRange(0, 1, max_open=True))
@click.option("--rounds", default=21, show_default=True, type=click.IntRange(1))
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(lengths: Sequence[int], heads: int, head_dim: int, dropout: float, rounds: int, file: Path | None) -> None:
    torch.set_num_threads(1)
    try:
        kernels = Kernels(load_library(_FOLDER))
    except CannotCompile as error:
        click.echo(f"benchmark: {error}", err=True)
        sys.exit(1)
    torch.manual_seed(_SEED)
    rows = []
    click.echo(f"{'tokens':>7} {'keys':>7} {'kernel, ms':>11} {'torch, ms':>10} {'kernel / torch':>15}")
    for length in lengths:
        stacked = torch.randn(-(-_TOKENS // length), length, 3, heads, head_dim, requires_grad=True)
        grad = torch.randn_like(stacked[:, :, 0])
        for causal in (True, False):
            # Without dropout, which they draw from different generators.
            results = (once(attend, stacked, causal, grad) for attend in _ways(kernels, 0.0))
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
            own, other = measure(_ways(kernels, dropout), stacked, causal, grad, rounds)
            ratios = [left / right for left, right in zip(own, other, strict=True)]
            medians = {"kernel_ms": 1e3 * statistics.median(own), "torch_ms": 1e3 * statistics.median(other)}
            ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
            rows.append({"tokens": length, "causal": causal, **medians, "ratio": ratio, "interval": [low, high]})
            click.echo(
                f"{length:7} {'causal' if causal else 'all':>7} {medians['kernel_ms']:11.2f} "
                f"{medians['torch_ms']:10.2f} {ratio:7.2f} ({low:.2f} to {high:.2f})"
            )
    settings = {"machine": machine(), "heads": heads, "head_dim": head_dim, "dropout": dropout, "rounds": rounds}
    click.echo(f"\n{heads} heads of {head_dim}, dropout {dropout}, {rounds} rounds\n{settings['machine']}")
    write_figures(file, {**settings, "rows": rows})


def _ways(kernels: Kernels, dropout: float) -> list[Attend]:
    return [partial(kernel, kernels, dropout), partial(torch_attention, dropout)]


if __name__ == "__main__":
    main()
