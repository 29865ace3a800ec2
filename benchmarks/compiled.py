"""`training.compile` against eager training: one rank on one thread, with and without dropout, and with a pipeline.

Tokens per second of SETTINGS in `benchmarks.workload`. The losses must agree before a ratio is printed.
"""

import json
from pathlib import Path

import click

from benchmarks.data_parallel import ENVIRONMENT, measuring, worker
from benchmarks.group import Contestant, ContestantFailed
from benchmarks.paired import Options, Result, Target, as_json, measure, table
from hvd_transformer.atomic import write_text

DROPOUT = ("model.dropout=0.1",)
PIPELINE = (*DROPOUT, "parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=4")
CASES = {"plain": (), "dropout": DROPOUT, "pipeline and dropout": PIPELINE}
TARGETS = [
    Target([f"{name}, compiled"], f"{name}, eager", least) for name, least in zip(CASES, (1.0, 1.05, 1.05), strict=True)
]
TOLERANCE = 1e-5  # relative


def contestants() -> list[Contestant]:
    """Each case twice."""
    return [
        Contestant(f"{name}, {way}", [worker("trainer", *settings, f"training.compile={choice}")], 1, ENVIRONMENT)
        for name, settings in CASES.items()
        for way, choice in (("eager", "false"), ("compiled", "true"))
    ]


def check_losses(result: Result) -> None:
    """Raise `ContestantFailed` if a compiled training has other losses than its eager one."""
    for name in CASES:
        for eager, own in zip(result.losses[f"{name}, eager"], result.losses[f"{name}, compiled"], strict=True):
            if abs(own - eager) > TOLERANCE * abs(eager):
                raise ContestantFailed(f"{name}: the loss is {own} compiled and {eager} eager")


@click.command()
@measuring
def main(rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure compiled training against eager training."""
    try:
        result = measure(contestants(), Options(rounds, steps, warmup), lambda line: click.echo(line, err=True))
        check_losses(result)
    except ContestantFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(table(result, TARGETS))
    if file is not None:
        write_text(file, json.dumps(as_json(result, TARGETS), indent=1) + "\n")


if __name__ == "__main__":
    main()
