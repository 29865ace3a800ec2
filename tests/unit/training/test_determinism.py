"""`training.deterministic`: what it tells torch, and that training uses nothing that torch then refuses on a GPU."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command
from small_job import run as take_steps
from small_job import settings, trainer, weights
from torch.utils._python_dispatch import TorchDispatchMode

from hvd_transformer.comm.world import World
from hvd_transformer.config import Config, load
from hvd_transformer.errors import UserError
from hvd_transformer.models.classifier import classification_loss
from hvd_transformer.training import train_job
from hvd_transformer.training.determinism import choose_kernels
from hvd_transformer.training.process import StopRequest

# By torch.use_deterministic_algorithms, as far as a Transformer might use them. (torch's NLLLoss there is nll_loss2d.)
REFUSED_ON_GPUS = {
    "cumsum", "cumprod", "put_", "histc", "median", "kthvalue", "nll_loss2d_forward", "scatter_reduce",
    "embedding_bag", "_embedding_bag", "grid_sampler_2d", "_ctc_loss", "logcumsumexp", "cumulative_trapezoid",
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's settings are those of the whole process."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    for module, names in ((torch.backends.cudnn, ("deterministic", "benchmark")),
                          (torch.utils.deterministic, ("fill_uninitialized_memory",))):  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    assert not torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(False)


def asked_for(*words: str) -> Config:
    return load(overrides=["training.deterministic=true", *words])


def test_torch_and_cublas_are_told() -> None:
    torch.backends.cudnn.benchmark = True
    choose_kernels(asked_for())
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_by_default_nothing_is_changed() -> None:
    choose_kernels(load())
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_workspace_of_the_users_is_kept_if_it_is_deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    choose_kernels(asked_for())
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    with pytest.raises(UserError, match="^CUBLAS_WORKSPACE_CONFIG=:0:0: .* it must be :4096:8 or :16:8$"):
        choose_kernels(asked_for())


def job(folder: Path, *words: str) -> Config:
    (folder / "text.txt").write_text("a small text of a few words\n" * 60)
    text = [f"data.source={folder / 'text.txt'}", "data.tokenizer=char", f"data.cache_dir={folder / 'cache'}"]
    return load(overrides=[*text, *SMALL, f"output_dir={folder / 'run'}", *words])


SMALL = [
    "model.num_layers=1", "model.d_model=8", "model.num_heads=2", "model.d_feedforward=12", "data.sequence_length=5",
    "training.max_steps=2", "data.workers=1", "model.max_length=16",
]  # fmt: skip


def run_job(config: Config, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    log, stop = logging.getLogger("hvd_transformer"), StopRequest()
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(log, name, getattr(log, name))
    try:
        return train_job.run(config, World(), stop)
    finally:
        stop.restore()
        for handler in log.handlers:
            handler.close()


def test_a_job_chooses_its_kernels_before_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[bool] = []

    def devices(*_: Any) -> tuple[tuple[torch.device, ...], str]:
        chosen.append(torch.are_deterministic_algorithms_enabled())
        return (torch.device("cpu"),), "training.device=auto: two GPUs, but why"

    monkeypatch.setattr("hvd_transformer.parallel.mesh.choose_devices", devices)
    summary = run_job(job(tmp_path, "training.deterministic=true"), monkeypatch)
    assert summary["status"] == "finished" and chosen == [True]


def test_a_job_that_does_not_use_its_gpus_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "training.device=auto: two GPUs, but why"
    cpu = (torch.device("cpu"),)
    monkeypatch.setattr("hvd_transformer.parallel.mesh.choose_devices", lambda *_: (cpu, told))
    run_job(job(tmp_path), monkeypatch)
    assert capfd.readouterr().out.count(f"warning: {told}\n") == 1
    assert (tmp_path / "run" / "logs" / "rank-000.log").read_text().count(f"WARNING {told}\n") == 1


def test_an_evaluation_does_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_job(job(tmp_path, "training.deterministic=true"), monkeypatch)
    torch.use_deterministic_algorithms(False)
    chosen: list[bool] = []

    def devices(*_: Any) -> tuple[tuple[torch.device, ...], str]:
        chosen.append(torch.are_deterministic_algorithms_enabled())
        return (torch.device("cpu"),), "training.device=auto: two GPUs, but why"

    monkeypatch.setattr("hvd_transformer.parallel.mesh.choose_devices", devices)
    done = command("hvd-transformer", "evaluate", tmp_path / "run")
    assert done.returncode == 0 and chosen == [True]
    assert (done.stdout + done.stderr).count("warning: training.device=auto: two GPUs, but why\n") == 1


JOBS = {
    "dense": ["communication.embedding_rows=never"],
    "rows": ["communication.embedding_rows=always", "model.tie_embeddings=false", "model.position=learned"],
    "chunks": ["training.precision=bf16", "training.label_smoothing=0.1", "model.dropout=0.1"],
    "pipeline": ["parallel.pipeline=2", "parallel.micro_batches=2", "parallel.schedule=zero_bubble"],
    "llama": ["model.norm_type=rms", "model.activation=swiglu", "model.num_kv_heads=1", "model.position=rotary"],
    "muon": ["optimizer.name=muon", "parallel.recompute=always"],
}


@pytest.mark.parametrize("words", JOBS.values(), ids=JOBS)
def test_on_the_cpu_nothing_changes(words: list[str]) -> None:
    config = settings("training.device=cpu", *words)
    plain = trainer(config)
    losses = take_steps(plain, 3)
    choose_kernels(asked_for())
    repeated = trainer(config)
    assert take_steps(repeated, 3) == losses
    for name, weight in weights(plain).items():
        assert torch.equal(weights(repeated)[name], weight), name


class Operations(TorchDispatchMode):
    """Records the names of torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("words", [words for name, words in JOBS.items() if name != "pipeline"])
def test_training_uses_nothing_that_torch_refuses_on_a_gpu(words: list[str]) -> None:
    trained = trainer(settings("training.device=cpu", *words))
    with Operations() as used:
        take_steps(trained, 2)
        trained.evaluate("valid")
        logits = torch.randn(4, 3, requires_grad=True)
        classification_loss(logits, torch.tensor([0, 1, 2, 2]), 0.1, torch.ones(3), training=True).backward()
        classification_loss(logits, torch.tensor([0, 1, 2, 2]), 0.1, None, training=False)
    assert {"scatter_add_", "nll_loss_forward", "add_"} <= used.names  # which have deterministic kernels
    assert not REFUSED_ON_GPUS & used.names
