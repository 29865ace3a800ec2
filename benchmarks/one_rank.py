"""One rank on one core: ours, and a plain torch loop of the same model in its two best forms.

    python -m benchmarks.one_rank --model medium

Tokens a second; see `benchmarks.workload` for the models and `benchmarks.torch_loops` for the loop.
"""

from pathlib import Path

import click

from benchmarks.command_line import measuring, run
from benchmarks.data_parallel import MODELS
from benchmarks.launching import alone
from benchmarks.paired import Options, Target
from benchmarks.settings import Peer

OURS, LOOP, CHUNKED = "ours", "plain loop", "plain loop, our modules"


@click.command()
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="medium", show_default=True)
@measuring
def main(name: str, rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure one rank against a loop of torch alone."""
    settings = MODELS[name].settings
    contestants = [
        alone(OURS, "trainer", *settings),
        alone(LOOP, "plain", *settings, peer=Peer(plain=True)),
        alone(CHUNKED, "plain", *settings, peer=Peer()),
    ]
    run(contestants, [Target([OURS], [LOOP, CHUNKED], 1.02)], Options(rounds, steps, warmup), file, {"model": name})


if __name__ == "__main__":
    main()
