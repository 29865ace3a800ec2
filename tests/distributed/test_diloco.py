"""Local steps (DiLoCo) on real ranks train like a plain torch script that simulates all replicas in turn."""

import math
from collections.abc import Sequence
from pathlib import Path

import plain
import pytest
import torch
import torch.nn.functional as F
from jobs import relative_difference, state, steps, summary, tiny, weights, write_corpus
from plain import Case
from plain_transformer import PlainTransformer
from torch import Tensor

pytestmark = pytest.mark.distributed

WINDOWS = 97  # an epoch of 6 steps with 16 samples and one with a single sample, which all replicas but one go without
EVAL_EVERY, SAVE_EVERY = 8, 11
ADAMW = Case("adamw", "adamw", 8e-3, schedule="cosine", lr_scaling="linear", warmup_steps=4, num_steps=20)
SGD = Case(
    "sgd", "sgd", 0.2, momentum=0.9, clip_norm=0.3, norm="post", activation="relu", position="learned", num_steps=20
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=(WINDOWS + 1) * 12 + 5)


def settings(corpus: Path, run: Path, case: Case, *more: str) -> list[str]:
    """The rate is that of one replica, whatever its scaling."""
    return [
        *tiny(corpus), *case.words(dp=1), f"output_dir={run}", f"training.eval_every={EVAL_EVERY}",
        f"checkpoint.every_steps={SAVE_EVERY}", "checkpoint.keep_best=false", *more,
    ]  # fmt: skip


class Simulated:
    """The replicas of a job, and what they share: Streaming DiLoCo's algorithm 2 with alpha = 0.5."""

    def __init__(
        self, corpus: Path, case: Case, dp: int, period: int, buckets: Sequence[Sequence[str]], lr: float, beta: float
    ) -> None:
        first = plain.first_weights(corpus, case, [*tiny(corpus), *case.words(dp=1)])
        assert sorted(first) == sorted(name for bucket in buckets for name in bucket)
        self.case, self.period, self.buckets = case, period, buckets
        self.models: list[PlainTransformer] = [case.fresh_model(corpus).load(first) for _ in range(dp)]
        self.weights = [model.by_our_names() for model in self.models]
        self.optimizers = [plain.make_optimizer(case, model) for model in self.models]
        self.outer: dict[str, Tensor] = {}
        self.outer_rates = {"lr": lr, "momentum": beta, "nesterov": True}
        self.sent: dict[int, tuple[int, dict[str, Tensor]]] = {}  # when and what, by bucket
        self.sums: list[tuple[float, int]] = []  # of each step's losses, and the number of its targets

    def train(self, corpus: Path, samples: int) -> None:
        every = plain.window_steps(plain.encode(corpus, "train"), self.case, samples)
        for step, (epoch, [(inputs, targets)]) in zip(range(self.case.num_steps), every, strict=False):
            taken, dp = step + 1 - self.case.warmup_steps, len(self.models)
            if taken == 1:
                self.outer = {name: weight.detach().clone() for name, weight in self.weights[0].items()}
                self.outer_optimizers = [
                    torch.optim.SGD([self.outer[name] for name in bucket], **self.outer_rates)
                    for bucket in self.buckets
                ]
            cuts = [math.ceil(len(inputs) * rank / dp) for rank in range(dp + 1)]
            parts = [slice(*cut) if taken > 0 else slice(None) for cut in zip(cuts, cuts[1:], strict=False)]
            losses = [self.update(rank, step, epoch, inputs[part], targets[part]) for rank, part in enumerate(parts)]
            self.sums.append((sum(losses), sum(targets[part].numel() for part in parts)))
            if taken > 0:
                self.exchange(taken)
                if (step + 1) % EVAL_EVERY == 0 or (step + 1) % SAVE_EVERY == 0 or step + 1 == self.case.num_steps:
                    self.average(states=(step + 1) % SAVE_EVERY == 0)

    def update(self, rank: int, step: int, epoch: int, inputs: Tensor, targets: Tensor) -> float:
        if not len(inputs):
            return 0.0
        model, optimizer = self.models[rank], self.optimizers[rank]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.case.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = plain.learning_rate(self.case, step, epoch)
        optimizer.step()
        return loss.item() * targets.numel()

    @torch.no_grad()
    def exchange(self, taken: int) -> None:
        for number, bucket in enumerate(self.buckets):
            turn = number * self.period // len(self.buckets) or self.period  # 0: at the end of the first period
            if taken >= turn and (taken - turn) % self.period == 0:
                mean = {name: torch.stack([own[name] for own in self.weights]).mean(0) for name in bucket}
                self.sent[number] = taken, {name: self.outer[name] - mean[name] for name in bucket}
            elif number in self.sent and taken - self.sent[number][0] == min(max(self.period // 8, 1), 5):
                self.move(number)

    def move(self, number: int) -> None:
        for name, difference in self.sent.pop(number)[1].items():
            self.outer[name].grad = difference
        self.outer_optimizers[number].step()
        for name in self.buckets[number]:
            for own in self.weights:
                own[name].copy_((own[name] + self.outer[name]) / 2)

    @torch.no_grad()
    def average(self, states: bool) -> None:
        for number in list(self.sent):
            self.move(number)
        for name in self.weights[0]:
            alike([own[name] for own in self.weights])
            if states:
                found = [
                    optimizer.state[own[name]] for optimizer, own in zip(self.optimizers, self.weights, strict=True)
                ]
                for key in found[0]:
                    if key == "step":
                        for own_state in found:
                            own_state[key] = min(other[key] for other in found).clone()
                    else:
                        alike([own_state[key] for own_state in found])


def alike(tensors: Sequence[Tensor]) -> None:
    mean = torch.stack(list(tensors)).mean(0)
    for tensor in tensors:
        tensor.copy_(mean)


def names(corpus: Path, case: Case) -> list[str]:
    """Of the weights, in the order of the buckets: the last layer's first."""
    return list(plain.first_weights(corpus, case, [*tiny(corpus), *case.words(dp=1)]))[::-1]


def check(run: Path, wanted: Simulated, log_every: int = 1) -> None:
    found = steps(run, "loss")
    means = {}
    for end in range(log_every, wanted.case.num_steps + 1, log_every):
        loss, count = map(sum, zip(*wanted.sums[end - log_every : end], strict=True))
        means[end] = loss / count
    assert {step: loss for step, loss in found if step in means} == pytest.approx(means, rel=1e-9)
    assert relative_difference(weights(run), {name: own.detach() for name, own in wanted.weights[0].items()}) < 1e-9


def test_replicas_with_a_bucket_per_weight(world, corpus, tmp_path) -> None:
    """The first 4 steps are synchronous; a replica goes without samples; H is smaller than the number of buckets."""
    case = ADAMW
    words = ["communication.local_steps=16", "communication.bucket_mb=1e-6", "communication.embedding_rows=never"]
    world(2).train(settings(corpus, tmp_path / "run", case, *words))
    wanted = Simulated(corpus, case, 2, 16, [[name] for name in names(corpus, case)], 0.7, 0.9)
    wanted.train(corpus, 16)
    check(tmp_path / "run", wanted)
    assert [rate for _, rate in steps(tmp_path / "run", "lr")][3] == case.lr


def test_stages_with_accumulation_and_embedding_rows(world, corpus, tmp_path) -> None:
    """Local from the first step on. The embedding is alone in a bucket, as its rows may be gathered."""
    case = SGD
    words = [
        "communication.local_steps=5", "communication.outer_lr=0.9", "communication.outer_momentum=0.5",
        "communication.embedding_rows=always", "parallel.pipeline=2", "parallel.partition=[2, 2]",
        "parallel.micro_batches=2", "training.batch_size=4", "training.accumulation=2", "training.log_every=4",
    ]  # fmt: skip
    world(2).train(settings(corpus, tmp_path / "run", case, *words))
    of_model = names(corpus, case)
    first = [name for name in of_model if name.startswith(("embedding.positions", "blocks.0"))]
    (tied,) = (name for name in of_model if name == "embedding.embedding.weight")
    rest = [name for name in of_model if name not in first and name != tied]
    wanted = Simulated(corpus, case, 2, 5, [first, [tied], rest], 0.9, 0.5)
    wanted.train(corpus, 16)
    check(tmp_path / "run", wanted, log_every=4)


@pytest.mark.parametrize(("size", "tensor"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_tensor_parallel_replicas_and_three_replicas(world, corpus, tmp_path, size, tensor) -> None:
    case, dp = ADAMW, size // tensor
    words = ["communication.local_steps=3", f"training.batch_size={16 // dp}", f"parallel.tensor={tensor}"]
    words += ["parallel.vocab_parallel=true"] if tensor > 1 else []
    world(size).train(settings(corpus, tmp_path / "run", case, *words))
    wanted = Simulated(corpus, case, dp, 3, [names(corpus, case)], 0.7, 0.9)
    wanted.train(corpus, 16 // dp * dp)
    check(tmp_path / "run", wanted)


def test_an_average_after_each_step_is_synchronous_sgd(world, corpus, tmp_path) -> None:
    """The mean of w - lr × g over the replicas is w - lr × the mean of g."""
    case = Case("average", "sgd", 0.2, clip_norm=None, num_steps=6)
    words = ["communication.local_steps=50", "training.eval_every=1"]
    world(2).train([*settings(corpus, tmp_path / "run", case), *words])
    every = plain.window_steps(plain.encode(corpus, "train"), case, 16)
    wanted = plain.train(corpus, case, [*tiny(corpus), *case.words(dp=1)], every)
    assert relative_difference(weights(tmp_path / "run"), wanted.weights) < 1e-9


FILES = ("model.safetensors", "optimizer.safetensors", "outer.safetensors")


def test_a_resumed_run_ends_with_the_same_bits(world, corpus, tmp_path) -> None:
    """The checkpoint of step 11 comes while buckets are in flight. Dropout is on."""
    words = settings(
        corpus, tmp_path / "whole", ADAMW, "communication.local_steps=16", "communication.bucket_mb=1e-6",
        "model.dropout=0.1", "training.precision=fp32",
    )  # fmt: skip
    start = f"checkpoint.resume={tmp_path / 'whole/checkpoints/step-00000011'}"
    world(2).train(words, [*words, f"output_dir={tmp_path / 'resumed'}", start])
    for name in FILES:
        whole, resumed = (tmp_path / run / "checkpoints/latest" / name for run in ("whole", "resumed"))
        assert resumed.read_bytes() == whole.read_bytes()
    assert steps(tmp_path / "resumed", "loss") == steps(tmp_path / "whole", "loss")[11:]
    # With another number of replicas it goes on, too. A single one has no outer weights.
    run = [*words, f"output_dir={tmp_path / 'resized'}"]
    world(1).train([*run, start, "training.max_steps=13"])
    assert not (tmp_path / "resized/checkpoints/latest/outer.safetensors").exists()
    world(2).train([*run, "training.max_steps=18"])
    assert (tmp_path / "resized/checkpoints/latest/outer.safetensors").exists()
    assert summary(tmp_path / "resized")["steps"] == 18


def test_a_replica_whose_float16_overflows_takes_part_in_the_exchange(world, corpus, tmp_path) -> None:
    words = settings(corpus, tmp_path / "run", ADAMW, "communication.local_steps=3", "training.precision=fp16")
    for code, out, err in world(2).call("faulty:train", 1, 0, "overflow", [*words, "training.log_every=5"]):
        assert code == 0, out + err
    found = state(tmp_path / "run")
    assert found["position"]["updates"] < found["position"]["step"] == 20
    assert found["loss_scaler"]["scale"] <= 2**16  # of all replicas, the least


def test_a_replica_that_diverges_ends_all_alike_with_the_next_report(world, corpus, tmp_path) -> None:
    words = settings(corpus, tmp_path / "run", SGD, "communication.local_steps=50", "training.log_every=6")
    (first, out, err), (second, _, _) = world(2).call("faulty:train", 1, 3, "diverge", words)
    assert (first, second) == (1, 1) and "step 6: the loss is nan" in err, out + err
