"""`training.compile` against eager training: one rank on one thread, with and without dropout, and with a pipeline.

Tokens a second of SETTINGS in `benchmarks.workload`.
"""

from dataclasses import replace
from pathlib import Path

import click

from benchmarks.command_line import measuring, run
from benchmarks.group import Contestant
from benchmarks.launching import alone
from benchmarks.paired import Options, Target

DROPOUT = ("model.dropout=0.1",)
PIPELINE = (*DROPOUT, "parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=4")
CASES = {"plain": (), "dropout": DROPOUT, "pipeline and dropout": PIPELINE}
TARGETS = [
    Target([f"{name}, compiled"], f"{name}, eager", least) for name, least in zip(CASES, (1.0, 1.05, 1.05), strict=True)
]


def contestants() -> list[Contestant]:
    """Each case twice."""
    return [
        replace(alone(f"{name}, {way}", "trainer", *settings, f"training.compile={choice}"), trains=name)
        for name, settings in CASES.items()
        for way, choice in (("eager", "false"), ("compiled", "true"))
    ]


@click.command()
@measuring
def main(rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure compiled training against eager training."""
    run(contestants(), TARGETS, Options(rounds, steps, warmup), file)


if __name__ == "__main__":
    main()
