"""The quick estimate says what `plan` says; a saving is the difference of two plans."""

import pytest
from small_plan import SMALL, D, T, V, small_plan

from hvd_transformer.config import Config, load
from hvd_transformer.planning import memory_savings
from hvd_transformer.planning.memory_estimate import MemoryEstimate, estimate_memory
from hvd_transformer.planning.memory_plan import batch_samples, make_plan
from hvd_transformer.planning.memory_savings import savings
from hvd_transformer.planning.partition import check_partition

WORDS = ["parallel.micro_batches=3", "model.dropout=0.1", "training.device=cuda"]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["parallel.recompute=always"],
        ["parallel.pipeline=2", "parallel.recompute=except_last"],
        ["parallel.pipeline=2", "parallel.schedule=zero_bubble", "parallel.partition=[3, 2]"],
        ["training.precision=bf16", "optimizer.name=muon"],
    ],
)
def test_the_estimate_is_the_plan(words: list[str]) -> None:
    plan = small_plan(*WORDS, *words)
    found = estimate_memory(plan.config, V, 1)
    for stage, estimate in zip(plan.stages, found, strict=True):
        *of_weights, activations = plan.memory(stage)
        assert [estimate.weights, estimate.gradients, estimate.optimizer] == of_weights
        # Layer by layer, as `join_passes` has them: right up to two hidden states of a micro-batch.
        assert estimate.activations == pytest.approx(activations, abs=2 * (2 * T * D * 4))
    assert [estimate.loss > 0 for estimate in found] == [False] * (len(found) - 1) + [True]
    # At least the logits of a micro-batch of 2 samples of 10 tokens, at most all there is.
    assert 4 * V * 2 * 10 <= found[-1].loss <= found[-1].activations


def test_a_saving_is_what_the_plan_of_the_other_value_has_less() -> None:
    config = load(overrides=[*SMALL, "training.device=cuda"])
    found = savings(config, V, 4, 0)
    assert [saving.num_bytes for saving in found] == sorted((saving.num_bytes for saving in found), reverse=True)
    keys = {saving.key for saving in found}
    assert {"parallel.recompute", "parallel.micro_batches", "training.batch_size", "parallel.optimizer_shard"} <= keys
    assert len(keys) == len(found)

    def planned(*words: str) -> int:
        plan = make_plan(load(overrides=[*SMALL, "training.device=cuda", *words]), V, 4)
        return sum(plan.memory(plan.stages[0]))

    whole = planned()
    for key, value, num_bytes, _ in found[:2]:
        assert num_bytes == pytest.approx(whole - planned(f"{key}={value}"), abs=4 * (6 * T * D * 4)), key


def test_what_a_configuration_cannot_have_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(*words: str, dp: int = 1, stage: int | None = 0, **options: bool) -> set[str]:
        """If every change helped."""
        config = load(overrides=[*SMALL, "training.device=cuda", *words])

        def estimated(other: Config, *_: int, **__: bool) -> list[MemoryEstimate]:
            check_partition(other)
            return [MemoryEstimate(100 if other == config else 60, 0, 0, 0, 0)] * other.parallel.pipeline

        monkeypatch.setattr(memory_savings, "estimate_memory", estimated)
        return {saving.key for saving in savings(config, V, dp, stage, **options)}

    assert "parallel.optimizer_shard" not in keys(dp=1)
    assert "parallel.optimizer_shard" in keys(dp=2)
    assert "parallel.optimizer_shard" not in keys("communication.local_steps=4", dp=2)
    assert "parallel.recompute" not in keys("parallel.recompute=always")
    assert not keys("training.batch_size=1") & {"training.batch_size", "parallel.micro_batches"}
    assert "training.batch_size" not in keys("parallel.micro_batches=6")  # more than the samples of half a batch
    assert "parallel.pipeline" in keys("parallel.pipeline=2")
    assert "parallel.pipeline" not in keys("parallel.pipeline=5")  # as many stages as layers
    assert "parallel.pipeline" not in keys(stage=None)  # two stages with 60 each on one host
    assert "training.precision" in keys()
    assert "training.precision" not in keys(resumes=True)
    # What a resumed run may not change, or not before its epoch ends.
    assert "training.batch_size" in keys(resumes=True)
    assert "training.batch_size" not in keys("data.batching=columns", resumes=True)
    assert "model.loss_chunk" not in keys("training.device=cpu")
    evaluated = keys("training.eval_batch_size=16", evaluation=True)
    assert "training.eval_batch_size" in evaluated
    assert not evaluated & {"training.batch_size", "parallel.recompute", "parallel.micro_batches"}
    texts = ["task=translation", "data.source=multi30k", "data.batch_tokens=100", "data.tokenizer=basic_english"]
    assert "data.batch_tokens" in keys(*texts) and "training.batch_size" not in keys(*texts)
    assert not keys(*texts, resumes=True) & {"data.batch_tokens", "training.batch_size"}
    # Conversations are samples of different lengths, too.
    chats = load(overrides=["model.pretrained=chats", "data.messages_column=messages", "data.batch_tokens=300"])
    found = {key for key, _ in memory_savings._candidates(chats, 1, evaluation=False)}
    assert "data.batch_tokens" in found and "training.batch_size" not in found
    assert batch_samples(chats) == 300 // chats.data.sequence_length


def test_what_else_a_smaller_batch_changes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def estimated(config: Config, *_: int, **__: bool) -> list[MemoryEstimate]:
        return [MemoryEstimate(config.training.batch_samples, 0, 0, 0, 0)]

    monkeypatch.setattr(memory_savings, "estimate_memory", estimated)

    def effect(*words: str, resumes: bool = False) -> str:
        config = load(overrides=[*SMALL, "training.device=cuda", *words])
        (found,) = savings(config, V, 1, 0, resumes=resumes)
        assert found.key == "training.batch_size"
        return found.effect

    fixed = "training.global_batch_size=48"
    assert effect() == effect(resumes=True) == "fewer samples per step"
    assert effect(fixed) == "a higher learning rate by optimizer.lr_scaling=linear"
    assert effect(fixed, "optimizer.lr_scaling=sqrt") == "a higher learning rate by optimizer.lr_scaling=sqrt"
    assert effect(fixed, "optimizer.lr_scaling=none") == effect(fixed, resumes=True) == ""
    # A step is global_batch_size / batch_size batches, whatever these hold.
    assert (
        memory_savings._effect(load(overrides=[*SMALL, fixed]), "data.batch_tokens", False) == "fewer samples per step"
    )


def test_an_evaluation_keeps_nothing_for_backward() -> None:
    config = load(overrides=[*SMALL, "training.eval_batch_size=6"])
    (trained,), (evaluated,) = (estimate_memory(config, V, 1, evaluation=evaluation) for evaluation in (False, True))
    assert evaluated[:3] == trained[:3]
    hidden = 6 * T * D * 4
    assert 2 * hidden < evaluated.activations < trained.activations / 2
