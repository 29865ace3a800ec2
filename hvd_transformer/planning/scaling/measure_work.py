"""Finds what the layers of a configuration's model do, from two runs on fake tensors (`planning.model_costs`)."""

from collections import Counter

from torch import nn

from hvd_transformer.config.checks import check
from hvd_transformer.config.schema import Config
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.muon import hidden_matrices
from hvd_transformer.nn.contracts import Layer
from hvd_transformer.nn.parallel_layers import Linear, VocabParallelEmbedding, VocabParallelLayer, WeightGradLayer
from hvd_transformer.planning.memory_plan import batch_samples, vocabulary
from hvd_transformer.planning.model_costs import FakeModel, fake_model, layer_costs
from hvd_transformer.planning.pass_memory import PASS_MODES
from hvd_transformer.planning.scaling.layer_work import LayerWork, ModelWork, Weight


def measure_work(config: Config, vocab_size: int | None, most: int) -> ModelWork:
    """The work of the model for one of the configuration's micro-batches; also split, over at most `most` ranks.

    Raises `UserError` if the vocabulary size is unknown (None: of the configuration) or the task cannot be planned.
    """
    vocab_size, _ = vocabulary(config, vocab_size)
    num_samples = -(-batch_samples(config) // config.parallel.micro_batches)
    whole = _layers(_with_tensor(config, 1), vocab_size, num_samples)
    degree = next((degree for degree in range(2, most + 1) if can_split(config, degree)), None)
    split = None if degree is None else _layers(_with_tensor(config, degree), vocab_size, num_samples)
    if split is not None and not any(layer.forward_sums for layer in split):
        split = None  # the task's model has no split layers
    return ModelWork(num_samples, config.data.sequence_length, config.model.d_model, whole, split, degree or 2)


def can_split(config: Config, degree: int) -> bool:
    """Whether `parallel.tensor` may have this value beside the other keys."""
    try:
        check(_with_tensor(config, degree))
    except UserError:
        return False
    return True


def _with_tensor(config: Config, degree: int) -> Config:
    vocabulary = config.parallel.vocab_parallel and degree > 1
    update = {"tensor": degree, "vocab_parallel": vocabulary, "pipeline": 1, "partition": "auto"}
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=update)})


def _layers(config: Config, vocab_size: int, num_samples: int) -> list[LayerWork]:
    with fake_model(config, vocab_size, num_samples) as model:
        return [
            LayerWork(
                name=layer.name,
                weights=_weights(model, layer),
                forward_flops=cost.forward_flops,
                backward_flops=cost.backward_flops,
                deferred_flops=cost.deferred_flops,
                activations=cost.activation_bytes,
                forward_sums=_sums(model, layer, backward=False),
                backward_sums=_sums(model, layer, backward=True),
                beside_sums=_beside_sums(model, layer),
                recompute=layer.recompute,
                passes=cost.passes,
            )
            for layer, cost in zip(model.layers, layer_costs(model, PASS_MODES), strict=True)
        ]


def _weights(model: FakeModel, layer: Layer) -> list[Weight]:
    """The layer's own weights; a tied one counts at the last layer that uses it."""
    modules = {module for other in model.layers for module in other.module.modules()}
    owner = {id(weight): other.name for other in model.layers for weight in other.module.parameters()}
    users = Counter(id(weight) for module in modules for weight in module.parameters(recurse=False))
    lookups = Counter(id(module.weight) for module in modules if isinstance(module, VocabParallelEmbedding))
    hidden = {id(weight) for weight in hidden_matrices([other.module for other in model.layers])}
    linears = [module for module in modules if isinstance(module, WeightGradLayer)]
    shadowed = {id(linear.weight) for linear in linears if linear.shadow is not None}
    return [
        Weight(
            weight.numel(),
            width=weight.size(1) if id(weight) in lookups else 0,
            dense=users[id(weight)] > lookups[id(weight)],
            hidden=id(weight) in hidden,
            shadowed=id(weight) in shadowed,
        )
        for weight in layer.module.parameters()
        if owner[id(weight)] == layer.name
    ]


def _sums(model: FakeModel, layer: Layer, backward: bool) -> list[float]:
    """Numbers of each sum over the tensor group: Shoeybi et al. 2019, arXiv 1909.08053, figure 3 (f and g)."""
    tokens = model.micro_batch.inputs[0].numel()
    widths = [_width(module, backward) for module in layer.module.modules()]
    return [float(tokens * width) for width in widths if width]


def _beside_sums(model: FakeModel, layer: Layer) -> list[float]:
    """FLOPs of the weight gradients of column-parallel layers, each of which starts its sum of backward first."""
    tokens = model.micro_batch.inputs[0].numel()
    linears = [module for module in layer.module.modules() if isinstance(module, Linear)]
    return [2.0 * tokens * linear.weight.numel() for linear in linears if linear.column_group is not None]


def _width(module: nn.Module, backward: bool) -> int:
    if isinstance(module, Linear):
        group, width = module.row_group, module.out_features
        if backward:
            group, width = module.column_group, module.in_features
        return 0 if group is None else width
    if isinstance(module, VocabParallelLayer) and module.shard is not None and not backward:
        weight = module._parameters["weight"]
        assert weight is not None
        return weight.size(1)  # the head, too, makes its gradients in forward
    return 0
