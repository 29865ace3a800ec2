"""The memory of each pipeline stage of a layout, as `planning.memory_plan` has it for one."""

from collections.abc import Sequence

from hvd_transformer.config.schema import Config
from hvd_transformer.gradients.optimizer import copies_per_weight
from hvd_transformer.gradients.transfer_sizes import transfer_sizes
from hvd_transformer.parallel.pipeline_schedule import make_schedule
from hvd_transformer.planning.pass_memory import join_modes, stage_activations
from hvd_transformer.planning.scaling.layer_work import LayerWork
from hvd_transformer.planning.scaling.layout import Layout


def layout_memory(
    layers: Sequence[LayerWork], stages: Sequence[tuple[int, int]], config: Config, layout: Layout, device: str
) -> list[int]:
    """Bytes of each stage at its peak. `layers` are a rank's own, for one micro-batch; `device`: "cpu" or "cuda"."""
    transfer = transfer_sizes(device, layout.dp, config.communication.bucket_mb)
    schedule = make_schedule(config.parallel.schedule, layout.pp, layout.micro_batches)
    number_bytes = 8 if config.training.precision == "fp64" else 4
    of_gradients, of_optimizer = copies_per_weight(config, layout.dp)
    _, of_muon = copies_per_weight(config, layout.dp, by_muon=True)
    uses_muon = config.optimizer.name == "muon"
    found = []
    for index, (start, stop) in enumerate(stages):
        own = [weight for layer in layers[start:stop] for weight in layer.weights]
        sizes = [number_bytes * weight.size for weight in own]
        weights = sum(sizes)
        by_muon = sum(number_bytes * weight.size for weight in own if uses_muon and weight.hidden)
        total = weights * (1 + of_gradients) + (weights - by_muon) * of_optimizer + by_muon * of_muon
        total += sum(2 * weight.size for weight in own if weight.shadowed)
        if of_gradients < 1:  # ZeRO stage 2: also whole gradients, in a bucket that fills and in those in flight
            total += min(weights, max(transfer.bucket, *sizes) + transfer.gradients)
        passes = join_modes(layer.passes for layer in layers[start:stop])
        found.append(round(total) + stage_activations(schedule[index], index, config.parallel.recompute, passes))
    return found
