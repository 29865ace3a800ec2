"""The scaling efficiency that `plan --scale` predicts beside published tables.

    python -m benchmarks.published_scaling

horovod      512 P100, 4 per host, 25 Gbit/s RoCE: Sergeev & Del Balso 2018 (arXiv 1802.05799) and Horovod's
             docs/benchmarks.rst. 64 images per GPU; a step on one GPU from tensorflow.org/performance/benchmarks
             (InceptionV3 142, ResNet-50 219, ResNet-152 91.8, VGG16 154 images per second; ResNet-101 between the two
             by FLOPs); FLOPs and parameters by layers from the networks' papers; one bucket per 64 MB, Horovod's fusion
torchtitan   Llama 3.1 8B, 8 to 128 H100, FSDP: arXiv 2410.06511 and benchmarks/llama3_h100_202412_torchtitan.md
mpt          MPT-1B, 8 to 64 H100, FSDP: llm-foundry, scripts/train/benchmarking/README.md

Nothing is fitted: the links are those of the built-in constants p100 and h100, jitter 1 %. The computing of FSDP's
tables is that of their first row, so only the loss from there on is predicted. FSDP gathers the bfloat16 weights of a
layer before its forward and its backward, and reduces its float32 gradients, all beside the layers' computing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import click

from hvd_transformer.config import load as load_config
from hvd_transformer.planning.constants import load
from hvd_transformer.planning.plan_text import table
from hvd_transformer.planning.scaling.collectives import Group, Seconds
from hvd_transformer.planning.scaling.layer_work import LayerWork, ModelWork, Weight
from hvd_transformer.planning.scaling.layout import Layout, Machine
from hvd_transformer.planning.scaling.replay import Work, replay
from hvd_transformer.planning.scaling.step_time import slowest_of, step_time

_RESNET_101_SECONDS = 1 / 219 + (1 / 91.8 - 1 / 219) * (7.6 - 3.8) / (11.3 - 3.8)


class Network(NamedTuple):
    """A network of the Horovod paper: images per second of one P100, and (multiplications, parameters) in 10⁹ and 10⁶
    of its layers from the input to the output."""

    images_per_second: float
    layers: Sequence[tuple[float, float]]


NETWORKS = {
    # Without the auxiliary head, spread evenly: 5.7 and 23.8 in all.
    "Inception V3": Network(142, [(5.7 / 11, 23.8 / 11)] * 11),
    # conv1; the blocks of conv2_x, conv3_x, conv4_x, conv5_x; the classifier.
    "ResNet-101": Network(
        1 / _RESNET_101_SECONDS,
        [(0.12, 0.01), (0.68, 0.22), (0.95, 1.2), *[(0.22, 1.13)] * 23, (0.81, 15.0), (0.002, 2.05)],
    ),
    # Five blocks of convolutions, three dense layers.
    "VGG-16": Network(
        154,
        [
            (1.94, 0.04),
            (2.77, 0.22),
            (4.62, 1.48),
            (4.62, 5.9),
            (1.39, 7.1),
            (0.103, 102.8),
            (0.017, 16.8),
            (0.004, 4.1),
        ],
    ),
}


class Row(NamedTuple):
    """Efficiencies, relative to the first number of GPUs."""

    name: str
    gpus: str
    published: float
    predicted: float


def horovod() -> list[Row]:
    """512 GPUs against one."""
    published = {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}
    return [Row(f"Horovod, {name}", "1 → 512", published[name], horovod_efficiency(name, 512)) for name in NETWORKS]


def horovod_efficiency(name: str, gpus: int) -> float:
    """Of so many GPUs against one."""
    network, constants = NETWORKS[name], load("p100")
    products = sum(multiplications for multiplications, _ in network.layers) * 1e9 * 64
    # The fraction with which a step on one GPU takes as long as published.
    fraction = 3 * products * network.images_per_second / 64 / constants.matmul_rate("fp32", 8192)
    constants = constants.model_copy(update={"training_fraction": {"fp32": fraction}, "optimizer_seconds": 0.0})
    layers = [
        LayerWork(name, [Weight(parameters * 1e6)], share * 1e9 * 64, 2 * share * 1e9 * 64)
        for share, parameters in network.layers
    ]
    work = ModelWork(samples=64, tokens=1, d_model=8192, whole=layers)
    config = load_config(overrides=["communication.bucket_mb=64", "training.batch_size=64"])
    machine = Machine(constants, "nccl", constants.devices_per_host)
    alone, together = (
        step_time(work, config, Layout(count, 1, 1, micro_batch_size=64), machine).total for count in (1, gpus)
    )
    return alone / together


class Fsdp(NamedTuple):
    """A model of equal layers, and the published tokens per second of a GPU by number of GPUs."""

    name: str
    parameters: float
    num_layers: int
    tokens: dict[int, int]  # of a GPU in a step, by number of GPUs
    published: dict[int, float]


TABLES = (
    Fsdp("torchtitan 8B", 8.03e9, 32, {8: 16384, 128: 16384}, {8: 5762, 128: 5605}),
    Fsdp("torchtitan 8B, compiled", 8.03e9, 32, {8: 16384, 128: 16384}, {8: 6667, 128: 6514}),
    Fsdp(
        "MPT-1B",
        1_315_950_592,
        24,
        {8: 14 * 2048, 16: 20 * 2048, 32: 20 * 2048, 64: 20 * 2048},
        {8: 45455, 16: 46037, 32: 45130, 64: 44402},
    ),
)


def fsdp() -> list[Row]:
    """More GPUs against eight."""
    rows = []
    for model in TABLES:
        first, *others = model.published
        base = fsdp_rate(model, first)
        rows += [
            Row(
                model.name,
                f"{first} → {gpus}",
                model.published[gpus] / model.published[first],
                fsdp_rate(model, gpus) / base,
            )
            for gpus in others
        ]
    return rows


def fsdp_rate(model: Fsdp, gpus: int) -> float:
    """Predicted tokens per second of a GPU."""
    constants = load("h100")
    machine = Machine(constants, "nccl", constants.devices_per_host)
    group = Group(gpus, -(-gpus // constants.devices_per_host))
    weights = model.parameters / model.num_layers
    gather = machine.seconds("all_gather", group, 2 * weights)
    reduce = machine.seconds("reduce_scatter", group, 4 * weights)
    first = min(model.published)
    compute = model.tokens[gpus] / model.published[first]
    played = replay(fsdp_steps(compute, model.num_layers, gather, reduce))
    return model.tokens[gpus] / (played.end + compute * constants.jitter * slowest_of(gpus))


def fsdp_steps(compute: float, num_layers: int, gather: Seconds, reduce: Seconds) -> list[Work]:
    """FSDP with one layer gathered ahead. `compute`: seconds of forward and, twice as long, backward."""
    forward, backward = compute / 3 / num_layers, 2 * compute / 3 / num_layers
    steps = [Work(0.0, [gather])]
    sent = 1
    for index in range(2 * num_layers):
        # The next layer's weights travel while this layer computes.
        steps.append(Work(0.0, [gather] if index < 2 * num_layers - 1 else [], needs=sent))
        sent += index < 2 * num_layers - 1
        in_forward = index < num_layers
        steps.append(Work(forward if in_forward else backward, [] if in_forward else [reduce]))
        sent += not in_forward
    return steps


@click.command()
def main() -> None:
    """Print published and predicted efficiencies."""
    rows = [["table", "GPUs", "published", "predicted", "difference"]]
    rows += [
        [
            row.name,
            row.gpus,
            f"{row.published:.1%}",
            f"{row.predicted:.1%}",
            f"{100 * (row.predicted - row.published):+.1f} points",
        ]
        for row in [*horovod(), *fsdp()]
    ]
    click.echo(table(rows, 2))


if __name__ == "__main__":
    main()
