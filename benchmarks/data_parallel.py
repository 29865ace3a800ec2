"""Data parallel training: ours over gloo and over MPI, torch DistributedDataParallel, and no communication at all.

    python -m benchmarks.data_parallel --model medium
    python -m benchmarks.data_parallel --model medium --precision bf16

Tokens a second of 2 ranks on this machine, one thread each; see `benchmarks.workload` for the models and
`benchmarks.settings` for what all contestants get. DistributedDataParallel is first tried in every variant, compiled
ones among them; the two best ones are then measured with the others, and the better of them counts. So does the better
of ours with and without `training.compile`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

from benchmarks.command_line import measured, measuring, run
from benchmarks.group import Contestant
from benchmarks.launching import alone, horovod, torchrun
from benchmarks.paired import LOSS_TOLERANCE, Options, Target
from benchmarks.settings import PEER_VARIANTS, RANKS, Peer
from benchmarks.workload import LARGE, SMALL

GLOO, MPI, LIMIT = "ours over gloo", "ours over MPI", "no communication"
COMPILED = ", training.compile"


class Wanted(NamedTuple):
    """The least ratios: over DistributedDataParallel's best, and of MPI to no communication."""

    gloo: float
    mpi: float
    limit: float | None


class Model(NamedTuple):
    """What is trained, what is wanted of it, and which peers are tried."""

    settings: tuple[str, ...]
    wanted: Wanted
    peers: tuple[Peer, ...] = PEER_VARIANTS


MODELS = {
    "medium": Model((), Wanted(1.03, 1.08, 0.96)),
    # Ten peers of two ranks would need 22 GB; whole logits of 16,000 words are the slower ones in any case.
    "large": Model(LARGE, Wanted(1.03, 1.08, 0.96), tuple(peer for peer in PEER_VARIANTS if not peer.plain)),
    "small": Model(SMALL, Wanted(1.15, 1.15, None)),
}


def ddp_name(peer: Peer) -> str:
    """What the table calls it."""
    return f"DDP, {peer}"


def find_best(
    model: Model, settings: Sequence[str], options: Options, number: int = 2
) -> tuple[list[Peer], dict[str, float]]:
    """The fastest variants of DistributedDataParallel in a short run, and the median rate of each."""
    result = measured([torchrun(ddp_name(peer), "ddp", *settings, peer=peer) for peer in model.peers], options)
    medians = {name: median(rates) for name, rates in result.rates.items()}
    ranked = sorted(model.peers, key=lambda peer: medians[ddp_name(peer)], reverse=True)
    return ranked[:number], medians


def contestants(settings: tuple[str, ...], peers: list[Peer]) -> list[Contestant]:
    """All, each of as many processes."""
    return [
        *(
            horovod(name + more, backend, *settings, *words)
            for name, backend in ((GLOO, "gloo"), (MPI, "mpi"))
            for more, words in (("", ()), (COMPILED, ("training.compile=true",)))
        ),
        *(torchrun(ddp_name(peer), "ddp", *settings, peer=peer) for peer in peers),
        # Each trains alone, on samples of its own.
        replace(alone(LIMIT, "trainer", *settings, copies=RANKS), trains="alone"),
    ]


@click.command()
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="medium", show_default=True)
@click.option("--precision", type=click.Choice(list(LOSS_TOLERANCE)), default="fp32", show_default=True)
@click.option("--sweep", default=3, show_default=True, type=click.IntRange(1), help="Rounds that choose the peers.")
@measuring
def main(name: str, precision: str, sweep: int, rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure data-parallel training against torch DistributedDataParallel and against no communication."""
    model, tolerance = MODELS[name], LOSS_TOLERANCE[precision]
    settings, wanted = (*model.settings, f"training.precision={precision}"), model.wanted
    peers, medians = find_best(model, settings, Options(sweep, steps, warmup, tolerance=tolerance))
    for variant, rate in medians.items():
        click.echo(f"sweep: {variant}: {rate:,.0f} tokens a second")
    ddp = [ddp_name(peer) for peer in peers]
    targets = [Target([GLOO, GLOO + COMPILED], ddp, wanted.gloo), Target([MPI, MPI + COMPILED], ddp, wanted.mpi)]
    targets += [Target([name], ddp, None) for name in (GLOO, MPI)]
    targets += [Target([MPI], LIMIT, wanted.limit), Target([GLOO], LIMIT, None), Target(ddp, LIMIT, None)]
    more = {"model": name, "precision": precision, "sweep": medians}
    run(contestants(settings, peers), targets, Options(rounds, steps, warmup, tolerance=tolerance), file, more)


if __name__ == "__main__":
    main()
