"""FLOPs of models of transformers: against torch's counter on real steps, and against closed forms."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chats import UNMARKED, conversations, write_chat_model, write_conversations
from huggingface import write_bert, write_gpt, write_marian
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hvd_transformer.config import load
from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.data.build_once import ALONE
from hvd_transformer.data.sampler import Replica
from hvd_transformer.models.counted_flops import CountedFlops, counted_flops
from hvd_transformer.models.flops import classifier_flops, language_model_flops
from hvd_transformer.tasks.registry import task_class

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

D, H, LAYERS, F, V, R = 32, 4, 3, 48, 90, 5
OURS = ModelConfig(num_layers=LAYERS, d_model=D, num_heads=H, d_feedforward=F)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=V, hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=H, intermediate_size=F, num_labels=3
    )
    return transformers.BertForSequenceClassification(config)


def gpt() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=V, n_embd=D, n_layer=LAYERS, n_head=H, n_inner=F, n_positions=64, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def counted(loss: Callable[[], Tensor]) -> int:
    """Of a real forward and backward. Attention keeps its weights for backward: no kernel computes them again."""
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        loss().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", [(1, 2), (7, 20), (2, 51)])
@pytest.mark.parametrize("make", [bert, gpt])
def test_flops_are_those_of_real_steps(make: Callable[[], nn.Module], shape: tuple[int, int]) -> None:
    """Also of batches that are longer or shorter than all that were counted."""
    model, tokens = make().train(), torch.ones(shape, dtype=torch.int64)
    allowed = torch.ones_like(tokens)
    allowed[0, -1] = 0
    found = CountedFlops(model, {"input_ids": 40}).of_batch(shape[0], [shape[1]])
    assert found == pytest.approx(counted(lambda: model(tokens, attention_mask=allowed).logits.sum()), rel=1e-9)
    wanted = classifier_flops(OURS, 3, shape) if make is bert else language_model_flops(OURS, V, shape)
    assert found == pytest.approx(wanted, rel=1e-9)


def test_frozen_weights_have_no_gradients_under_lora() -> None:
    length = 30
    adapted = peft.get_peft_model(gpt(), peft.LoraConfig(r=R, target_modules=["c_attn"], fan_in_fan_out=True))
    attention, block, head = D * 3 * D, D * 3 * D + D * D + 2 * D * F, D * V
    scores = 2 * length * D  # per position and layer: queries with keys, weights with values
    forward = LAYERS * (block + scores + D * R + R * 3 * D) + head
    # The first block's input needs no gradient, as the embedding is frozen; of adapters the weights need one, too.
    backward = LAYERS * (block + 2 * scores) - attention + head + LAYERS * 2 * (D * R + R * 3 * D) - D * R
    found = CountedFlops(adapted, {"input_ids": 40}).of_batch(3, [length])
    assert found == pytest.approx(2 * 3 * length * (forward + backward), rel=1e-9)


def test_counting_leaves_no_trace() -> None:
    model = bert().train()
    model.gradient_checkpointing_enable()  # whose second forward does not count
    before, state = {name: weight.clone() for name, weight in model.state_dict().items()}, torch.get_rng_state()
    found = CountedFlops(model, {"input_ids": 40}).of_batch(2, [40])
    assert found == pytest.approx(classifier_flops(OURS, 3, (2, 40)), rel=1e-9)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert all(weight.grad is None and weight.device.type == "cpu" for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_model_that_looks_at_values_has_no_flops(caplog: pytest.LogCaptureFixture) -> None:
    class Peeks(nn.Linear):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return super().forward(input_ids.float() if input_ids.sum() > 0 else attention_mask.float())

    with caplog.at_level("INFO", "hvd_transformer"):
        assert counted_flops(Peeks(4, 4), {"input_ids": 4}) is None
    assert "no mfu: FLOPs of Peeks cannot be counted" in caplog.text


PAIRS = ["a room was clean", "the room was not very good", "bad and clean and good"] * 20


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("classification", ()),
        ("language_model", ()),
        ("language_model", ("data.messages_column=messages", "data.sequence_length=60", "model.lora_rank=4")),
        ("translation", ("data.source_language=de", "data.target_language=en", "data.target_length=20")),
    ],
)
def test_a_batch_of_each_task(task: str, words: tuple[str, ...], tmp_path: Path) -> None:
    model, source = tmp_path / "model", tmp_path / "data"
    source.mkdir()
    if task == "classification":
        write_bert(model)
        source /= "reviews.csv"
        source.write_text("label,text\n" + "good,a clean room\nbad,bad and not good\n" * 20)
    elif task == "translation":
        write_marian(model, PAIRS)
        for split in ("train", "valid"):
            (source / f"{split}.de").write_text("\n".join(PAIRS) + "\n")
            (source / f"{split}.en").write_text("\n".join(reversed(PAIRS)) + "\n")
    elif words:
        write_chat_model(model, UNMARKED)
        for split in ("train", "valid"):
            write_conversations(source / f"{split}.jsonl", conversations(9))
    else:
        write_gpt(model)
        source /= "text.txt"
        source.write_text("the room was very good and the room was not bad\n" * 30)
    config = load(
        overrides=[
            f"task={task}", f"model.pretrained={model}", f"data.source={source}", f"data.cache_dir={tmp_path}",
            "data.workers=1", "data.sequence_length=12", "training.batch_size=5", "training.device=cpu", *words,
        ]
    )  # fmt: skip
    chosen = task_class(config)
    found = chosen(config, chosen.prepare(config, ALONE), Replica())
    batch = found.batch(0, range(5) if task == "language_model" and not words else range(1))
    inputs, targets, _ = found.micro_batch(batch)
    found.model.train()
    assert found.flops(batch) == 0.0
    found.count_flops()
    assert found.flops(batch) == pytest.approx(counted(lambda: found.layers[0].run(*inputs, *targets)), rel=1e-9)
