"""Pipeline parallel training: ours in its three schedules, torch's 1F1B and zero bubble, and no pipeline at all.

    python -m benchmarks.pipeline

Tokens a second of one model in 2 stages on this machine, one thread each; see PIPELINE in `benchmarks.workload`. Ours
are two threads of one process, torch's are two processes over gloo (`benchmarks.torch_pipelines`).

The ideal is what 2 stages that pass tensors on for nothing would gain over none: 2 M / (M + 1) for M micro-batches,
less what they lose where one stage has more to do. Two cores that work at once may each be slower than one alone: what
this machine gives them is measured, too, by two trainings side by side that know nothing of each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from benchmarks.command_line import measuring, run
from benchmarks.group import Contestant
from benchmarks.launching import alone, torchrun
from benchmarks.paired import Options, Target
from benchmarks.settings import Peer
from benchmarks.workload import PIPELINE, SyntheticTask, make_config
from hvd_transformer.data.sampler import Replica
from hvd_transformer.parallel import pipeline_schedule
from hvd_transformer.planning import schedule_drawing
from hvd_transformer.planning.layer_profile import measure_layers
from hvd_transformer.training.process import tune_memory

F1B, GPIPE, ZERO = "pipeline of 2, 1F1B", "pipeline of 2, gpipe", "pipeline of 2, zero bubble"
NONE, TWICE, TORCH = "no pipeline", "no pipeline, twice at once", "torch 1F1B"
COMPILED = ", training.compile"
TORCH_COMPILED = "torch 1F1B, torch.compile"  # zero bubble cuts backward in two, which no compiled graph allows
# torch's zero-bubble schedules by kind of contestant.
TORCH_ZERO = {
    "torch-zb1p": "torch zero bubble (ZB1P)",
    "torch-interleaved": "torch zero bubble, interleaved",
    "torch-zbv": "torch zero bubble, V",
}
CUT = (5, 5)  # layers a stage, for all: the embedding and 4 blocks, 4 blocks and the head
STAGES = ("parallel.pipeline=2", f"parallel.partition={list(CUT)}")
# Of a layer's time; backward has about twice as many multiplications.
_FORWARD = 1 / 3


@dataclass(frozen=True)
class Stages:
    """Seconds of each stage for one micro-batch, forward and backward, measured alone on one thread."""

    seconds: Sequence[float]
    micro_batches: int

    @property
    def imbalance(self) -> float:
        """The slowest stage's time over the mean."""
        return max(self.seconds) * len(self.seconds) / sum(self.seconds)

    @property
    def ideal(self) -> float:
        """The speed-up of 1F1B over no pipeline, where passing tensors on costs nothing."""
        plan = pipeline_schedule.make_schedule("1f1b", len(self.seconds), self.micro_batches)
        forward = [seconds * _FORWARD for seconds in self.seconds]
        backward = [seconds * (1 - _FORWARD) for seconds in self.seconds]
        return (
            sum(self.seconds)
            * self.micro_batches
            / schedule_drawing.makespan(schedule_drawing.simulate(plan, forward, backward))
        )

    def __str__(self) -> str:
        times = " and ".join(f"{1000 * seconds:.1f}" for seconds in self.seconds)
        even = len(self.seconds) * self.micro_batches / (self.micro_batches + len(self.seconds) - 1)
        return (
            f"stages of {times} ms a micro-batch: the slowest {self.imbalance:.3f} of the mean; "
            f"{self.micro_batches} micro-batches: ideal speed-up {self.ideal:.3f} ({even:.3f} were they even)"
        )


def measure_stages() -> Stages:
    """Each stage of the workload alone, on one thread of this process."""
    config = make_config(PIPELINE)
    task = SyntheticTask(config, Replica(0, 1))
    count = config.parallel.micro_batches
    batch = tuple(tensor[: config.training.batch_size // count] for tensor in task.batch(0, range(task.batch_size)))
    tune_memory()
    costs = measure_layers(task.layers, task.micro_batch(batch), torch.device("cpu"))
    seconds = [cost.seconds for cost in costs]
    return Stages([sum(seconds[: CUT[0]]), sum(seconds[CUT[0] :])], count)


def contestants() -> list[Contestant]:
    """All; ours of one process each, torch's of one a rank."""
    return [
        ours(F1B, *STAGES, "parallel.schedule=1f1b"),
        ours(GPIPE, *STAGES, "parallel.schedule=gpipe"),
        ours(ZERO, *STAGES, "parallel.schedule=zero_bubble"),
        ours(F1B + COMPILED, *STAGES, "parallel.schedule=1f1b", "training.compile=true"),
        ours(ZERO + COMPILED, *STAGES, "parallel.schedule=zero_bubble", "training.compile=true"),
        ours(NONE),
        alone(TWICE, "trainer", *PIPELINE, copies=2),
        torchrun(TORCH, "torch-1f1b", *PIPELINE),
        torchrun(TORCH_COMPILED, "torch-1f1b", *PIPELINE, peer=Peer(plain=True, compiled=True)),
        *(torchrun(name, kind, *PIPELINE) for kind, name in TORCH_ZERO.items()),
    ]


def ours(name: str, *settings: str) -> Contestant:
    """The package's own training in one process."""
    return alone(name, "trainer", *PIPELINE, *settings)


@click.command()
@measuring
def main(rounds: int, steps: int, warmup: int, file: Path | None) -> None:
    """Measure training in a pipeline of 2 stages against torch's schedules and against no pipeline."""
    stages = measure_stages()
    zero = list(TORCH_ZERO.values())
    targets = [
        # Eager against eager, then each side with its compiler where that helps.
        Target([F1B], TORCH, 1.05),
        Target([F1B, F1B + COMPILED], [TORCH, TORCH_COMPILED], 1.05),
        Target([ZERO], zero, 1.05),
        Target([ZERO, ZERO + COMPILED], zero, 1.05),
        Target([ZERO], TORCH, None),
    ]
    for name in (F1B, ZERO):
        targets += [Target([name], NONE, 0.95 * stages.ideal), Target([name], TWICE, 0.95 * stages.ideal / 2)]
    figures = {"seconds": list(stages.seconds), "imbalance": stages.imbalance, "ideal": stages.ideal}
    run(contestants(), targets, Options(rounds, steps, warmup), file, {"stages": figures})
    click.echo(str(stages))


if __name__ == "__main__":
    main()
