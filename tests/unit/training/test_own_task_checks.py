"""What a task of one's own cannot have is refused before it costs a run, and what it freezes stays what it was."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import small_job
import torch
from small_job import run, settings, trainer
from torch import nn

from hvd_transformer.checkpoint.task_entries import STATE_KEYS, check_task_entries
from hvd_transformer.errors import UserError
from hvd_transformer.nn.contracts import Layer, TensorSplit
from hvd_transformer.nn.dropout import Dropout
from hvd_transformer.parallel.model_stage import ModelStage, check_layers
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.training.job_setup import build_model
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def check(*layers: Layer, **options: Any) -> None:
    model = nn.ModuleList(layer.module for layer in layers)
    check_layers([ModelStage(layers, torch.device("cpu"))], model, (), **options)


def test_each_layer_has_a_name_of_its_own() -> None:
    """Where it waits by its name for the parameters that other ranks have updated."""
    first, second = (Layer("block", nn.Linear(2, 2), nn.Identity()) for _ in range(2))
    with pytest.raises(UserError, match=r"^the task's `layers`: 2 have the name block; with parallel.optimizer_shard"):
        check(first, second, sharded=True)
    check(first, second)
    check(first, second._replace(name="other"), sharded=True)


def test_running_statistics_are_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(UserError, match=r"^layer norm: 1, a BatchNorm1d, keeps running statistics"):
        check(Layer("norm", module, module))
    check(Layer("norm", nn.BatchNorm1d(2, track_running_stats=False), nn.Identity()))

    class Fixed(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> "Fixed":
            return super().train(False)

    check(Layer("norm", Fixed(2), nn.Identity()))


@pytest.mark.parametrize(("micro_batches", "refused"), [(1, False), (2, True)])
def test_a_job_knows_what_it_recomputes(micro_batches: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = LanguageModelTask.layers

    def layers(task: LanguageModelTask) -> list[Layer]:
        first, block, *rest = own.fget(task)  # type: ignore[attr-defined]
        block.module.dropped = nn.Dropout(0.1)
        return [first, block, *rest]

    monkeypatch.setattr(LanguageModelTask, "layers", property(layers))
    config = settings("parallel.recompute=except_last", f"parallel.micro_batches={micro_batches}")
    with pytest.raises(UserError, match="would drop other values") if refused else nullcontext():
        trainer(config)


@pytest.mark.parametrize(
    "module", [nn.Dropout(0.1), nn.MultiheadAttention(4, 2, dropout=0.1), nn.GRU(4, 4, num_layers=2, dropout=0.5)]
)
def test_what_drops_other_values_when_it_is_recomputed_is_refused(module: nn.Module) -> None:
    layer = Layer("block", nn.Sequential(module), nn.Identity())
    with pytest.raises(UserError, match=r"^parallel.recompute=always: layer block: 0, a \w+, would drop other values"):
        check(layer, recompute="always")
    check(layer)
    check(layer._replace(recompute=False), recompute="always")


@pytest.mark.parametrize("module", [nn.Dropout(0.0), Dropout(0.5), nn.MultiheadAttention(4, 2), nn.Linear(2, 2)])
def test_what_can_be_recomputed_is_not(module: nn.Module) -> None:
    check(Layer("block", module, nn.Identity()), recompute="always")


@pytest.mark.parametrize(
    ("facts", "files", "message"),
    [
        ({"config": 1}, {}, r"the task's `facts`: config is a key of the checkpoint's own; choose another one"),
        ({"a": {1}}, {}, r"the task's `facts`: must be values of JSON: "),
        ({}, {"labels.txt": "a"}, r"the task's `files`: labels.txt: must be a file name that ends in .json or .jinja"),
        ({}, {"../a.json": "a"}, r"the task's `files`: ../a.json: must be a file name"),
        ({}, {"state.json": "a"}, r"the task's `files`: state.json: is a file of the checkpoint's own"),
        ({}, {"vocabulary.json": "a"}, r"the task's `files`: vocabulary.json: is a file of the checkpoint's own"),
        ({}, {"labels.json": b"a"}, r"the task's `files`: labels.json: must be a text, not bytes"),
    ],
)
def test_what_a_checkpoint_cannot_keep_is_refused(facts: Any, files: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        check_task_entries(facts, files, ["vocabulary.json"])


def test_a_checkpoint_has_these_keys_and_the_tasks() -> None:
    check_task_entries({"labels": ["a", "b"], "count": 3}, {"labels.json": "[]"}, ["vocabulary.json"])
    job = trainer(settings())
    job.check_task_entries()
    assert set(job.capture("", 0, best=False).state) == set(STATE_KEYS)


FROZEN = {"embedding.embedding.weight", "blocks.0.attention.qkv.weight", "blocks.0.norm1.weight"}


def test_frozen_weights_are_what_the_model_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint has them: a start that loads one draws them, too."""
    monkeypatch.setattr(LanguageModelTask, "frozen", FROZEN)
    words = ["model.tie_embeddings=false", "communication.embedding_rows=always"]
    job = trainer(settings(*words))
    before = small_job.weights(job)
    run(job, 3)
    changed = {name for name, weight in small_job.weights(job).items() if not torch.equal(weight, before[name])}
    assert changed and not changed & FROZEN
    monkeypatch.setattr(small_job, "Trainer", partial(Trainer, draw=False))
    resumed = trainer(settings(*words))
    assert job.engine.frozen_checksum == resumed.engine.frozen_checksum is not None
    for name, weight in small_job.weights(resumed).items():
        assert torch.equal(weight, before[name]) or name not in FROZEN


@pytest.mark.parametrize(
    ("frozen", "cuts", "message"),
    [
        ((), {}, r"the model of task=language_model has no `cuts`"),
        (("a", "b"), {"b": TensorSplit(0), "c": TensorSplit(0)}, r"b is in `frozen` and in `cuts`"),
    ],
)
def test_what_tensor_parallelism_cannot_do(
    frozen: Any, cuts: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that all compute the same, or whose weights differ and are in no checkpoint."""
    monkeypatch.setattr(LanguageModelTask, "cuts", cuts)
    monkeypatch.setattr(LanguageModelTask, "frozen", frozen)
    config = settings("parallel.tensor=2")
    task = LanguageModelTask.__new__(LanguageModelTask)
    task.config, task.data = config, SimpleNamespace(tokenizer=small_job.TOKENIZER)  # type: ignore[assignment]
    mesh: Any = SimpleNamespace(tp=2, tp_rank=0)
    with pytest.raises(UserError, match=f"^parallel.tensor=2: {message}"):
        build_model(config, task, mesh)


def test_a_model_that_cannot_be_deferred_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GRU keeps weak references to its weights, which shows when the model is complete."""
    make = LanguageModelTask.make_model

    def with_gru(task: LanguageModelTask) -> nn.Module:
        model = make(task)
        model.embedding.gru = nn.GRU(3, 4)
        return model

    monkeypatch.setattr(LanguageModelTask, "make_model", with_gru)
    config = settings()
    task = LanguageModelTask.__new__(LanguageModelTask)
    task.config, task.data = config, SimpleNamespace(tokenizer=small_job.TOKENIZER)  # type: ignore[assignment]
    mesh: Any = SimpleNamespace(tp=1, tp_rank=0)
    shapes = build_model(config, task, mesh)
    assert "embedding.gru.weight_hh_l0" in shapes
    assert not any(weight.is_meta for weight in task.model.parameters())
    assert task.model.embedding.gru.weight_hh_l0.abs().sum() > 0


def test_an_embedding_that_is_tied_by_a_function_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows travel alone, and the rest of its gradient would be lost."""
    own = LanguageModelTask.layers

    def layers(task: LanguageModelTask) -> list[Layer]:
        *before, last = own.fget(task)  # type: ignore[attr-defined]

        def tied(*tensors: torch.Tensor) -> Any:
            return last.run(*tensors) + task.model.embedding.embedding.weight.sum()

        return [*before, last._replace(run=tied)]

    monkeypatch.setattr(LanguageModelTask, "layers", property(layers))
    words = ["model.tie_embeddings=false", "communication.embedding_rows=always"]
    with pytest.raises(RuntimeError, match=r"embedding.weight: a gradient came besides that of its lookups"):
        run(trainer(settings(*words)), 1)
