"""Optimizers over flat buckets equal torch's own over the parameters, and their state can be carried on."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvd_transformer.config import load
from hvd_transformer.config.schema import ModelConfig, OptimizerConfig
from hvd_transformer.gradients.buffers import GradBuffer, make_grad_buffers
from hvd_transformer.gradients.optimizer import FlatOptimizer, copies_per_weight, names_without_decay
from hvd_transformer.models.language_model import LanguageModel

KINDS = {
    "sgd": {"name": "sgd"},
    "momentum": {"name": "sgd", "momentum": 0.9},
    "adam": {"name": "adam", "betas": (0.8, 0.95)},
    "adamw": {"name": "adamw", "eps": 1e-4},
}
BUCKETS = [1, 400, 2**20]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 3)).double()


def in_buckets(
    model: nn.Module, bucket_bytes: int, kind: str, decay: float = 0.1
) -> tuple[list[GradBuffer], FlatOptimizer]:
    config = OptimizerConfig(**{"weight_decay": decay, **KINDS[kind]})
    buckets = make_grad_buffers(dict(model.named_parameters()), names_without_decay(model), bucket_bytes)
    return buckets, FlatOptimizer(config, buckets)


def torchs(model: nn.Module, kind: str, decay: float = 0.1) -> torch.optim.Optimizer:
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=1.0)
    if kind == "momentum":
        return torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-8)
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-4)


def gradients(model: nn.Module, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        for name, weight in model.named_parameters()
    }


def fill(buckets: list[GradBuffer], values: dict[str, Tensor]) -> None:
    for bucket in buckets:
        for slot in bucket.slots:
            slot.view(bucket.gradients).copy_(values[slot.name])


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_equal_torchs(kind: str, bucket_bytes: int) -> None:
    model, plain = net(), net()
    buckets, optimizer = in_buckets(model, bucket_bytes, kind)
    reference = torchs(plain, kind)
    for step in range(20):
        rate = 0.01 * (step + 1)
        values = gradients(model, step)
        fill(buckets, values)
        optimizer.step(rate)
        for name, weight in plain.named_parameters():
            weight.grad = values[name].clone()
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: name + text)
    # The gaps between parameters stay what they were.
    for bucket in buckets:
        used = torch.zeros(bucket.parameters.numel(), dtype=torch.bool)
        for slot in bucket.slots:
            used[slot.start : slot.stop] = True
        assert not bucket.parameters[~used].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_carried_over_goes_on_bit_for_bit(kind: str) -> None:
    model = net()
    buckets, optimizer = in_buckets(model, 400, kind)
    for step in range(3):
        fill(buckets, gradients(model, step))
        optimizer.step(0.05)
    other = copy.deepcopy(net())
    other.load_state_dict(model.state_dict())
    others, second = in_buckets(other, 400, kind)
    for loaded, state in zip(second.state, optimizer.state, strict=True):
        for key, flat in loaded.items():
            flat.copy_(state[key])
    second.set_updates(3)
    for step in range(3, 6):
        for own, one in ((buckets, optimizer), (others, second)):
            fill(own, gradients(model, step))
            one.step(0.05)
    for first, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, loaded)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("sgd", set()), ("momentum", {"momentum_buffer"}), ("adam", {"exp_avg", "exp_avg_sq"})],
)
def test_the_state_lies_flat_like_the_parameters(kind: str, keys: set[str]) -> None:
    model, plain = net(), net()
    buckets, optimizer = in_buckets(model, 400, kind, decay=0.0)
    reference = torchs(plain, kind, decay=0.0)
    # There from the start, so that it can be saved and loaded at any time.
    assert [set(state) for state in optimizer.state] == [keys] * len(buckets)
    assert not any(flat.any() for state in optimizer.state for flat in state.values())
    values = gradients(model, 0)
    fill(buckets, values)
    optimizer.step(0.1)
    for name, weight in plain.named_parameters():
        weight.grad = values[name]
    reference.step()
    theirs = dict(plain.named_parameters())
    for bucket, state in zip(buckets, optimizer.state, strict=True):
        assert set(state) == keys
        for key, flat in state.items():
            assert flat.shape == bucket.parameters.shape
            for slot in bucket.slots:
                torch.testing.assert_close(slot.view(flat), reference.state[theirs[slot.name]][key])


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_decay_spares_biases_norms_and_embeddings(tie_embeddings: bool) -> None:
    config = ModelConfig(num_layers=1, d_model=4, num_heads=2, position="learned", tie_embeddings=tie_embeddings)
    model = LanguageModel(5, config)
    model.temperature = nn.Parameter(torch.tensor(1.0))
    model.lora_A = nn.Parameter(torch.ones(1, 8))  # a matrix of rank 1
    model.final_logits_bias = nn.Parameter(torch.ones(1, 8))
    decayed = {name for name, _ in model.named_parameters()} - names_without_decay(model)
    matrices = {f"blocks.0.attention.{part}.weight" for part in ("qkv", "output")}
    matrices |= {f"blocks.0.feedforward.{part}.weight" for part in ("input", "output")} | {"lora_A"}
    # A free output layer is a matrix like any other; a tied one is the embedding.
    assert decayed == matrices | (set() if tie_embeddings else {"head.weight"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_scales_the_gradients_of_one_step(kind: str, dtype: torch.dtype) -> None:
    model, plain = net().to(dtype), net().to(dtype)
    buckets, optimizer = in_buckets(model, 400, kind)
    reference = torchs(plain, kind)
    for step, factor in enumerate([0.3, 1.0, 7.0]):
        values = gradients(model, step)
        fill(buckets, values)
        optimizer.step(0.05, factor)
        for name, weight in plain.named_parameters():
            weight.grad = values[name] * factor
        for group in reference.param_groups:
            group["lr"] = 0.05
        reference.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-6)


@pytest.mark.parametrize(("compression", "errors"), [("none", 0), ("fp16_fp32_sum", 0), ("int4", 1), ("powersgd", 1)])
def test_errors_of_compressed_gradients_are_state_of_several_replicas(compression: str, errors: int) -> None:
    config = load(overrides=["optimizer.name=adamw", f"communication.compression={compression}"])
    assert copies_per_weight(config, dp=1) == (1, 2)
    assert copies_per_weight(config, dp=4) == (1, 2 + errors)
