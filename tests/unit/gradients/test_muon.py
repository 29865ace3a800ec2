"""Muon is torch's, matrix by matrix, on any number of ranks, with any shards and splits: bit for bit the same."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from plain_muon import by_singular_values, closed_form_in_torch
from thread_world import make_worlds, on_ranks
from torch import Tensor, nn

from hvd_transformer.comm.group import Group
from hvd_transformer.comm.world import World
from hvd_transformer.config.schema import ModelConfig, OptimizerConfig
from hvd_transformer.gradients import shared_matrices
from hvd_transformer.gradients.buffers import WHOLE, ZeroShard, make_grad_buffers
from hvd_transformer.gradients.muon import STEPS as ORTHOGONALISING_STEPS
from hvd_transformer.gradients.muon import hidden_matrices, orthogonalise, orthogonalise_cost
from hvd_transformer.gradients.optimizer import FlatOptimizer, names_without_decay
from hvd_transformer.gradients.shared_matrices import SharedMatrices
from hvd_transformer.models.classifier import Classifier
from hvd_transformer.models.encoder_decoder import EncoderDecoder
from hvd_transformer.models.language_model import LanguageModel
from hvd_transformer.parallel.tensor_parallel import piece

CONFIG = OptimizerConfig(name="muon", weight_decay=0.1, eps=1e-4)
MODEL = ModelConfig(num_layers=2, d_model=12, num_heads=6, d_feedforward=18, position="learned")
STEPS = 4


@pytest.fixture
def closed_form() -> Iterator[None]:
    with closed_form_in_torch():
        yield


def language_model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(10, MODEL).double()


def gradient(name: str, weight: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def of_torch() -> dict[str, Tensor]:
    """The weights after some steps of torch's optimizers, each matrix of a stacked one by itself."""
    model = language_model()
    hidden = {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in LAYERS}
    weights = dict(model.named_parameters())
    alone = [part for name in sorted(hidden) for part in parts(name, weights[name].detach())]
    free = names_without_decay(model)
    muon = torch.optim.Muon(alone, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [weight for name, weight in weights.items() if name in free], "weight_decay": 0.0},
        {"params": [weight for name, weight in weights.items() if name not in free | hidden], "weight_decay": 0.1},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-4)
    for step in range(STEPS):
        for name, weight in weights.items():
            weight.grad = gradient(name, weight, step)
        for matrix, grad in zip(
            alone,
            (part for name in sorted(hidden) for part in parts(name, gradient(name, weights[name], step))),
            strict=True,
        ):
            matrix.grad = grad
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}


LAYERS = ("attention.qkv", "attention.output", "feedforward.input", "feedforward.output")


def parts(name: str, whole: Tensor) -> list[Tensor]:
    """Views: query, key and value apart."""
    return list(whole.chunk(3)) if "qkv" in name else [whole]


def rate(step: int) -> float:
    return 0.02 * (step + 1)


def train(
    dp: int = 1, tp: int = 1, zero: str = "none", bucket_bytes: int = 2000, dtype: torch.dtype = torch.float64
) -> list[dict[str, Tensor]]:
    """The same on ranks that are threads: the weights of each."""
    model = language_model().to(dtype)
    shapes = {name: weight.shape for name, weight in model.named_parameters()}
    hidden = {
        name for name, weight in model.named_parameters() if any(weight is one for one in hidden_matrices([model]))
    }
    free, splits = names_without_decay(model), model.cuts(False)

    def of_rank(world: World) -> dict[str, Tensor]:
        dp_rank, tp_rank = divmod(world.rank, tp)
        replicas, tensor_group = (
            world.group(range(tp_rank, dp * tp, tp)),
            world.group(range(dp_rank * tp, dp_rank * tp + tp)),
        )

        def own(name: str, whole: Tensor) -> Tensor:
            return piece(whole, splits[name], tp_rank, tp).clone() if name in splits else whole.clone()

        named = {name: nn.Parameter(own(name, weight.detach())) for name, weight in model.named_parameters()}
        shard = WHOLE if zero == "none" else ZeroShard(dp_rank, dp, zero == "gradients")
        buffers = make_grad_buffers(named, free, bucket_bytes, shard=shard, apart=hidden)
        matrices = SharedMatrices(
            [buffer for buffer in buffers if buffer.slots[0].name in hidden], splits=splits, shapes=shapes,
            replicas=replicas, tensor_group=tensor_group, cost=orthogonalise_cost, name="muon",
        )  # fmt: skip
        optimizer = FlatOptimizer(CONFIG, buffers, matrices)
        for step in range(STEPS):
            for buffer in buffers:
                flat = torch.zeros_like(buffer.parameters)
                for slot in buffer.slots:
                    whole = gradient(slot.name, torch.empty(shapes[slot.name], dtype=dtype), step)
                    slot.view(flat).copy_(own(slot.name, whole))
                buffer.own_gradients.copy_(flat[buffer.own])
            optimizer.step(rate(step))
        for buffer in buffers:  # as after each update with ZeRO
            if buffer.shard.count > 1:
                buffer.parameters.copy_(replicas.all_gather_async(buffer.own_parameters, "all")())
        return {name: weight.detach() for name, weight in named.items()}

    results = on_ranks(make_worlds(dp * tp), of_rank)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert not failed, failed
    return results


def check_is_whole(results: list[dict[str, Tensor]], wanted: dict[str, Tensor], tp: int, **limits: float) -> None:
    splits = language_model().cuts(False)
    for rank, found in enumerate(results):
        for name, weight in found.items():
            want = piece(wanted[name], splits[name], rank % tp, tp) if name in splits else wanted[name]
            torch.testing.assert_close(weight, want, **limits, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.usefixtures("closed_form")
@pytest.mark.parametrize("bucket_bytes", [1, 2000, 2**20])
def test_a_single_rank_does_what_torchs_optimizers_do(bucket_bytes: int) -> None:
    check_is_whole(train(bucket_bytes=bucket_bytes), of_torch(), 1, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("dp", "tp", "zero"),
    [(3, 1, "none"), (13, 1, "none"), (3, 1, "state"), (13, 1, "gradients"), (1, 2, "none"), (2, 3, "none"),
     (2, 3, "state"), (2, 3, "gradients")],
)  # fmt: skip
def test_any_number_of_ranks_computes_the_same_bits(dp: int, tp: int, zero: str) -> None:
    """13 replicas have more ranks than buffers have matrices; shards cut matrices anywhere."""
    (wanted,) = train(dtype=torch.float32)
    check_is_whole(train(dp, tp, zero, dtype=torch.float32), wanted, tp, rtol=0, atol=0)


@pytest.mark.parametrize("dp", [3, 13])
def test_no_message_is_larger_than_horovod_can_count(dp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (wanted,) = train(dtype=torch.float32)
    sent: dict[int, list[int]] = {rank: [] for rank in range(dp)}
    gather = Group.all_gather_async

    def recorded(group: Group, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        if name.endswith(".spread"):
            sent[group.rank].append(tensor.nbytes)
        return gather(group, tensor, name)

    monkeypatch.setattr(Group, "all_gather_async", recorded)
    for most in (1 << 30, 2400, 1):
        monkeypatch.setattr(shared_matrices, "MAX_MESSAGE", most)
        check_is_whole(train(dp, dtype=torch.float32), wanted, 1, rtol=0, atol=0)
        together = [sum(sizes) for sizes in zip(*sent.values(), strict=True)]
        largest = max(max(sizes) for sizes in sent.values())  # which is one matrix where `most` is 1
        assert max(together) <= (most if most > 1 else largest)
        assert len(together) == STEPS * {1 << 30: 1, 2400: 4, 1: 12}[most]
        for sizes in sent.values():
            sizes.clear()


def test_replicas_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is orthogonalised once per step, and no rank has much more to do than another."""
    work: Counter[int] = Counter()

    def counted(matrix: Tensor) -> Tensor:
        work[threading.get_ident()] += orthogonalise_cost(tuple(matrix.shape))
        return orthogonalise(matrix)

    monkeypatch.setattr("hvd_transformer.gradients.muon.orthogonalise", counted)
    train()
    (alone,) = work.values()
    work.clear()
    train(dp=2, tp=2)
    assert sum(work.values()) == alone and len(work) == 4
    assert max(work.values()) < 1.2 * alone / 4


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("shape", [(40, 40), (20, 39), (20, 40), (20, 80), (80, 20), (1, 7), (7, 1)])
def test_singular_values_are_about_one_and_vectors_stay(shape: tuple[int, int], size: float) -> None:
    torch.manual_seed(0)
    matrix = size * torch.randn(shape, dtype=torch.float64)
    found = orthogonalise(matrix)
    torch.testing.assert_close(found, by_singular_values(matrix), rtol=1e-10, atol=1e-11)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.t() @ found @ right.t()
    large = values > 0.02 * values[0]
    assert ((inner.diag()[large] > 0.7) & (inner.diag()[large] < 1.3)).all()
    torch.testing.assert_close(inner, inner.diag().diag(), rtol=0, atol=1e-11)


def test_a_zero_matrix_stays_zero() -> None:
    for shape in ((20, 30), (20, 80)):
        assert not orthogonalise(torch.zeros(shape)).any()


def test_the_steps_bring_singular_values_from_a_hundredth_on_near_one() -> None:
    """Polar Express: no three polynomials of degree 5 do better than 0.27 at the worst."""
    values = torch.linspace(0.01, 1, 10_000, dtype=torch.float64)
    for a, b, c in ORTHOGONALISING_STEPS:
        values = a * values + b * values**3 + c * values**5
    assert (values - 1).abs().max() < 0.275


@pytest.mark.parametrize("rank", [1, 3, 40])
def test_bfloat16_does_not_diverge(rank: int) -> None:
    """As on a GPU. The largest singular values are the dangerous ones: of a matrix of low rank they meet the bound."""
    torch.manual_seed(0)
    matrix = (torch.randn(40, rank) @ torch.randn(rank, 60)).bfloat16()
    values = torch.linalg.svdvals(orthogonalise(matrix).float())
    assert 0.6 < values[0] < 1.4


def test_float32_is_near_float64() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(64, 200, dtype=torch.float64)
    torch.testing.assert_close(orthogonalise(matrix.float()).double(), orthogonalise(matrix), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_hidden_matrices_are_neither_embeddings_nor_the_output_layer(tie_embeddings: bool) -> None:
    config = MODEL.model_copy(update={"num_layers": 1, "tie_embeddings": tie_embeddings})
    blocks = {f"attention.{part}.weight" for part in ("qkv", "output")}
    blocks |= {f"feedforward.{part}.weight" for part in ("input", "output")}
    cross = {f"cross.{part}.weight" for part in ("query", "key_value", "output")}
    for model, wanted in (
        (LanguageModel(10, config), {f"blocks.0.{name}" for name in blocks}),
        (
            EncoderDecoder(10, 11, config),
            {f"encoder.0.{name}" for name in blocks} | {f"decoder.0.{name}" for name in blocks | cross},
        ),
        (Classifier(10, 3, config), {f"blocks.0.{name}" for name in blocks} | {"head.dense.weight"}),
    ):
        found = {id(weight) for weight in hidden_matrices([model])}
        assert {name for name, weight in model.named_parameters() if id(weight) in found} == wanted


def test_hidden_matrices_are_no_biases() -> None:
    """Marian's has the shape [1, V], and comes before the output layer."""
    model = nn.Module()
    model.hidden = nn.Linear(4, 4)
    model.final_logits_bias = nn.Parameter(torch.zeros(1, 10))
    model.head = nn.Linear(4, 10)
    (found,) = hidden_matrices([model])
    assert found is model.hidden.weight
