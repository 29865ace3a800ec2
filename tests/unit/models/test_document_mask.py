"""Windows over several documents: each document computes what it computes alone, and nothing of another reaches it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from plain_transformer import scatter_weights
from torch import Tensor

from hvd_transformer.config.schema import ModelConfig
from hvd_transformer.models import documents
from hvd_transformer.models.language_model import LanguageModel, language_model_layers
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.nn.dropout import dropout_key
from hvd_transformer.nn.kernel_library import load_library
from hvd_transformer.nn.kernels import FusibleLayer, Kernels
from hvd_transformer.parallel.pipeline import Pipeline, Stage

VOCABULARY, END, LENGTH = 13, 1, 24
POSITIONS = ["sinusoidal", "learned", "rotary"]
CPU = torch.device("cpu")


def model(**changes: object) -> LanguageModel:
    small = {"num_layers": 2, "d_model": 16, "num_heads": 4, "d_feedforward": 20, "max_length": LENGTH}
    made = LanguageModel(VOCABULARY, ModelConfig(**{**small, **changes}))
    scatter_weights(made)
    return made


def windows() -> Tensor:
    """[3, T + 1]: begins within a document, documents of one token, a single one."""
    tokens = torch.randint(2, VOCABULARY, (3, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    tokens[0, [4, 5, 17]] = END
    tokens[1, [0, 2, 11, LENGTH - 1]] = END
    return tokens


def pieces(row: Tensor) -> list[tuple[int, int]]:
    """The first and last + 1 of each document in the inputs of a window [T + 1]."""
    ends = [place + 1 for place, token in enumerate(row[:-1].tolist()) if token == END]
    bounds = [0, *ends, len(row) - 1]
    return [(first, last) for first, last in zip(bounds, bounds[1:], strict=False) if first < last]


def loss_alone(ours: LanguageModel, tokens: Tensor) -> Tensor:
    """Every document as a text of its own through the same weights."""
    return sum(
        F.cross_entropy(ours(row[None, first:last])[0], row[first + 1 : last + 1], reduction="sum")
        for row in tokens
        for first, last in pieces(row)
    )


def run(ours: LanguageModel, tokens: Tensor, until: int | None = None) -> Tensor:
    """The layers up to this one; all: the loss of windows [B, T + 1]."""
    *layers, head = language_model_layers(ours, END)
    tensors = (tokens[:, :-1],)
    for layer in layers:
        tensors = layer.run(*tensors)
    return tensors[0] if until is not None else head.run(*tensors, tokens[:, 1:])


def use_kernels(ours: LanguageModel, folder: Path) -> None:
    kernels = Kernels(load_library(folder))
    for module in ours.modules():
        if isinstance(module, FusibleLayer):
            module.kernels = kernels


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2, "qk_norm": True, "norm_type": "rms"}])
@pytest.mark.parametrize("position", POSITIONS)
def test_losses_and_gradients_are_those_of_each_document_alone(position: str, changes: dict) -> None:
    ours, tokens = model(position=position, **changes).double(), windows()
    reference = loss_alone(ours, tokens)
    names = [name for name, _ in ours.named_parameters()]
    wanted = torch.autograd.grad(reference, ours.parameters())
    loss = run(ours, tokens)
    torch.testing.assert_close(loss, reference, rtol=1e-11, atol=0)
    loss.backward()
    for name, grad in zip(names, wanted, strict=True):
        torch.testing.assert_close(ours.get_parameter(name).grad, grad, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("position", POSITIONS)
def test_compiled_attention_too(position: str, library: Path) -> None:
    ours, tokens = model(position=position), windows()
    reference = loss_alone(ours, tokens)
    wanted = torch.autograd.grad(reference, ours.parameters())
    use_kernels(ours, library)
    loss = run(ours, tokens)
    torch.testing.assert_close(loss, reference, rtol=1e-5, atol=0)
    loss.backward()
    for parameter, grad in zip(ours.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["evaluation", "training", "dropout", "kernels", "kernels and dropout", "bf16"])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_changed_document_changes_no_other_by_anything(position: str, way: str, library: Path) -> None:
    ours, tokens = model(position=position, dropout=0.2 if "dropout" in way else 0.0), windows()
    ours.train(way != "evaluation")
    if "kernels" in way:
        use_kernels(ours, library)

    def hidden(tokens: Tensor) -> Tensor:
        with dropout_key(1, 2), torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
            return run(ours, tokens, until=-1)

    before = hidden(tokens)
    documents_of = [(number, piece) for number in range(len(tokens)) for piece in pieces(tokens[number])]
    for row, (first, last) in documents_of:
        if last - first < 2:
            continue  # nothing but its end, or one token that must stay none
        changed = tokens.clone()
        changed[row, first] = 2 + (changed[row, first] - 1) % (VOCABULARY - 2)
        after = hidden(changed)
        own = torch.zeros(before.shape[:2], dtype=torch.bool)
        own[row, first:last] = True
        assert torch.equal(after[~own], before[~own])
        assert (after[own] != before[own]).any(-1).all(), "each token of the document sees the change"


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_stages_repeat_it_and_make_one_mask_per_micro_batch(num_stages: int, recompute: str, monkeypatch) -> None:
    whole, ours, tokens = model(num_layers=4).double(), model(num_layers=4).double(), windows()
    wanted = run(whole, tokens)
    wanted.backward()
    made: list[torch.dtype] = []
    plain = documents.document_mask
    monkeypatch.setattr(documents, "document_mask", lambda *words: made.append(words[1]) or plain(*words))
    layers = language_model_layers(ours, END)
    cuts = [len(layers) * stage // num_stages for stage in range(num_stages + 1)]
    stages = [Stage(layers[first:last], CPU) for first, last in zip(cuts, cuts[1:], strict=False)]
    pipeline = Pipeline(stages, recompute=recompute)
    losses: list[Tensor] = []
    batches = [MicroBatch((row[None, :-1],), (row[None, 1:],), (number,)) for number, row in enumerate(tokens)]
    pipeline.forward_backward([batches], 1.0, losses.append)
    pipeline.close()
    torch.testing.assert_close(sum(losses), wanted.detach(), rtol=1e-12, atol=0)
    for parameter, other in zip(ours.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-12)
    with_blocks = sum(any("blocks" in layer.name for layer in stage.layers) for stage in stages)
    assert made == [torch.float64] * len(batches) * with_blocks
