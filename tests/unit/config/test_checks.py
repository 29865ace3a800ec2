"""Settings that do not fit together are refused with their keys; the nearest ones that do are accepted."""

import pytest

from hvd_transformer.config import load
from hvd_transformer.errors import UserError

# (settings that fit, the one that then does not, all keys and numbers the message must name)
AUTO = ["training.global_batch_size=64", "training.batch_size=auto", "optimizer.lr_scaling=none"]
CASES = [
    (AUTO, "training.global_batch_size=none", ["training.batch_size=auto", "training.global_batch_size"]),
    (AUTO, "optimizer.lr_scaling=sqrt", ["training.batch_size=auto", "optimizer.lr_scaling=none", "sqrt"]),
    (AUTO, "data.batching=columns", ["training.batch_size=auto", "data.batching=columns"]),
    (AUTO, "training.eval_batches=3", ["training.batch_size=auto", "training.eval_batch_size", "eval_batches=3"]),
    (AUTO, "parallel.micro_batches=65", ["parallel.micro_batches=65", "64"]),
    (["task=translation", *AUTO], "data.batch_tokens=100", ["training.batch_size=auto", "data.batch_tokens=100"]),
    (["model.d_model=96", "model.num_heads=6"], "model.num_heads=7", ["model.d_model=96", "model.num_heads=7"]),
    (
        ["model.d_model=12", "model.num_heads=6", "model.position=rotary"],
        "model.num_heads=4",
        ["model.position=rotary", "model.d_model=12", "model.num_heads=4"],
    ),
    (["model.d_model=7", "model.num_heads=7", "model.position=learned"], "model.position=sinusoidal", ["d_model", "7"]),
    (
        ["model.max_length=64", "data.sequence_length=64"],
        "data.sequence_length=65",
        ["data.sequence_length=65", "model.max_length=64"],
    ),
    (
        ["task=translation", "model.max_length=64", "data.sequence_length=64", "data.target_length=63"],
        "data.target_length=64",
        ["data.target_length=64", "model.max_length=64 minus one for the target's start token"],
    ),
    (
        ["task=translation", "model.max_length=64", "data.sequence_length=64", "data.target_length=9"],
        "data.sequence_length=65",
        ["data.sequence_length=65: longer than the model's positions, model.max_length=64"],
    ),
    (
        ["task=language_model"],
        "model.num_decoder_layers=6",
        ["model.num_decoder_layers=6", "task=translation", "task=language_model", "none"],
    ),
    (["task=classification"], "model.share_embeddings=true", ["model.share_embeddings=true", "task=translation"]),
    (["data.split=[0.9, 0.1]"], "data.split=[0.9, 0.05, 0.06]", ["data.split=[0.9, 0.05, 0.06]", "1"]),
    (["data.split=[0.1, 0.0]"], "data.split=[0.0, 1.0]", ["data.split=[0.0, 1.0]", "above 0"]),
    (["data.vocab_size=257"], "data.vocab_size=256", ["data.vocab_size=256", "data.tokenizer=bpe", "257"]),
    (["data.tokenizer=char", "data.vocab_size=2"], "data.vocab_size=1", ["data.vocab_size=1", "at least 2"]),
    (
        ["optimizer.schedule=noam", "optimizer.warmup_steps=1"],
        "optimizer.warmup_steps=0",
        ["optimizer.schedule=noam", "optimizer.warmup_steps", "at least 1"],
    ),
    (
        ["optimizer.name=sgd", "optimizer.momentum=0.9"],
        "optimizer.name=adam",
        ["optimizer.momentum=0.9", "optimizer.name=sgd"],
    ),
    (
        ["optimizer.name=adam", "optimizer.betas=[0.9, 0.98]"],
        "optimizer.name=sgd",
        ["optimizer.betas=[0.9, 0.98]", "optimizer.name=adam or adamw or muon", "[0.9, 0.95]"],
    ),
    (
        ["optimizer.name=adamw", "optimizer.eps=1e-6"],
        "optimizer.name=sgd",
        ["optimizer.eps=1e-06", "optimizer.name=adam or adamw or muon", "1e-08"],
    ),
    (
        ["optimizer.gamma=0.5", "optimizer.schedule=step"],
        "optimizer.schedule=constant",
        ["optimizer.gamma=0.5", "optimizer.schedule=step or cosine", "0.1"],
    ),
    (
        ["optimizer.decay_fraction=0.5", "optimizer.schedule=wsd"],
        "optimizer.schedule=linear",
        ["optimizer.decay_fraction=0.5", "only with optimizer.schedule=wsd", "0.2"],
    ),
    (
        ["training.batch_size=4", "parallel.micro_batches=4"],
        "parallel.micro_batches=5",
        ["parallel.micro_batches=5", "training.batch_size=4"],
    ),
    (
        ["training.batch_size=4", "training.global_batch_size=10", "training.accumulation=1"],
        "training.accumulation=2",
        ["training.accumulation=2", "training.global_batch_size=10"],
    ),
    (
        ["training.batch_size=4", "training.global_batch_size=4"],
        "training.global_batch_size=3",
        ["training.batch_size=4", "training.global_batch_size=3"],
    ),
    (
        ["training.batch_size=4", "training.global_batch_size=8", "data.batching=columns"],
        "training.global_batch_size=10",
        ["training.global_batch_size=10", "data.batching=columns", "training.batch_size=4"],
    ),
    (
        ["communication.local_steps=8", "parallel.optimizer_shard=none"],
        "parallel.optimizer_shard=state",
        ["communication.local_steps=8", "parallel.optimizer_shard=state", "none"],
    ),
    (
        ["communication.local_steps=8", "communication.compression=none"],
        "communication.compression=fp16",
        ["communication.local_steps=8", "communication.compression=fp16", "none"],
    ),
    (
        ["communication.outer_lr=1.0", "communication.local_steps=2"],
        "communication.local_steps=1",
        ["communication.outer_lr=1.0", "communication.local_steps", "at least 2", "0.7"],
    ),
    (
        ["communication.outer_momentum=0.5", "communication.local_steps=2"],
        "communication.local_steps=1",
        ["communication.outer_momentum=0.5", "communication.local_steps", "at least 2", "0.9"],
    ),
    (
        ["communication.compression=fp16", "training.precision=fp32"],
        "training.precision=fp64",
        ["communication.compression=fp16", "training.precision=fp64"],
    ),
    (
        ["communication.compression=int8", "parallel.optimizer_shard=state"],
        "communication.compression=powersgd",
        ["communication.compression=powersgd", "parallel.optimizer_shard=state", "int8"],
    ),
    (
        ["communication.compression=powersgd", "communication.powersgd_rank=2"],
        "communication.compression=int8",
        ["communication.powersgd_rank=2", "compression=powersgd"],
    ),
    (
        ["model.num_heads=6", "parallel.tensor=3"],
        "parallel.tensor=4",
        ["parallel.tensor=4", "model.num_heads=6"],
    ),
    (
        ["parallel.tensor=2", "model.d_feedforward=64"],
        "model.d_feedforward=65",
        ["parallel.tensor=2", "model.d_feedforward=65"],
    ),
    (
        ["parallel.vocab_parallel=true", "parallel.tensor=2"],
        "parallel.tensor=1",
        ["parallel.vocab_parallel=true", "at least 2"],
    ),
    (
        ["parallel.optimizer_shard=state", "parallel.schedule=zero_bubble"],
        "parallel.optimizer_shard=gradients",
        ["parallel.schedule=zero_bubble", "use 1f1b"],
    ),
]


@pytest.mark.parametrize(("fitting", "change", "named"), CASES, ids=[change for _, change, _ in CASES])
def test_a_combination_that_cannot_work_is_refused_with_its_keys(
    fitting: list[str], change: str, named: list[str]
) -> None:
    load(overrides=fitting)
    with pytest.raises(UserError) as caught:
        load(overrides=[*fitting, change])
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in named), message


def test_shares_that_add_up_to_one_but_for_rounding_are_taken() -> None:
    assert sum([0.56, 0.33, 0.11]) > 1
    load(overrides=["data.split=[0.56, 0.33, 0.11]"])


def test_a_small_bpe_vocabulary_is_only_refused_for_bpe() -> None:
    assert load(overrides=["data.vocab_size=10", "data.tokenizer=basic_english"]).data.vocab_size == 10


USED_BY = {
    "data.batching=columns": ["language_model"],
    "data.target_length=64": ["translation"],
    "data.too_long=cut": ["translation", "classification"],
    "data.batch_tokens=1000": ["translation", "classification"],
    "data.source_language=fr": ["translation"],
    "data.target_language=fr": ["translation"],
    "data.text_column=review": ["classification", "language_model"],
    "data.label_column=stars": ["classification"],
    "data.positive_label=good": ["classification"],
    "data.class_weights=balanced": ["classification"],
}


@pytest.mark.parametrize("word", USED_BY)
@pytest.mark.parametrize("task", ["language_model", "translation", "classification", "own.module:Task"])
def test_keys_of_the_data_without_effect_are_refused(word: str, task: str) -> None:
    words = [f"task={task}", word]
    if task in [*USED_BY[word], "own.module:Task"]:
        load(overrides=words)
        return
    with pytest.raises(UserError) as caught:
        load(overrides=words)
    allowed = " or ".join(f"task={name}" for name in USED_BY[word])
    if word.startswith(("data.too_long", "data.batch_tokens")):
        allowed += " or data.messages_column"
    assert str(caught.value).startswith(f"{word}: not with task={task}, only with {allowed}; leave it at ")


def test_a_sample_for_the_tokenizer_is_for_byte_pairs() -> None:
    load(overrides=["data.tokenizer=bpe", "data.tokenizer_sample_mb=none"])
    for size in ("none", "10.0"):
        with pytest.raises(UserError, match=f"^data.tokenizer_sample_mb={size}: only with data.tokenizer=bpe; "):
            load(overrides=["data.tokenizer=char", f"data.tokenizer_sample_mb={size}"])


def test_the_numbers_of_rope_scaling_may_be_written_without_a_point() -> None:
    """YAML reads 2e0 as a word."""
    for written in ("2e0", "2", "'2'"):
        table = f"model.rope_scaling={{rope_type: linear, factor: {written}}}"
        found = load(overrides=["model.position=rotary", table]).model.rope_scaling
        assert found == {"rope_type": "linear", "factor": 2.0} and isinstance(found["factor"], float)
    for wrong in ("two", "-1e0", "inf", "nan"):
        table = f"model.rope_scaling={{rope_type: linear, factor: {wrong}}}"
        with pytest.raises(UserError, match=r"model\.rope_scaling: factor=.*: must be a number above 0"):
            load(overrides=["model.position=rotary", table])
