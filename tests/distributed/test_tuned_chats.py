"""Instruction tuning, of all weights or by LoRA, is a plain loop of torch, transformers and peft on 1 rank and on 2."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from chats import MARKED, UNMARKED, conversations, write_chat_model, write_conversations
from fake_world import FakeWorld
from fine_tuning import SEED, SETTINGS, difference, reference
from jobs import steps, summary, weights
from safetensors.torch import load_file
from torch import Tensor, nn

from hvd_transformer.config import load
from hvd_transformer.data.batches import LengthBuckets
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.length_order import LengthOrder
from hvd_transformer.data.sampler import Replica
from hvd_transformer.models.llama_weights import their_names
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.tasks.registry import task_class
from hvd_transformer.training.job_setup import make_task
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

STEPS, BATCH, GLOBAL = 20, 3, 6
LORA = ["model.lora_rank=4", "model.lora_alpha=16"]
# The model, and the settings by name of the run: world size, and how the work is cut.
CASES = {
    "gpt": ([], {"replicas": (2, ["parallel.micro_batches=2"])}),
    "llama": ([], {"replicas": (2, ["parallel.pipeline=2"])}),
    "lora": (
        LORA,
        {"alone": (1, []), "replicas": (2, ["parallel.optimizer_shard=state", "parallel.recompute=always"])},
    ),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("chats")
    write_chat_model(found / "gpt", UNMARKED)
    write_chat_model(found / "llama", MARKED, "llama")
    write_chat_model(found / "lora", UNMARKED)
    for split, number in {"train": 33, "valid": 7}.items():
        write_conversations(found / "data" / f"{split}.jsonl", conversations(number, number))
    return found


def settings(root: Path, name: str, *more: str) -> list[str]:
    return [
        f"model.pretrained={root / name}", f"data.source={root / 'data'}", "data.messages_column=messages",
        f"data.cache_dir={root / 'cache'}", "data.sequence_length=60", f"training.batch_size={BATCH}",
        f"training.global_batch_size={GLOBAL}", f"training.max_steps={STEPS}", *SETTINGS, *CASES[name][0], *more,
    ]  # fmt: skip


def of_chats(root: Path, model: nn.Module) -> Iterator[list[tuple[Tensor, int]]]:
    """The transformers way: its masks, made from marks in the template; its padding and attention mask."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(root / "gpt", padding_side="right")
    lines = (root / "data" / "train.jsonl").read_text().splitlines()
    samples = [
        tokenizer.apply_chat_template(
            json.loads(line)["messages"], chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
        )
        for line in lines
    ]
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples]).numpy()
    batches = LengthBuckets(LengthOrder.of(lengths), BATCH, None, SEED)
    epoch = 0
    while True:
        for step in batches.sampler(GLOBAL // BATCH, Replica()).epoch(epoch=epoch):
            parts = []
            for [unit] in step.accumulation:
                chosen = [samples[number] for number in batches.item(epoch, unit)]
                inputs = tokenizer.pad({"input_ids": [one["input_ids"] for one in chosen]}, return_tensors="pt")
                labels = torch.full_like(inputs["input_ids"], -100)
                for row, one in enumerate(chosen):
                    mask = torch.tensor(one["assistant_masks"]).bool()
                    labels[row, : len(mask)][mask] = torch.tensor(one["input_ids"])[mask]
                logits, goals = model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                parts.append((F.cross_entropy(logits, goals, reduction="sum"), int((goals != -100).sum())))
            yield parts
        epoch += 1


def plain_model(root: Path, name: str) -> nn.Module:
    torch.manual_seed(SEED)  # of the adapters
    torch.set_default_dtype(torch.float64)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float64)
        if name == "lora":
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM"))
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def as_ours(root: Path, name: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by the names of our blocks, where those are trained."""
    if name != "llama":
        return found
    names = their_names(load(overrides=settings(root, name)).model)
    return {ours: torch.cat([found[piece] for piece in pieces]) for ours, pieces in names.items()}


@pytest.mark.parametrize("name", CASES)
def test_it_is_a_plain_loops(world, root: Path, name: str) -> None:
    model = plain_model(root, name)
    wanted_losses, trained = reference(model, of_chats(root, model), STEPS)
    wanted = as_ours(root, name, trained)
    for mode, (size, words) in CASES[name][1].items():
        run = root / f"{name}-{mode}"
        world(size).train([*settings(root, name, *words), f"output_dir={run}"])
        # The norms of transformers' Llama compute in float32.
        exact = 1e-6 if name == "llama" else 1e-9
        assert [loss for _, loss in steps(run, "loss")] == pytest.approx(wanted_losses, rel=exact), mode
        assert difference(weights(run), wanted) < 10 * exact, mode
    assert len({round(summary(root / f"{name}-{mode}")["valid_loss"], 9) for mode in CASES[name][1]}) == 1


def test_a_checkpoint_holds_the_adapters_alone_and_resumes_bit_for_bit(world, root: Path) -> None:
    run = root / "stopped"
    for last in (7, STEPS):
        world(1).train([*settings(root, "lora"), f"output_dir={run}", f"training.max_steps={last}"])
    checkpoint = run / "checkpoints" / "latest"
    found, other = weights(run), weights(root / "lora-alone")
    assert difference(found, other) == 0
    assert all(".lora_A." in name or ".lora_B." in name for name in found)
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert {name.partition(".")[2] for name in moments} == found.keys()


def test_gradients_of_the_adapters_alone_travel(root: Path) -> None:
    """Two matrices of rank 4 beside the one from 16 to 48 numbers of each of two layers, in float64."""
    config, world = load(overrides=settings(root, "lora")), FakeWorld()
    mesh = ParallelMesh.of(config, world)
    data = task_class(config).prepare(config, ALONE)
    trainer = Trainer(config, world, mesh, make_task(config, data, mesh), TrainState())
    world.sent.clear()
    trainer.step(next(trainer.steps()))
    trainer.close()
    sent = sum(tensor.nbytes for name, tensor in world.sent.items() if name.startswith("bucket"))
    assert sent == 8 * 2 * 4 * (16 + 48)
    assert sum(tensor.nbytes for tensor in world.sent.values()) < sent + 1000  # losses and counts beside
