"""Layers are partitioned into contiguous stages that fit: the best of all partitions, a user's own, or an error."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import small_job
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.planning import partition
from hvd_transformer.planning.layer_profile import LayerProfile
from hvd_transformer.planning.partition import balanced, best_partition, by_function, explicit, given_partition, uniform
from hvd_transformer.planning.pass_memory import PASS_MODES, PassMemory

NAMES = ("embed", "layer.0", "layer.1", "output")


def all_partitions(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield [stop - start for start, stop in pairwise([0, *inner, num_layers])]


def stage_sums(rows: Sequence[Sequence[int]], parts: list[int]) -> list[int]:
    """The sum over each stage's layers of that stage's row."""
    starts = [sum(parts[:stage]) for stage in range(len(parts))]
    return [sum(row[start : start + part]) for row, start, part in zip(rows, starts, parts, strict=True)]


def rank(costs: list[int], parts: list[int]) -> tuple[int, int]:
    """Smaller is better: the costliest stage, then the sum of squares."""
    sums = stage_sums([costs] * len(parts), parts)
    return max(sums), sum(value**2 for value in sums)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[int], int]:
    """Costs of up to eight layers, many of them equal, and a number of stages."""
    costs = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    return costs, draw(st.integers(1, len(costs)))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "parts"),
    [(7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (6, 3, [2, 2, 2]), (4, 4, [1, 1, 1, 1]), (5, 1, [5])],
)
def test_uniform_gives_the_remainder_to_the_first(num_layers: int, num_stages: int, parts: list[int]) -> None:
    assert uniform(num_layers, num_stages) == parts
    assert balanced([0.1] * num_layers, num_stages) == parts


@settings(deadline=None, max_examples=300)
@given(models())
def test_balanced_is_the_best_of_all_partitions(model: tuple[list[int], int]) -> None:
    costs, num_stages = model
    parts = balanced(costs, num_stages)
    partitions = list(all_partitions(len(costs), num_stages))
    assert parts in partitions
    assert rank(costs, parts) == min(rank(costs, other) for other in partitions)
    assert parts == max(other for other in partitions if rank(costs, other) == rank(costs, parts))


def sums(memory: list[list[int]]) -> Callable[[int, int, int], int]:
    """The bytes of a stage, from those of each layer on each stage."""
    return lambda stage, start, stop: sum(memory[stage][start:stop])


@settings(deadline=None, max_examples=300)
@given(models(), st.data())
def test_balanced_is_the_best_of_all_partitions_that_fit_or_tells_what_would(
    model: tuple[list[int], int], data: st.DataObject
) -> None:
    costs, num_stages = model
    row = st.lists(st.integers(0, 6), min_size=len(costs), max_size=len(costs))
    memory = data.draw(st.lists(row, min_size=num_stages, max_size=num_stages))
    partitions = list(all_partitions(len(costs), num_stages))
    need = [max(stage_sums(memory, other)) for other in partitions]
    limit = data.draw(st.integers(0, max(need) + 1))
    fitting = [other for other, bytes_ in zip(partitions, need, strict=True) if bytes_ <= limit]
    if fitting:
        parts = balanced(costs, num_stages, sums(memory), limit)
        assert parts in fitting
        assert rank(costs, parts) == min(rank(costs, other) for other in fitting)
    else:
        with pytest.raises(UserError, match=rf"at least {min(need)} bytes \("):
            balanced(costs, num_stages, sums(memory), limit)
        assert balanced(costs, num_stages, sums(memory), min(need)) in partitions


def test_evenness_does_not_cost_the_largest_stage_anything() -> None:
    assert balanced([5, 5, 9, 1], 3) == [1, 1, 2]  # 5, 5, 10 and not 10, 9, 1, whose squares are more
    assert balanced([1, 1, 6, 6, 1], 3) == [2, 1, 2]  # 7 at most, and [3, 1, 1] would need 8


def test_rounding_decides_no_tie() -> None:
    """Floats near 1e16 are 2 apart: added up as floats, stages that differ by 1 would look equal, or equal ones not."""
    assert balanced([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 3) == [3, 2, 2]
    assert balanced([1e16, 1.0, 1.0, 1e16], 2) == [2, 2]
    assert balanced([1e16, 1.0, 1e16, 1.0, 1.0], 2) == [2, 3]


def test_what_does_not_fit_is_told_in_one_line() -> None:
    gib = 2**30
    with pytest.raises(UserError) as caught:
        balanced([1, 1, 1], 2, sums([[gib, gib, gib], [gib, gib, gib // 2]]), gib)
    assert str(caught.value) == (
        "parallel.partition=auto: no partition into 2 stages fits into 1,073,741,824 bytes (1.00 GiB) per stage; "
        "needs at least 1,610,612,736 bytes (1.50 GiB)"
    )


def test_more_stages_than_layers_is_told() -> None:
    message = r"^parallel\.pipeline=5: more stages than the model's 4 layers; at most 4$"
    with pytest.raises(UserError, match=message):
        uniform(4, 5)
    for setting in ("auto", "uniform", "math:floor", "[1, 1, 1, 1]"):
        with pytest.raises(UserError, match=message):
            given_partition(config("parallel.pipeline=5", f"parallel.partition={setting}"), NAMES)


def test_an_explicit_list_is_taken_as_it_is() -> None:
    assert explicit([1, 4, 2], num_layers=7, num_stages=3) == [1, 4, 2]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([3, 4], "parallel.partition=[3, 4]: 2 stages; parallel.pipeline=3 needs 3"),
        ([3, 0, 4], "parallel.partition=[3, 0, 4]: stage 1 has 0 layers; each needs at least 1"),
        ([8, -2, 1], "parallel.partition=[8, -2, 1]: stage 1 has -2 layers; each needs at least 1"),
        ([3, 2, 3], "parallel.partition=[3, 2, 3]: adds up to 8 layers; the model has 7"),
    ],
)
def test_a_wrong_list_is_told(parts: list[int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        explicit(parts, num_layers=7, num_stages=3)
    assert str(caught.value) == message


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_stages.py").write_text(
        "stages = {'embed': 0, 'layer.0': 0, 'layer.1': 1, 'output': 1}\n"
        "of = stages.__getitem__\n"
        "def fail(name): raise RuntimeError('first line\\nsecond line')\n"
        "def returning(value): return lambda name: value if name == 'layer.1' else stages[name]\n"
        "none, half, true = returning(None), returning(1.0), returning(True)\n"
        "negative, large, back = returning(-1), returning(3), lambda name: 1 - stages[name]\n"
        "zero = lambda name: 0\n"
        "gap = lambda name: 2 * stages[name]\n"
        "falls = lambda name: {'layer.0': 1, 'layer.1': 0}.get(name, stages[name])\n"
    )
    (tmp_path / "users_broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "users_stages"


def test_a_function_names_each_layers_stage(user_module: str) -> None:
    assert by_function(f"{user_module}:of", NAMES, 2) == (2, 2)
    assert by_function(f"{user_module}:of", ("embed", "layer.0", "layer.0", "output"), 2) == (3, 1)
    assert by_function(f"{user_module}:zero", NAMES, 1) == (4,)


@pytest.mark.parametrize(
    ("path", "num_stages", "message"),
    [
        ("users_stages", 2, "must be of the form package.module:function"),
        (":of", 2, "must be of the form package.module:function"),
        ("users_stages:", 2, "must be of the form package.module:function"),
        ("users_nowhere:of", 2, "cannot be imported: ModuleNotFoundError: No module named 'users_nowhere'"),
        ("users_broken:of", 2, "cannot be imported: ZeroDivisionError: division by zero"),
        ("users_stages:off", 2, "cannot be imported: AttributeError: module 'users_stages' has no attribute 'off'"),
        ("users_stages:stages", 2, "stages is not a function"),
        ("users_stages:fail", 2, "layer embed: RuntimeError: first line"),
        ("users_stages:none", 2, "layer layer.1: returned None; must be a stage number"),
        ("users_stages:half", 2, "layer layer.1: returned 1.0; must be a stage number"),
        ("users_stages:true", 2, "layer layer.1: returned True; must be a stage number"),
        ("users_stages:negative", 2, "layer layer.1: stage -1; must be 0 to 1"),
        ("users_stages:large", 3, "layer layer.1: stage 3; must be 0 to 2"),
        ("users_stages:back", 2, "layer embed: stage 1; the first layer must be on stage 0"),
        ("users_stages:gap", 3, "layer layer.1: stage 2 after 0; must be 0 or 1"),
        ("users_stages:falls", 2, "layer layer.1: stage 0 after 1; must be 1"),
        ("users_stages:falls", 3, "layer layer.1: stage 0 after 1; must be 1 or 2"),
        ("users_stages:of", 3, "layer output: stage 1; the last layer must be on stage 2"),
    ],
)
def test_a_wrong_function_is_told_with_the_layer(user_module: str, path: str, num_stages: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        by_function(path, NAMES, num_stages)
    assert str(caught.value) == f"parallel.partition={path}: {message}"


MIB = 2**20


def config(*words: str) -> Config:
    return small_job.settings("model.num_layers=4", "parallel.pipeline=2", "parallel.micro_batches=2", *words)


def layer(held: int, again: int, weights: int) -> LayerProfile:
    """A layer of one second that holds `held` bytes per micro-batch, and `again` more while it is recomputed."""
    whole, shed = PassMemory(0, held + again, held + again, held + again, 0), PassMemory(0, held, held, held + again, 0)
    return LayerProfile(1.0, weights, {mode: shed if mode.recompute else whole for mode in PASS_MODES})


def costs(*held: int, weights: int = 0, again: int = 0) -> list[LayerProfile]:
    """Layers of one second each, that hold these MiB per micro-batch."""
    return [layer(size * MIB, again * MIB, weights * MIB) for size in held]


def fitting(
    config: Config, costs: Sequence[LayerProfile], mib: float, num_micro_batches: int = 4, dp: int = 1
) -> list[int]:
    """On devices that have `mib` left for the stages."""
    return best_partition(config, costs, num_micro_batches, round(mib * MIB / (1 - partition.DEVICE_RESERVE)) + 1, dp)


@pytest.mark.parametrize(
    ("words", "mib"),
    [
        (["optimizer.name=adamw"], 4 * 8),  # weights, gradients, two of AdamW's
        (["optimizer.name=muon"], 3 * 6 + 4 * 2),
        (["optimizer.name=muon", "optimizer.ema=0.9"], 4 * 6 + 5 * 2),
        (["optimizer.name=adamw", "training.precision=bf16"], 4 * 8 + 4),
        (["optimizer.name=adamw", "training.precision=fp32"], 4 * 8),
    ],
)
def test_the_optimizer_and_the_precision_decide_on_the_memory_of_weights(words: list[str], mib: int) -> None:
    two = [layer(0, 0, 8 * MIB)._replace(hidden=6 * MIB, shadow=4 * MIB)] * 2
    assert fitting(config(*words), two, mib) == [1, 1]
    with pytest.raises(UserError, match=rf"needs at least {mib * MIB:,} bytes"):
        fitting(config(*words), two, mib - 1)


def test_memory_is_a_limit() -> None:
    f1b, gpipe = config(), config("parallel.schedule=gpipe")
    even = costs(2, 2, 2, 2, 2, 2)
    assert best_partition(f1b, even, 4, None, 1) == [3, 3]
    # 1F1B: the first stage holds two micro-batches, the last one.
    assert fitting(f1b, even, 12) == [3, 3]
    assert fitting(f1b, even, 11) == [2, 4]
    with pytest.raises(
        UserError, match=r"parallel\.partition=auto: no partition into 2 stages fits .* at least 8,388,608 bytes"
    ):
        fitting(f1b, even, 7)
    # GPipe: both hold all four.
    assert fitting(gpipe, even, 24) == [3, 3]
    with pytest.raises(UserError, match="at least 25,165,824 bytes"):
        fitting(gpipe, even, 23)


def test_weights_gradients_and_optimizer_state_count() -> None:
    heavy_first = [*costs(0, weights=10), *costs(0, 0, 0, 0, 0, weights=1)]
    for words, copies in ((["optimizer.name=adamw"], 4), (["optimizer.name=sgd"], 2)):
        configured = config(*words)
        assert fitting(configured, heavy_first, copies * 12) == [3, 3]
        assert fitting(configured, heavy_first, copies * 12 - 1) == [2, 4]


def test_replicas_that_share_the_optimizer_need_less_each() -> None:
    heavy_first = [*costs(0, weights=10), *costs(0, 0, 0, 0, 0, weights=1)]
    for shard, copies in (("none", 4), ("state", 2 + 2 / 4), ("gradients", 1 + 3 / 4)):  # AdamW on 4 replicas
        configured = config("optimizer.name=adamw", f"parallel.optimizer_shard={shard}")
        assert fitting(configured, heavy_first, copies * 12, dp=4) == [3, 3]
        assert fitting(configured, heavy_first, copies * 12 - 1, dp=4) == [2, 4]


def test_what_is_computed_again_counts_once_or_for_the_micro_batch_that_keeps_it() -> None:
    again = costs(1, 1, 1, 1, 1, 1, again=3)
    always, except_last = (config(f"parallel.recompute={kind}") for kind in ("always", "except_last"))
    assert fitting(always, again, 2 * 3 + 3) == [3, 3]
    assert fitting(always, again, 2 * 3 + 2) == [2, 4]
    # The first stage holds the last micro-batch as a whole while it computes the one before again.
    assert fitting(except_last, again, 2 * 3 + 3 * 3 + 3) == [3, 3]
    assert fitting(except_last, again, 2 * 3 + 3 * 3 + 2) == [2, 4]
    with pytest.raises(UserError, match="no partition into 2 stages fits"):
        fitting(except_last, again, 4 * (1 + 3) - 1)


def test_a_single_micro_batch_is_not_computed_again() -> None:
    """Then modes that recompute were not measured."""
    plain = [
        own._replace(passes={mode: memory for mode, memory in own.passes.items() if not mode.recompute})
        for own in costs(1, 1, 1, 1, 1, 1, again=3)
    ]
    assert fitting(config("parallel.recompute=except_last"), plain, 12, num_micro_batches=1) == [3, 3]


@pytest.mark.usefixtures("one_thread")
def test_the_users_function_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting_stages.py").write_text(
        "names = []\ndef of(name):\n    names.append(name)\n    return int(name == 'head')\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    configured = config("parallel.partition=counting_stages:of")
    partition.check_partition(configured)
    assert [len(stage.layers) for stage in small_job.trainer(configured).engine.stages] == [5, 1]
    import counting_stages

    assert counting_stages.names == ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]
