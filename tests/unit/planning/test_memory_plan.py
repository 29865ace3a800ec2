"""The memory and the bubble of a plan, against closed forms, torch's own optimizers and a real pipeline."""

import math
import os
from collections.abc import Callable, Iterable
from itertools import accumulate
from operator import itemgetter
from typing import Any

import pytest
import torch
from grad_sinks import Sink
from small_plan import LAYERS, SMALL, D, F, T, V, small_plan
from torch import Tensor
from torch._C._profiler import _EventType

from hvd_transformer.config import load
from hvd_transformer.data.sampler import Replica, StepSampler
from hvd_transformer.errors import UserError
from hvd_transformer.gradients.weight_grads import WeightGradStore
from hvd_transformer.models.language_model import LanguageModel, language_model_layers
from hvd_transformer.nn import cross_entropy, matmul
from hvd_transformer.nn.contracts import MicroBatch
from hvd_transformer.nn.parallel_layers import WeightGradLayer
from hvd_transformer.parallel.pipeline import Pipeline, Stage
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES
from hvd_transformer.planning.layer_profile import ParameterGrads
from hvd_transformer.planning.memory_plan import RECOMPUTES, MemoryPlan, StageCost, make_plan, num_replicas, vocabulary
from hvd_transformer.planning.plan_text import plan_text

# Each of both once, or all pairs.
PAIRS = [
    (schedule, recompute)
    for first, schedule in enumerate(SCHEDULES)
    for second, recompute in enumerate(RECOMPUTES)
    if "EVERY_CASE" in os.environ or (first + second) % 3 == 0
]

# Weights of one block: qkv and output; the two of the feed-forward part; two norms. Each with its biases.
BLOCK = (3 * D * D + 3 * D) + (D * D + D) + (D * F + F) + (F * D + D) + 4 * D


@pytest.mark.parametrize(
    ("words", "embedding", "head"),
    [
        (["model.tie_embeddings=false", "model.norm=post"], V * D, V * D + V),
        (["model.tie_embeddings=true", "model.norm=pre"], 0, V * D + 2 * D),
        (["model.tie_embeddings=true", "model.norm=post", "model.position=learned"], 16 * D, V * D),
    ],
)
def test_parameters_of_each_layer(words: list[str], embedding: int, head: int) -> None:
    """A tied matrix counts once, with the output layer."""
    plan = small_plan(*words)
    assert [layer.parameters for layer in plan.layers] == [embedding, *[BLOCK] * LAYERS, head]
    model = LanguageModel(V, plan.config.model)
    assert plan.parameters == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("vocabulary", [False, True])
def test_ranks_that_share_matrices_plan_for_one_of_them(vocabulary: bool) -> None:
    """What stays whole: norms, and the biases of what is summed."""
    words = ["model.tie_embeddings=false", "model.norm=post", "parallel.tensor=2"]
    plan = small_plan(*words, f"parallel.vocab_parallel={vocabulary}")
    block = (3 * D * D + 3 * D) // 2 + (D * D // 2 + D) + (D * F + F) // 2 + (F * D // 2 + D) + 4 * D
    own = V // 2 if vocabulary else V
    assert [layer.parameters for layer in plan.layers] == [own * D, *[block] * LAYERS, own * D + own]
    whole = small_plan(*words[:2])
    assert plan.layers[1].forward_flops * 2 == whole.layers[1].forward_flops
    assert "2 ranks split the matrices" in plan_text(plan, 80)


def test_the_tutorials_model() -> None:
    plan = make_plan(load("tutorial-1b"))
    assert plan.parameters == 1_041_453_167
    assert (plan.vocab_size, plan.vocab_origin.partition(":")[0]) == (28_783, "assumed")
    assert (plan.micro_batch_size, plan.num_micro_batches) == (3, 7)  # 20 samples in at most 8 pieces
    assert [plan.memory(stage)[:3] for stage in plan.stages] == [
        [4 * stage.parameters, 4 * stage.parameters, 0] for stage in plan.stages
    ]


def install_parameter_grads(model: LanguageModel, store: WeightGradStore) -> None:
    """Weight gradients are added to the parameters' own, as in training."""
    for module in model.modules():
        if isinstance(module, WeightGradLayer):
            module.weight_grads = ParameterGrads(module, store)


def test_activations_grow_with_the_micro_batches_in_flight() -> None:
    one, two, five = (
        small_plan(
            "parallel.pipeline=3", "parallel.partition=uniform", f"training.batch_size={2 * count}",
            f"parallel.micro_batches={count}",
        )
        for count in (1, 2, 5)
    )  # fmt: skip
    for number in range(3):
        single, pair, many = (plan.stages[number].activations for plan in (one, two, five))
        kept = pair["gpipe", "never"] - single["gpipe", "never"]
        assert many["gpipe", "never"] == single["gpipe", "never"] + 4 * kept
        assert many["1f1b", "never"] == single["1f1b", "never"] + (3 - number - 1) * kept


def test_a_recomputed_block_keeps_its_input_alone() -> None:
    words = ["parallel.pipeline=2", "parallel.partition=[3, 2]", "model.dropout=0"]
    many, one = (
        small_plan(*words, f"training.batch_size={count}", f"parallel.micro_batches={count}").stages[0].activations
        for count in (6, 1)
    )
    hidden = T * D * 4  # one sample, float32
    kept = T * 8 + 3 * hidden  # the token numbers, each block's input, the stage's output
    assert many["gpipe", "always"] == one["gpipe", "always"] + 5 * kept
    assert many["1f1b", "always"] == one["1f1b", "always"] + kept
    # At the first backward the last one is there as a whole.
    more = many["gpipe", "except_last"] - many["gpipe", "always"]
    assert more == (many["gpipe", "never"] - one["gpipe", "never"]) // 5 - kept


def really_allocated(run: Callable[[], object]) -> int:
    """The most bytes of tensors that torch's allocator had given out at once, beyond what it had before.

    What one operator takes and gives back itself does not count: a product of bfloat16 matrices may copy them to
    float32 and sum there, in buffers whose sizes depend on the instructions of the CPU.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = []
    left = [(event, None) for event in profile.profiler.kineto_results.experimental_event_tree()]
    while left:
        event, operator = left.pop()
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            changes.append((event.start_time_ns, fields.ptr, fields.alloc_size, operator))
        elif operator is None and event.name.startswith("aten::"):
            operator = event
        left += [(child, operator) for child in event.children]
    taken, sizes = {}, []
    for _, address, num_bytes, operator in sorted(changes, key=itemgetter(0)):
        sizes.append(num_bytes)
        if num_bytes > 0:
            taken[address] = len(sizes) - 1, operator
        elif address in taken:
            place, taker = taken.pop(address)
            if operator is not None and operator is taker:
                sizes[place] = sizes[-1] = 0
    return max(accumulate(sizes))


def planned_and_measured(schedule: str, recompute: str, more: list[str]) -> tuple[float, int, int]:
    """The peak of the plan and of the real pipeline; the bytes of the largest weight and output of a linear layer."""
    words = [f"parallel.schedule={schedule}", f"parallel.recompute={recompute}", "parallel.micro_batches=4"]
    config = load("python-docs", overrides=[*words, *more, "model.loss_chunk=32", "model.num_layers=2"])
    planned = make_plan(config, V).stages[0].activations[schedule, recompute]
    model = LanguageModel(V, config.model).train()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    model.embedding.embedding.embedding_grads = Sink(lambda tokens, rows: None)
    batches = [MicroBatch((torch.randint(0, V, (2, 128)),), (torch.randint(0, V, (2, 128)),)) for _ in range(4)]
    pipeline = Pipeline(
        [Stage(language_model_layers(model), torch.device("cpu"))],
        schedule=schedule, recompute=recompute, precision=config.training.precision,
    )  # fmt: skip
    install_parameter_grads(model, pipeline.stages[0].weight_grads)
    pipeline.forward_backward([batches[:1]], 1.0, [].append)  # makes the tables of positions
    measured = really_allocated(lambda: pipeline.forward_backward([batches], 1.0, [].append))
    largest = max(
        layer.weight.nbytes + 4 * 2 * 128 * layer.weight.size(0)
        for layer in model.modules()
        if isinstance(layer, WeightGradLayer)
    )
    return planned, measured, largest


@pytest.mark.parametrize(
    ("schedule", "recompute", "more"),
    [
        *((schedule, recompute, ["model.dropout=0.1"]) for schedule, recompute in PAIRS),
        *(("1f1b", recompute, ["model.norm=post", "training.precision=bf16"]) for _, recompute in PAIRS[::2]),
    ],
)
def test_the_pipelines_peak(schedule: str, recompute: str, more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the real pipeline's tensors take from the allocator at most is the plan's, where torch multiplies."""
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda _: False)
    planned, measured, _ = planned_and_measured(schedule, recompute, more)
    assert planned == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize(("schedule", "recompute"), PAIRS)
def test_the_pipelines_peak_where_onednn_multiplies(
    schedule: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one weight's gradient more, made beside the buffer, and the transpose of its output's gradient."""
    monkeypatch.setattr(matmul, "_onednn_is_faster", lambda _: True)
    planned, measured, largest = planned_and_measured(schedule, recompute, ["model.dropout=0.1"])
    assert 0.998 * planned <= measured <= 1.002 * planned + largest


@pytest.mark.parametrize("here", [True, False])
def test_logits_are_those_of_the_device(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch of 640 tokens: a GPU takes them at once, a CPU 256 at a time where the vocabulary is large."""
    monkeypatch.setattr(cross_entropy, "CPU_LOGITS", 256 * V)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    words = ["training.batch_size=64", "parallel.pipeline=2", "parallel.partition=[4, 1]"]
    gpu, cpu, auto = (
        small_plan(*words, f"training.device={device}").stages[1].activations for device in ("cuda", "cpu", "auto")
    )
    assert auto == (gpu if here else cpu)
    more = gpu["1f1b", "never"] - cpu["1f1b", "never"]
    # Logits, whose memory then holds their gradients; a loop over chunks still holds one of the chunk before.
    assert more >= (640 - 2 * 256) * V * 4


class MuonAndAdam:
    """torch's: Muon for the matrices of the blocks."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        model_weights = list(weights)
        hidden = [weight for weight in model_weights if weight.ndim == 2 and V not in weight.shape]
        others = [weight for weight in model_weights if not any(weight is one for one in hidden)]
        self._both = torch.optim.Muon(hidden), torch.optim.AdamW(others)

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()

    @property
    def state(self) -> dict[Any, Any]:
        return dict(self._both[0].state) | dict(self._both[1].state)


@pytest.mark.parametrize(
    ("words", "make"),
    [
        (["optimizer.name=sgd"], lambda weights: torch.optim.SGD(weights, lr=0.1)),
        (["optimizer.name=sgd", "optimizer.momentum=0.9"], lambda weights: torch.optim.SGD(weights, 0.1, 0.9)),
        (["optimizer.name=adam"], torch.optim.Adam),
        (["optimizer.name=adamw"], torch.optim.AdamW),
        (["optimizer.name=muon"], lambda weights: MuonAndAdam(weights)),
    ],
)
def test_optimizer_state_is_torchs(words: list[str], make) -> None:
    plan = small_plan(*words, "parallel.pipeline=2")
    model = LanguageModel(V, plan.config.model)
    optimizer = make(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    buffers = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    ]
    assert sum(stage.optimizer for stage in plan.stages) == sum(value.nbytes for value in buffers)
    assert sum(stage.gradients for stage in plan.stages) == sum(weight.grad.nbytes for weight in model.parameters())


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 1), (3, 5), (4, 16)])
def test_bubble_of_equal_stages(stages: int, count: int) -> None:
    config = load(overrides=[f"parallel.pipeline={stages}"])
    equal = [StageCost([], 0, 0, {}, forward_flops=7, backward_flops=14, deferred_flops=7)] * stages
    plan = MemoryPlan(config, 1, V, "", count, 1, count, [], equal)
    for schedule in ("gpipe", "1f1b"):
        assert plan.bubble(schedule) == pytest.approx((stages - 1) / (count + stages - 1))
    if count >= stages:  # Qi et al. 2023, section 3.1
        assert plan.bubble("zero_bubble") == pytest.approx((stages - 1) / (3 * count + stages - 1))


def test_auto_evens_out_the_flops() -> None:
    """Each block is as heavy as the next; the head of this vocabulary as about three of them."""
    words = [*SMALL, "parallel.pipeline=2", "model.num_layers=6", "parallel.partition=auto"]
    plan = make_plan(load(overrides=words), 600)
    costs = [layer.forward_flops + layer.backward_flops for layer in plan.layers]
    best = min(max(sum(costs[:cut]), sum(costs[cut:])) for cut in range(1, len(costs)))
    assert max(stage.forward_flops + stage.backward_flops for stage in plan.stages) == best
    assert max(sum(costs[:4]), sum(costs[4:])) > best  # the even cut is not the best one


def test_recompute_makes_backward_longer_by_the_blocks_forward() -> None:
    options = ["parallel.pipeline=2", "parallel.partition=[3, 2]", "parallel.micro_batches=3"]
    never, always = (small_plan(*options, f"parallel.recompute={kind}") for kind in ("never", "always"))
    forward = never.layers[1].forward_flops
    for number, blocks in enumerate((2, 1)):
        more = always.stages[number].backward_flops - never.stages[number].backward_flops
        assert more == blocks * forward > 0


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["data.vocab_size=300"], None, 300),
        (["data.vocab_size=300"], 500, 500),
        ([], None, 4096),  # the schema's default of byte pairs
        (["data.source=wikitext2", "data.tokenizer=basic_english"], None, 28_783),
    ],
)
def test_vocabulary(words: list[str], given: int | None, expected: int) -> None:
    assert make_plan(load(overrides=[*SMALL, *words]), given).vocab_size == expected


@pytest.mark.parametrize(
    "words",
    [
        ["data.source=input.txt", "data.tokenizer=char"],
        ["data.source=wikitext2", "data.tokenizer=basic_english", "data.min_frequency=2"],
        ["data.source=wikitext103", "data.tokenizer=basic_english"],
    ],
)
def test_a_vocabulary_that_only_the_data_knows(words: list[str]) -> None:
    with pytest.raises(UserError, match="--vocab-size"):
        make_plan(load(overrides=[*SMALL, *words]))


@pytest.mark.parametrize("word", ["model.d_feedforward=1000000000000", "training.batch_size=1000000000000"])
def test_sizes_beyond_64_bits(word: str) -> None:
    with pytest.raises(UserError, match=r"a tensor of sizes \[.*1000000000000.*\]: more bytes than 64 bits count"):
        make_plan(load(overrides=[*SMALL, "model.d_model=40000000", word]), V)


@pytest.mark.parametrize(("ranks", "tensor", "dp"), [(1, 1, 1), (4, 1, 4), (6, 2, 3)])
@pytest.mark.parametrize("optimizer", ["optimizer.name=sgd", "optimizer.name=adamw"])
def test_replicas_share_the_optimizer(optimizer: str, ranks: int, tensor: int, dp: int) -> None:
    words = [*SMALL, optimizer, f"parallel.tensor={tensor}", "communication.bucket_mb=0.001"]
    alone = make_plan(load(overrides=words), V).stages[0]
    state = make_plan(load(overrides=[*words, "parallel.optimizer_shard=state"]), V, ranks).stages[0]
    gradients = make_plan(load(overrides=[*words, "parallel.optimizer_shard=gradients"]), V, ranks).stages[0]
    for stage in (state, gradients):
        assert stage.weights == alone.weights
        assert stage.optimizer == math.ceil(alone.optimizer / dp)
    assert state.gradients == alone.gradients == alone.weights
    on_the_way = 0 if dp == 1 else alone.weights  # a small model's all at once
    assert gradients.gradients == math.ceil(alone.weights / dp) + on_the_way


@pytest.mark.parametrize(
    ("batch_size", "total", "ranks"), [(64, 64, 8), (24, 64, 2), (4, 64, 8), (10, 64, 7), (8, None, 4)]
)
def test_samples_are_those_of_the_largest_accumulation_step(batch_size: int, total: int | None, ranks: int) -> None:
    words = [f"training.batch_size={batch_size}", f"training.global_batch_size={total or 'none'}"]
    plan = make_plan(load(overrides=[*SMALL, *words]), V, ranks)
    samplers = (StepSampler(1000, total or ranks * batch_size, batch_size, Replica(own, ranks)) for own in range(ranks))
    largest = max(len(part) for sampler in samplers for part in next(sampler.epoch()).accumulation)
    assert plan.num_samples == largest


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        (["parallel.optimizer_shard=state"], None, "parallel.optimizer_shard=state: needs -np"),
        (["parallel.tensor=2"], 3, "-np 3: must be a multiple of parallel.tensor=2, at least 2"),
        ([], 0, "-np 0: must be a multiple of parallel.tensor=1, at least 1"),
    ],
)
def test_ranks_that_a_plan_needs(words: list[str], ranks: int | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_plan(load(overrides=[*SMALL, *words]), V, ranks)


def test_replicas_without_work_are_refused_as_training_does() -> None:
    config = load(overrides=[*SMALL, "training.global_batch_size=6"])
    assert num_replicas(config, 6) == 6
    with pytest.raises(UserError, match=r"^training.global_batch_size=6: is enough for 6 ranks, not for 8$"):
        num_replicas(config, 8)


def test_a_vocabulary_larger_than_the_model_s_is_refused() -> None:
    config = load(overrides=[*SMALL, "model.vocab_size=60"])
    assert vocabulary(config, 50) == (50, "--vocab-size")
    with pytest.raises(UserError, match=r"^model.vocab_size=60: must be at least --vocab-size 61$"):
        vocabulary(config, 61)
