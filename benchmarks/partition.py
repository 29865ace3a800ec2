"""The measured partition of a deliberately uneven model, against every other one into 2 stages.

An embedding, 8 blocks whose feed-forward parts are 64 to 2,048 wide, and a head: as many layers in both stages is far
from as much work. Each partition trains 8 micro-batches under 1F1B, one thread a stage, all in one process with the
same weights. In each round every partition takes its steps, in rotating order, and ratios are taken round by round.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch
from torch import nn

from benchmarks.machine import machine
from benchmarks.workload import make_config
from hvd_transformer.atomic import write_text
from hvd_transformer.models.layers import Block, TokenEmbedding, VocabularyHead
from hvd_transformer.nn.contracts import Layer, MicroBatch
from hvd_transformer.parallel.pipeline import Pipeline, Stage
from hvd_transformer.planning import partition
from hvd_transformer.planning.layer_profile import NoRows, measure_layers
from hvd_transformer.training.process import tune_memory

WIDTHS = (64, 64, 256, 64, 128, 64, 2048, 1024)
VOCABULARY, SAMPLES, MICRO_BATCHES = 1000, 2, 8
WANTED = 0.03
CPU = torch.device("cpu")

Cut = tuple[int, int]  # layers a stage


@dataclass(frozen=True)
class Result:
    """What was measured: seconds of a step, by partition and round."""

    layers: dict[str, float]  # seconds for one micro-batch, which the choice came from
    steps: dict[Cut, list[float]]
    auto: Cut

    @property
    def best(self) -> Cut:
        return min(self.steps, key=lambda cut: median(self.steps[cut]))

    def ratio(self, cut: Cut) -> float:
        """To the best, paired: the median of the rounds' ratios."""
        return median(own / best for own, best in zip(self.steps[cut], self.steps[self.best], strict=True))

    @property
    def excess(self) -> float:
        """How much slower than the best the measured partition is."""
        return max(0.0, self.ratio(self.auto) - 1)


def uneven_layers() -> list[Layer]:
    """The model, its weights always the same."""
    torch.manual_seed(0)
    config = make_config(["model.tie_embeddings=false"]).model
    embedding, head = TokenEmbedding(VOCABULARY, config), VocabularyHead(VOCABULARY, config)
    blocks: list[nn.Module] = [Block(config.model_copy(update={"d_feedforward": width})) for width in WIDTHS]
    return [
        Layer("embedding", embedding, embedding),
        *(Layer(f"blocks.{number}", block, block) for number, block in enumerate(blocks)),
        Layer("head", head, head.loss),
    ]


def measure(rounds: int, steps: int) -> Result:
    """Chooses as training does, then measures all."""
    tune_memory()
    layers = uneven_layers()
    length = make_config().data.sequence_length
    tokens = torch.randint(VOCABULARY, (2, MICRO_BATCHES, SAMPLES, length))
    micro_batches = [MicroBatch((inputs,), (targets,)) for inputs, targets in zip(*tokens, strict=True)]
    seconds = [cost.seconds for cost in measure_layers(layers, micro_batches[0], CPU)]
    layers[0].module.embedding.embedding_grads = NoRows()  # as in training, where gradient sync takes them
    first, second = partition.balanced(seconds, 2)
    cuts = [(count, len(layers) - count) for count in range(1, len(layers))]
    pipelines = {cut: _pipeline(layers, cut) for cut in cuts}
    times: dict[Cut, list[float]] = {cut: [] for cut in cuts}
    for number in range(rounds):
        for cut in _order(cuts, number):
            times[cut].append(_step_seconds(pipelines[cut], micro_batches, steps))
        click.echo(f"round {number + 1} of {rounds}", err=True)
    for pipeline in pipelines.values():
        pipeline.close()
    names = [layer.name for layer in layers]
    return Result(dict(zip(names, seconds, strict=True)), times, (first, second))


def _pipeline(layers: Sequence[Layer], cut: Cut) -> Pipeline:
    stages = [Stage(layers[: cut[0]], CPU), Stage(layers[cut[0] :], CPU)]
    return Pipeline(stages, schedule="1f1b", threads=1)


def _step_seconds(pipeline: Pipeline, micro_batches: Sequence[MicroBatch], steps: int) -> float:
    """The mean of some steps, after one unmeasured; all of them add to gradients that are there."""
    pipeline.forward_backward([micro_batches], 1.0, [].append)
    began = time.perf_counter()
    for _ in range(steps):
        pipeline.forward_backward([micro_batches], 1.0, [].append)
    return (time.perf_counter() - began) / steps


def _order(cuts: Sequence[Cut], number: int) -> list[Cut]:
    """Another first one each round, and every second round backwards, so that neighbours change too."""
    start = number % len(cuts)
    order = [*cuts[start:], *cuts[:start]]
    return order[::-1] if number % 2 else order


def table(result: Result) -> str:
    """The figures for people."""
    lines = ["layer, alone    ms a micro-batch"]
    lines += [f"{name:12} {1000 * seconds:>19.2f}" for name, seconds in result.layers.items()]
    lines += ["", "partition   least  median    most  ms a step   to the best"]
    for cut, seconds in result.steps.items():
        spread = " ".join(f"{1000 * value:>7.1f}" for value in (min(seconds), median(seconds), max(seconds)))
        marks = [mark for mark, chosen in (("best", result.best), ("auto", result.auto)) if cut == chosen]
        lines.append(f"{list(cut)!s:9} {spread}  {result.ratio(cut):>21.3f}  {', '.join(marks)}".rstrip())
    verdict = "met" if result.excess <= WANTED else "MISSED"
    lines += [
        "",
        f"auto is within {100 * result.excess:.1f} % of the best (wanted {100 * WANTED:.0f} %): {verdict}",
        machine(),
    ]
    return "\n".join(lines)


@click.command()
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=2, show_default=True, type=click.IntRange(1), help="Measured steps a visit.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this file, too.")
def main(rounds: int, steps: int, file: Path | None) -> None:
    """Measure all partitions of an uneven model; fails where the one that training chooses is not among the best."""
    result = measure(rounds, steps)
    click.echo(table(result))
    if file is not None:
        figures = {
            "machine": machine(),
            "layers": result.layers,
            "seconds_a_step": {f"{first}+{second}": times for (first, second), times in result.steps.items()},
            "auto": result.auto,
            "best": result.best,
            "excess": result.excess,
        }
        write_text(file, json.dumps(figures, indent=1) + "\n")
    sys.exit(result.excess > WANTED)


if __name__ == "__main__":
    main()
