"""A Llama and a Qwen3 train in our blocks as transformers' own modules do in a plain loop, however they are cut."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from huggingface import OWN_FAMILIES, WORDS, write_own_family
from jobs import steps, summary

from hvd_transformer.checkpoint.stored_tensors import StoredTensors
from hvd_transformer.config import load
from hvd_transformer.data.batches import WindowDataset
from hvd_transformer.data.sampler import Replica, StepSampler
from hvd_transformer.models.llama_weights import their_names
from hvd_transformer.models.positions import rotary_rates

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed

LENGTH, STEPS, RATE = 12, 3, 0.1
PIPELINE = ["parallel.pipeline=2", "parallel.micro_batches=2", "parallel.partition=uniform"]
TENSOR = ["parallel.tensor=2", "parallel.vocab_parallel=true"]
# By name: world size, and how the work is cut.
MODES = {
    "alone": (1, []),
    "dp": (2, ["communication.bucket_mb=0.01"]),
    "tp": (2, TENSOR),
    "pp": (1, [*PIPELINE, "parallel.recompute=always"]),
    "dp-tp-pp": (4, [*PIPELINE, *TENSOR, "parallel.optimizer_shard=state"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A text, and a model of each family."""
    root, rng = tmp_path_factory.mktemp("own-blocks"), random.Random(3)
    (root / "text").mkdir()
    for split, number in {"train": 800, "valid": 60, "test": 40}.items():
        (root / "text" / f"{split}.txt").write_text(" ".join(rng.choices(WORDS, k=number)) + "\n")
    for name in OWN_FAMILIES:
        write_own_family(root / name, name)
    return root


def settings(folder: Path, name: str) -> list[str]:
    return [
        f"model.pretrained={folder / name}", f"data.source={folder / 'text'}", f"data.cache_dir={folder / 'cache'}",
        "data.workers=1", f"data.sequence_length={LENGTH}", "training.batch_size=4", "training.global_batch_size=16",
        "training.precision=fp64", "training.device=cpu", f"training.max_steps={STEPS}", "training.log_every=1",
        "optimizer.name=sgd", f"optimizer.lr={RATE}", "optimizer.lr_scaling=none", "optimizer.schedule=constant",
        "optimizer.warmup_steps=0", "optimizer.clip_norm=none", "optimizer.weight_decay=0",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def done(world, folder, tmp_path_factory) -> Path:
    """The folder of all runs."""
    root = tmp_path_factory.mktemp("runs")
    for mode, (size, words) in MODES.items():
        for name in OWN_FAMILIES:
            world(size).train(
                [
                    *settings(folder, name),
                    *words,
                    f"output_dir={root / f'{name}-{mode}'}",
                ]
            )
    return root


def exact_norm(norm: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
    return norm.weight * values * torch.rsqrt(values.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def in_float64(model: torch.nn.Module) -> None:
    """transformers computes the angles of the rotation, and the norms, in float32, whatever the model's dtype is."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(exact_norm, module)
    inner = model.model.rotary_emb
    config = load(
        overrides=[
            f"model.pretrained={model.name_or_path}",
            f"data.sequence_length={LENGTH}",
        ]
    ).model
    width = config.head_width or config.d_model // config.num_heads
    rates, factor = rotary_rates(width, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(inner.inv_freq.double(), rates, rtol=1e-6, atol=0)
    assert inner.attention_scaling == pytest.approx(factor)

    def forward(values: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * rates
        both = torch.cat([angles, angles], -1)
        return factor * both.cos(), factor * both.sin()

    inner.forward = forward


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OWN_FAMILIES)
def test_training_is_transformers_own_however_it_is_cut(folder, done, name):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
    in_float64(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
    text = (folder / "text" / "train.txt").read_text()
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]).numpy()
    samples = WindowDataset(tokens, LENGTH, seed=1)
    losses = []
    for step in StepSampler(samples.num_items, 16, 16, Replica()).epoch():
        (items,) = step.accumulation
        inputs, targets = samples.batch(0, items)
        loss = F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for weight, grad in zip(model.parameters(), grads, strict=True):
                weight -= RATE * grad
        if len(losses) == STEPS:
            break
    theirs = model.state_dict()
    for mode in MODES:
        run = done / f"{name}-{mode}"
        assert [loss for _, loss in steps(run, "loss")] == pytest.approx(losses, rel=1e-9), mode
        config = load(file=run / "config.yaml").model
        ours = StoredTensors(run / "checkpoints" / "latest", "model.safetensors")
        names = their_names(config)
        assert set(ours.names) == set(names)
        for own, pieces in names.items():
            wanted = torch.cat([theirs[piece] for piece in pieces])
            difference = float((ours.whole(own) - wanted).abs().max())
            assert difference < 1e-9, f"{mode}, {own}: {difference}"


def test_an_export_is_the_folder_again(world, folder, done, tmp_path):
    """What was trained on four ranks, as transformers reads it; weights are exported in float64, too."""
    run = done / "qwen3-dp-tp-pp"
    exported = world(1).command("hvd-transformer", "export", run, tmp_path / "exported", "--format", "transformers")
    assert exported.returncode == 0, exported.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    ours = StoredTensors(run / "checkpoints" / "latest", "model.safetensors")
    names = their_names(load(file=run / "config.yaml").model)
    theirs = model.state_dict()
    assert {piece for pieces in names.values() for piece in pieces} == set(theirs)
    for own, pieces in names.items():
        assert torch.equal(ours.whole(own), torch.cat([theirs[piece] for piece in pieces])), own
    first, second = (
        transformers.AutoTokenizer.from_pretrained(place)("the room was very good")["input_ids"]
        for place in (folder / "qwen3", tmp_path / "exported")
    )
    assert first == second


def test_a_checkpoint_is_evaluated_and_generates(world, folder, done):
    """It needs the folder no more: its configuration and tokenizer are complete."""
    (folder / "llama").rename(folder / "gone")
    try:
        run = done / "llama-dp-tp-pp"
        found = world(1).command("hvd-transformer", "evaluate", run, "--split", "test", "--json")
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["metrics"]["loss"] == pytest.approx(summary(run)["test_loss"], rel=1e-9)
        written = world(1).command("hvd-transformer", "generate", run, "--prompt", "the room", "--tokens", "5")
        assert written.returncode == 0 and written.stdout.startswith("the room"), written.stderr
    finally:
        (folder / "gone").rename(folder / "llama")
