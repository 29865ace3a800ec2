"""`training.compile` on a CPU: the same training, by fused kernels; or one line that says why not."""

import pytest
import torch
from small_job import run, settings, trainer, weights

from hvd_transformer.nn import matmul
from hvd_transformer.nn.kernels import FusibleLayer, Kernels
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.training.job_setup import compile_layers
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

PIPELINE = ["parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=3"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return f"data.cache_dir={tmp_path_factory.mktemp('cache')}"


def compiled(*words: str) -> tuple[Trainer, str | None]:
    job = trainer(settings("training.compile=true", *words))
    return job, compile_layers(job.config, job.task, job.mesh, job.world)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.dropout=0.3", "training.label_smoothing=0.1"],
        ["model.dropout=0.3", "model.norm=post", "model.position=rotary", "model.activation=relu"],
        ["model.dropout=0.3", "parallel.recompute=always", "training.accumulation=2"],
        ["model.dropout=0.3", "parallel.schedule=gpipe", *PIPELINE],
        ["model.dropout=0.3", "parallel.schedule=zero_bubble", *PIPELINE],
    ],
    ids=" ".join,
)
def test_compiled_training_is_eager_training(cache: str, words: list[str], monkeypatch) -> None:
    fits: list[bool] = []
    fit = Kernels.fit
    monkeypatch.setattr(Kernels, "fit", lambda _, *tensors, **how: fits.append(fit(*tensors, **how)) or fits[-1])
    # SGD: what Adam divides by magnifies rounding.
    words = ["model.num_layers=2", "optimizer.name=sgd", "optimizer.lr=0.1", "training.max_steps=12", *words, cache]
    eager, (job, reason) = trainer(settings(*words)), compiled(*words)
    assert reason is None
    losses = run(eager)
    assert losses[-1] < losses[0]
    assert run(job) == pytest.approx(losses, rel=1e-5)
    assert fits and all(fits)  # nothing was left to torch
    wanted = weights(eager)
    for name, weight in weights(job).items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-4, atol=1e-6)
    for trained in (eager, job):
        trained.engine.close()


@pytest.mark.parametrize("words", [[], ["training.accumulation=2"], ["parallel.schedule=zero_bubble", *PIPELINE]])
def test_kernels_compute_weight_gradients_where_they_are_faster(cache: str, words: list[str], monkeypatch) -> None:
    monkeypatch.setattr(matmul, "_kernels_are_faster", lambda: True)
    monkeypatch.setattr(matmul, "_LEAST_MULTIPLICATIONS", 1)
    shapes: list[torch.Size] = []
    compute = Kernels.weight_grad_

    def counted(self: Kernels, out: torch.Tensor, *operands: torch.Tensor, first: bool) -> None:
        shapes.append(out.shape)
        compute(self, out, *operands, first=first)

    monkeypatch.setattr(Kernels, "weight_grad_", counted)
    words = ["model.num_layers=2", "optimizer.name=sgd", "optimizer.lr=0.1", "training.max_steps=3", *words, cache]
    eager, (job, _) = trainer(settings(*words)), compiled(*words)
    assert run(job) == pytest.approx(run(eager), rel=1e-5)
    layers = [module for module in job.task.model.modules() if isinstance(module, WeightGradLayer)]
    assert len(layers) > 8 and set(shapes) == {layer.weight.shape for layer in layers}
    for trained in (eager, job):
        trained.engine.close()


def test_the_cut_changes_nothing_when_compiled(cache: str) -> None:
    words = ["model.dropout=0.3", "model.num_layers=2", "parallel.micro_batches=3", cache]
    whole, _ = compiled(*words)
    cut, _ = compiled(*words, *PIPELINE[:2])
    assert run(cut) == run(whole)
    cut.engine.close()


@pytest.mark.parametrize(
    ("compiler", "words", "wanted"),
    [
        ("/nowhere/g++", [], "CXX=/nowhere/g++ is not a command"),
        ("", ["training.precision=bf16"], "on a CPU it needs training.precision=fp32, not bf16"),
        ("", ["training.precision=fp64"], "on a CPU it needs training.precision=fp32, not fp64"),
    ],
)
def test_where_it_is_off_training_goes_on(compiler: str, words: list[str], wanted: str, monkeypatch) -> None:
    if compiler:
        monkeypatch.setenv("CXX", compiler)
    words = ["model.dropout=0.3", "training.max_steps=2", *words]
    job, reason = compiled(*words)
    assert reason == wanted
    assert all(module.kernels is None for module in job.task.model.modules() if isinstance(module, FusibleLayer))
    assert run(job) == run(trainer(settings(*words)))


def test_nothing_is_compiled_unless_asked_for() -> None:
    job = trainer(settings())
    assert compile_layers(job.config, job.task, job.mesh, job.world) is None
    assert all(module.kernels is None for module in job.task.model.modules() if isinstance(module, FusibleLayer))
