"""One rank on one core: ours, eager and compiled, and a plain torch loop of the same model in its best forms.

    python -m benchmarks.one_rank --model medium

Tokens a second; see `benchmarks.workload` for the models and `benchmarks.torch_loops` for the loop. The loops run with
torch's modules, with those and torch.compile, and with our modules.
"""

from pathlib import Path

import click

from benchmarks.command_line import measuring, run
from benchmarks.data_parallel import MODELS
from benchmarks.launching import alone
from benchmarks.paired import Options, Target
from benchmarks.settings import Peer

EAGER, COMPILED = "ours", "ours, training.compile"
LOOPS = {
    "plain loop": Peer(plain=True),
    "plain loop, torch.compile": Peer(plain=True, compiled=True),
    "plain loop, our modules": Peer(),
}
EAGER_LOOPS = [name for name, peer in LOOPS.items() if not peer.compiled]
# Eager against eager, then each side with its compiler where that helps.
TARGETS = [
    Target([EAGER], EAGER_LOOPS, 1.02),
    Target([EAGER, COMPILED], [*LOOPS], 1.02),
    Target([COMPILED], EAGER, None),
]


@click.command()
@click.option("--model", "name", type=click.Choice(list(MODELS)), default="medium", show_default=True)
@measuring
def main(name: str, rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure one rank against a loop of torch alone."""
    settings = MODELS[name].settings
    contestants = [
        alone(EAGER, "trainer", *settings),
        alone(COMPILED, "trainer", *settings, "training.compile=true"),
        *(alone(loop, "plain", *settings, peer=peer) for loop, peer in LOOPS.items()),
    ]
    run(contestants, TARGETS, Options(rounds, steps, warmup), file, {"model": name})


if __name__ == "__main__":
    main()
