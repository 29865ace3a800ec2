"""FLOPs and bytes of layers on fake tensors, against closed forms and a real run of the layers."""

from contextlib import nullcontext

import pytest
import torch
from grad_sinks import parameter_grads
from small_plan import SMALL, D, F, T, V, small_plan

from hvd_transformer.config import load
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.models.language_model import LanguageModel, language_model_layers
from hvd_transformer.nn import cross_entropy
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.planning.layer_profile import gradients_as_in_training
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.planning.model_costs import fake_model
from hvd_transformer.planning.pass_memory import PassMode, forward, run_pass
from hvd_transformer.tasks.registry import task_class

NEITHER = PassMode(recompute=False, defer=False)


def test_flops_of_a_block_and_the_head() -> None:
    plan = small_plan("model.dropout=0")
    _, block, *_, head = plan.layers
    tokens = 6 * T
    products = 2 * tokens * (4 * D * D + 2 * D * F)
    attention = 2 * tokens * T * D  # of one of its two products, over all heads; the mask saves nothing here
    assert block.forward_flops == products + 2 * attention
    assert block.backward_flops == 2 * products + 5 * attention  # the fused kernel forms the scores again
    # Logits, and the gradients of what they come from: all in forward.
    assert (head.forward_flops, head.backward_flops) == (3 * 2 * tokens * V * D, 0)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["training.device=cuda", "training.precision=bf16", "training.label_smoothing=0.1"],
        ["parallel.tensor=2", "parallel.vocab_parallel=true", "parallel.pipeline=2", "parallel.partition=uniform"],
        ["training.precision=fp64", "model.tie_embeddings=false", "optimizer.name=muon"],
    ],
)
@pytest.mark.parametrize("chunk", [3, 16, 25])
def test_a_loss_in_fewer_chunks_costs_the_same(words: list[str], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [f"model.loss_chunk={chunk}", *words]
    found, asked = small_plan(*settings), 0

    def all_chunks(size: int, chunk: int, *, accumulates: bool) -> list[slice]:
        nonlocal asked
        asked = max(asked, -(-size // chunk))
        return [slice(start, start + chunk) for start in range(0, size, chunk)]

    monkeypatch.setattr(cross_entropy, "chunks", all_chunks)
    assert small_plan(*settings) == found
    assert asked > 2


# On the meta device its attention of float64 keeps a logarithm per row as float32.
OLD_TORCH = pytest.mark.xfail(torch.__version__.startswith(("2.11.", "2.12.")), reason="torch < 2.13", strict=True)


def really_kept(config, first: int, stop: int) -> int:
    """Bytes that layers first..stop - 1 of the real model on the CPU hold for their backward, with both ends."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64 if config.training.precision == "fp64" else torch.float32)
    try:
        model = LanguageModel(V, config.model).train()
    finally:
        torch.set_default_dtype(torch.float32)
    for module in model.modules():
        if isinstance(module, WeightGradLayer):
            module.weight_grads = parameter_grads(module)
    mixed = torch.autocast("cpu", torch.bfloat16) if config.training.precision == "bf16" else nullcontext()
    size = -(-config.training.batch_size // config.parallel.micro_batches)
    tokens, targets = torch.randint(0, V, (size, T)), torch.randint(0, V, (size, T))
    tensors, ends, saved = (tokens,), [], []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    for number, layer in enumerate(language_model_layers(model)):
        kept = number in range(first, stop)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) if kept else nullcontext()
        tensors += (targets,) if layer.name == "head" else ()
        if number == first:
            tensors = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors)
            ends += tensors
        with hooks, mixed, dropout_key(1, 2):
            result = layer.run(*tensors)
        tensors = (result,)
        if number == stop - 1:
            ends += tensors
    lasting = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    for module in model.modules():  # of positions
        table = getattr(module, "table", None)
        tables = () if table is None else table if isinstance(table, tuple) else (table,)
        lasting |= {tensor.untyped_storage().data_ptr() for tensor in tables}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in [*saved, *ends]}
    return sum(num_bytes for pointer, num_bytes in storages.items() if pointer not in lasting)


@pytest.mark.parametrize(
    "words",
    [
        ["model.norm=pre", "model.activation=gelu"],
        ["model.norm=post", "model.activation=relu", "model.tie_embeddings=false"],
        ["model.dropout=0.2", "model.position=learned"],
        ["model.position=rotary", "parallel.micro_batches=2"],
        ["training.precision=bf16", "model.dropout=0.1", "model.position=rotary"],
        pytest.param(["training.precision=fp64"], marks=OLD_TORCH),
    ],
)
def test_activations_are_those_of_a_real_run(words: list[str]) -> None:
    config = load(overrides=[*SMALL, *words])
    num_samples = -(-config.training.batch_size // config.parallel.micro_batches)
    with fake_model(config, V, num_samples) as (layers, batch, store, context, _):
        inputs, targets = batch.inputs, batch.targets
        first, outputs = run_pass(layers[:2], inputs, (), store, context, NEITHER)
        second, _ = run_pass(layers[2:], outputs, targets, store, context, NEITHER)
    assert first.kept == really_kept(config, 0, 2)
    assert second.kept == really_kept(config, 2, 5)


@pytest.mark.parametrize("task", ["translation", "classification"])
def test_other_tasks_are_planned_as_they_run(task: str) -> None:
    """Every layer's bytes and weights, from fake tensors and from real ones."""
    config = load(overrides=[*SMALL, f"task={task}", "model.dropout=0.1", "data.vocab_size=300", "training.device=cpu"])
    plan = make_plan(config)
    model, layers, batch, _ = task_class(config).sketch(config, 300, plan.micro_batch_size)
    assert plan.parameters == sum(weight.numel() for weight in model.parameters())
    assert [layer.name for layer in plan.layers] == [layer.name for layer in layers]
    assert task_class(config).layer_names(config) == [layer.name for layer in layers]
    store, tensors = WeightGradStore(), batch.inputs
    with gradients_as_in_training(layers, store), dropout_key(0):
        forward(layers, batch.inputs, batch.targets, nullcontext, recompute=False)  # makes the tables of positions
        for layer, planned in zip(layers, plan.layers, strict=True):
            targets = batch.targets if layer is layers[-1] else ()
            found, tensors = run_pass([layer], tensors, targets, store, nullcontext, NEITHER)
            assert planned.activation_bytes == found.kept - found.inputs, layer.name
