"""Any number of ranks, rounds, buckets and micro-batches train like one plain torch script on the same batches."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import plain
import pytest
import torch
from jobs import relative_difference, steps, summary, tiny, weights, write_corpus
from plain import Case

pytestmark = pytest.mark.distributed

SAMPLES = 16  # a step, over all ranks and rounds
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}

CASES = [
    Case("adamw-cosine", "adamw", 8e-3, schedule="cosine", warmup_steps=4),
    Case(
        "sgd-step", "sgd", 0.4, schedule="step", lr_scaling="linear", warmup_steps=3, gamma=0.5, momentum=0.9,
        clip_norm=0.3, norm="post", activation="relu", position="learned", tie_embeddings=False,
    ),
    Case("adam-noam", "adam", 4e-3, schedule="noam", warmup_steps=6, lr_scaling="sqrt", clip_norm=None),
    # Adam divides by the root of squared gradients: a larger epsilon keeps float32's rounding of gradients that are
    # zero but for it (those of the attention's key biases) from becoming whole updates.
    Case("adamw-fp32", "adamw", 8e-3, schedule="cosine", warmup_steps=4, eps=1e-4, precision="fp32"),
    Case("sgd-fp32", "sgd", 0.2, momentum=0.9, clip_norm=0.3, tie_embeddings=False, precision="fp32"),
    Case("muon-linear", "muon", 8e-3, schedule="linear", warmup_steps=2, ema=0.6, init_output="zero", num_steps=10),
]  # fmt: skip

# Layers are measured, for the even cut, where a run goes on with other shares: the others need not wait for it.
UNIFORM = "parallel.partition=uniform"

# Rounds a step, micro-batches, bucket size, overlap, whether embedding lookups travel as rows, the pipeline. 16 samples
# on 2 ranks in 3 micro-batches are 3 + 3 + 2. Each case goes two of the four ways on 2 ranks over gloo, else one.
WAYS = [
    (1, 3, 0.001, True, "always", ["parallel.pipeline=2", UNIFORM, "parallel.schedule=zero_bubble"]),
    (2, 1, 0.01, True, "auto", []),
    (
        2,
        3,
        8,
        False,
        "always",
        ["parallel.pipeline=3", UNIFORM, "parallel.schedule=gpipe", "parallel.recompute=always"],
    ),
    (1, 2, 8, True, "never", ["parallel.pipeline=2", "parallel.partition=[3, 1]"]),
]

# These once more with a fixed global batch: 16 samples on 4 ranks are 3 + 1 samples each, on 2 ranks 3 + 3 + 2.
FIXED_CASES = (CASES[1], CASES[3])

# Three epochs of 97 windows: 6 full steps and one with a single sample, which all ranks but one go without.
WINDOWS = 97


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text", train=(WINDOWS + 1) * 12 + 5)


@cache
def windows_reference(corpus: Path, case: Case) -> plain.Trained:
    every = plain.window_steps(plain.encode(corpus, "train"), case, SAMPLES)
    return plain.train(corpus, case, [*tiny(corpus), *case.words(dp=1)], every)


def differences(run: Path, wanted: plain.Trained) -> dict[str, float]:
    """The largest relative difference from the reference, of each thing that a run leaves."""
    numbers, losses, norms, rates = zip(*steps(run, "loss", "grad_norm", "lr"), strict=True)
    assert numbers == tuple(range(1, len(wanted.losses) + 1))
    pairs = {"loss": (losses, wanted.losses), "norm": (norms, wanted.norms), "rate": (rates, wanted.rates)}
    result = {
        name: max(abs(value - want) / want for value, want in zip(*both, strict=True)) for name, both in pairs.items()
    }
    return {"weights": relative_difference(weights(run), wanted.weights)} | result


def check(found: dict[str, dict[str, float]], limits: dict[str, float]) -> None:
    """Shows the largest difference (`pytest -s`), and fails with all that are over their limit."""
    worst: dict[float, float] = {}
    for name, limit in limits.items():
        worst[limit] = max(worst.get(limit, 0.0), *found[name].values())
    print("largest relative differences:", ", ".join(f"{value:.1e} (limit {limit})" for limit, value in worst.items()))
    over = {name: values for name, values in found.items() if not max(values.values()) <= limits[name]}
    assert not over


def check_cases(corpus: Path, folder: Path, cases: Sequence[Case], dp: int, tp: int) -> None:
    """The runs named like the cases are like the reference's, and were of so many replicas and shares."""
    found = {case.name: differences(folder / case.name, windows_reference(corpus, case)) for case in cases}
    check(found, {case.name: TOLERANCE[case.precision] for case in cases})
    for case in cases:
        run = summary(folder / case.name)
        assert (run["dp"], run["tp"]) == (dp, tp)


MPI = pytest.mark.slow  # the same over MPI


@pytest.mark.parametrize(("dp", "backend"), [(1, ""), (2, "gloo"), pytest.param(2, "mpi", marks=MPI), (4, "gloo")])
def test_ranks_rounds_and_buckets_change_nothing(world, corpus, tmp_path, dp, backend):
    runs, found, limits = {}, {}, {}
    for number, case in enumerate(CASES):
        for rounds, pieces, bucket, overlap, rows, pipeline in (WAYS * 2)[number % 4 :][
            : 2 if dp == 2 and backend == "gloo" else 1
        ]:
            size = SAMPLES // dp // rounds
            name = f"{case.name}-{rounds}x{size}-{pieces}-{bucket}-{overlap}-{rows}-{len(pipeline)}"
            runs[name] = [
                *tiny(corpus),
                *case.words(dp),
                f"output_dir={tmp_path / name}",
                f"training.batch_size={size}",
                f"training.accumulation={rounds}",
                f"parallel.micro_batches={min(pieces, size)}",
                f"communication.bucket_mb={bucket}",
                f"communication.overlap={overlap}",
                f"communication.embedding_rows={rows}",
                *pipeline,
            ]
        if backend != "mpi" and case in FIXED_CASES:
            runs[f"{case.name}-fixed"] = [
                *tiny(corpus),
                *case.words(SAMPLES / 3),
                f"output_dir={tmp_path / f'{case.name}-fixed'}",
                "training.batch_size=3",
                f"training.global_batch_size={SAMPLES}",
                "parallel.micro_batches=2",
            ]
    world(dp, backend).train(*runs.values())
    for case in CASES:
        for name in (name for name in runs if name.startswith(f"{case.name}-")):
            found[name] = differences(tmp_path / name, windows_reference(corpus, case))
            limits[name] = TOLERANCE[case.precision]
    check(found, limits)


# Each case goes one of these ways, all with the matrices shared by two ranks.
TENSOR_WAYS = [
    [
        "parallel.vocab_parallel=true",
        "parallel.pipeline=2",
        UNIFORM,
        "parallel.recompute=always",
        "parallel.micro_batches=2",
    ],
    ["parallel.vocab_parallel=true", "model.loss_chunk=5", "communication.bucket_mb=0.001"],
    [
        "training.accumulation=2",
        "parallel.pipeline=3",
        UNIFORM,
        "parallel.schedule=zero_bubble",
        "parallel.micro_batches=2",
    ],
    ["communication.embedding_rows=always", "parallel.vocab_parallel=true", "communication.overlap=false"],
]


@pytest.mark.parametrize(("size", "backend"), [(4, "gloo"), (2, "gloo"), pytest.param(2, "mpi", marks=MPI)])
def test_shared_matrices_change_nothing(world, corpus, tmp_path, size, backend):
    """Two ranks a replica; the rate is scaled by the number of replicas."""
    dp, runs = size // 2, {}
    for number, case in enumerate(CASES):
        way = TENSOR_WAYS[(number + size) % len(TENSOR_WAYS)]
        batch_size = SAMPLES // dp // (2 if "training.accumulation=2" in way else 1)
        runs[case.name] = [
            *tiny(corpus), *case.words(dp), f"output_dir={tmp_path / case.name}", "parallel.tensor=2",
            f"training.batch_size={batch_size}", *way,
        ]  # fmt: skip
    world(size, backend).train(*runs.values())
    check_cases(corpus, tmp_path, CASES, dp, tp=2)


# Each case goes one of these ways on each number of ranks, and all of them where ranks share matrices, too, the first.
ALL_TOGETHER = [
    "parallel.optimizer_shard=gradients", "parallel.pipeline=2", UNIFORM, "parallel.micro_batches=2",
    "parallel.recompute=always", "communication.bucket_mb=0.001", "communication.embedding_rows=never",
]  # fmt: skip
SHARDED_WAYS = [
    ALL_TOGETHER,
    ["parallel.optimizer_shard=state", "communication.bucket_mb=0.001", "communication.embedding_rows=always"],
    ["parallel.optimizer_shard=gradients", "training.accumulation=2", "communication.bucket_mb=0.01"],
    ["parallel.optimizer_shard=gradients", "parallel.micro_batches=2", "communication.embedding_rows=always"],
    ["parallel.optimizer_shard=state", "parallel.pipeline=2", UNIFORM, "parallel.micro_batches=2"],
    ["parallel.optimizer_shard=state", "parallel.schedule=zero_bubble", "parallel.pipeline=3", UNIFORM,
     "parallel.micro_batches=2", "communication.overlap=false", "communication.embedding_rows=never"],
]  # fmt: skip
SHARED_TOO = ["parallel.tensor=2", "parallel.vocab_parallel=true"]


@pytest.mark.parametrize(
    ("size", "tensor", "backend"),
    [(2, 1, "gloo"), pytest.param(2, 1, "mpi", marks=MPI), (3, 1, "gloo"), (4, 1, "gloo"), (4, 2, "gloo")],
)
def test_a_shared_optimizer_changes_nothing(world, corpus, tmp_path, size, tensor, backend):
    """Every replica updates its part of the weights; 3 do not divide anything evenly.

    With EVERY_CASE in the environment 4 ranks take all cases, too.
    """
    dp, runs = size // tensor, {}
    cases = CASES if size < 4 or "EVERY_CASE" in os.environ else CASES[tensor - 1 :: 2]  # where a step is slow
    for number, case in enumerate(cases):
        way = ALL_TOGETHER if tensor == 2 else SHARDED_WAYS[(number + size) % len(SHARDED_WAYS)]
        batch = {"training.batch_size": SAMPLES // dp // (2 if "training.accumulation=2" in way else 1)}
        if dp == 3:  # 6 + 5 + 5 samples in rounds of 4
            batch = {"training.batch_size": 4, "training.global_batch_size": SAMPLES}
            way = [word for word in way if word != "training.accumulation=2"]
        runs[case.name] = [
            *tiny(corpus), *case.words(SAMPLES / 4 if dp == 3 else dp), f"output_dir={tmp_path / case.name}", *way,
            *(SHARED_TOO if tensor == 2 else []), *(f"{key}={value}" for key, value in batch.items()),
        ]  # fmt: skip
    world(size, backend).train(*runs.values())
    check_cases(corpus, tmp_path, cases, dp, tp=tensor)


def test_a_run_goes_on_with_other_shares(world, corpus, tmp_path):
    """Half of the steps with one layout, the rest with another: the run of the reference."""
    case, found = replace(CASES[0], schedule="constant"), {}  # the others' rates depend on the number of steps
    wanted = windows_reference(corpus, case)
    layouts = {
        "shared": [
            "parallel.tensor=2",
            "parallel.vocab_parallel=true",
            "parallel.pipeline=2",
            "parallel.micro_batches=2",
        ],
        "replicas": ["parallel.tensor=1"],
    }
    for first, second in (("shared", "replicas"), ("replicas", "shared")):
        run = tmp_path / first
        for part, steps_so_far in ((first, case.num_steps // 2), (second, case.num_steps)):
            dp = 1 if part == "shared" else 2
            words = [
                *tiny(corpus), *case.words(dp), f"output_dir={run}", f"training.max_steps={steps_so_far}",
                f"training.batch_size={SAMPLES // dp}", *layouts[part],
            ]  # fmt: skip
            world(2).train(words)
        found[first] = differences(run, wanted)
    check(found, dict.fromkeys(found, 1e-9))


COLUMNS = 8
COLUMN_RUNS = {f"columns-{case.name}-{rounds}": (case, rounds) for case in CASES[:2] for rounds in (1, 2)}

NARROW_CASE = replace(CASES[4], num_steps=40)  # SGD: an error of the gradients is one of the weights
# Precision, compression, and the optimizer's shards; `tensor-…`: two ranks split the layers.
NARROW_RUNS = {
    "wire": ("fp32", "fp16", "none"),
    "shared-wire-fp32-sum": ("fp32", "fp16_fp32_sum", "gradients"),
    "wire-int8": ("fp32", "int8", "none"),
    "bf16": ("bf16", "none", "none"),
    "fp16": ("fp16", "none", "none"),
    "shared-bf16-wire": ("bf16", "fp16", "gradients"),
    "shared-fp16": ("fp16", "none", "state"),
    "tensor-bf16": ("bf16", "none", "none"),
}
if "EVERY_CASE" in os.environ:
    NARROW_RUNS |= {
        "wire-fp32-sum": ("fp32", "fp16_fp32_sum", "none"),
        "shared-wire-int8": ("fp32", "int8", "gradients"),
        "bf16-wire": ("bf16", "fp16", "none"),
        "fp16-wire": ("fp16", "fp16", "none"),
        "tensor-fp16": ("fp16", "none", "none"),
    }
# By precision, how far the weights are from float32's after all steps: at least, or the format was not in use, and at
# most. bfloat16 rounds to 2^-9 of a value, float16 to 2^-12.
NEAR = {"fp32": (2e-5, 1.5e-3), "bf16": (1e-3, 2.5e-2), "fp16": (1e-4, 2e-3)}


@pytest.fixture(scope="module")
def two_ranks(world, corpus, tmp_path_factory) -> Path:
    """The folder of the runs in columns and of those in lower precision."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        [
            *tiny(corpus),
            *case.words(dp=2),
            f"output_dir={folder / name}",
            "data.batching=columns",
            f"training.batch_size={COLUMNS}",
            f"training.accumulation={rounds}",
            "parallel.micro_batches=3",
            "communication.bucket_mb=0.01",
            "communication.embedding_rows=always",
        ]
        for name, (case, rounds) in COLUMN_RUNS.items()
    ] + [
        [
            *tiny(corpus),
            *replace(NARROW_CASE, precision=precision).words(dp := 1 if name.startswith("tensor") else 2),
            *(SHARED_TOO if dp == 1 else []),
            f"output_dir={folder / name}",
            f"training.batch_size={SAMPLES // dp // 2}",
            "training.accumulation=2",
            "communication.bucket_mb=0.01",
            f"communication.compression={compression}",
            "communication.embedding_rows=always",
            f"parallel.optimizer_shard={shard}",
        ]
        for name, (precision, compression, shard) in NARROW_RUNS.items()
    ]
    world(2).train(*runs)
    return folder


def test_columns_train_like_the_tutorial(two_ranks, corpus):
    """13 batches of the tutorial, the last of two rows: rank 0 has the first 7, and rank 1 none for the last step."""
    found = {}
    for name, (case, rounds) in COLUMN_RUNS.items():
        every = plain.column_steps(plain.encode(corpus, "train"), case, COLUMNS, 2, rounds)
        wanted = plain.train(corpus, case, [*tiny(corpus), *case.words(dp=1)], every)
        found[name] = differences(two_ranks / name, wanted)
    check(found, dict.fromkeys(found, 1e-9))


def test_lower_precision_is_as_far_from_float32_as_its_rounding(two_ranks, corpus):
    """Half precision on the wire or in the matrix products."""
    wanted = windows_reference(corpus, NARROW_CASE)
    assert wanted.losses[-1] < 0.8 * wanted.losses[0]
    found = {name: differences(two_ranks / name, wanted)["weights"] for name in NARROW_RUNS if "int8" not in name}
    print({name: f"{difference:.1e}" for name, difference in found.items()})
    for name, difference in found.items():
        least, most = NEAR[NARROW_RUNS[name][0]]
        assert least < difference < most, name
    assert found["bf16"] > 2 * found["fp16"]


def test_eight_bits_in_transit_train_nearly_like_float32(two_ranks, corpus):
    """Of all weights together: a level of 127 moves those whose gradients are far smaller than their neighbours'."""
    wanted = windows_reference(corpus, NARROW_CASE)
    exact = torch.cat([wanted.weights[name].flatten() for name in sorted(wanted.weights)]).double()
    for name in (name for name in NARROW_RUNS if "int8" in name):
        own = weights(two_ranks / name)
        found = torch.cat([own[key].flatten() for key in sorted(own)]).double()
        difference = float((found - exact).norm() / exact.norm())
        losses = [loss for _, loss in steps(two_ranks / name, "loss")]
        print(name, f"{difference:.1e}", losses[-1], wanted.losses[-1])
        assert 1e-4 < difference < 1e-2
        assert losses[-1] == pytest.approx(wanted.losses[-1], rel=0.01)
