"""What a job does grows no faster than its layers, ranks, micro-batches and steps: calls are counted, not seconds.

`python -m benchmarks.growth` measures the seconds, at larger sizes.
"""

import cProfile
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_world import FakeWorld
from small_job import SPLITS, TOKENIZER, VOCABULARY, run, settings
from thread_world import make_worlds, on_ranks

from hvd_transformer.checkpoint import tensor_file
from hvd_transformer.checkpoint.restore import read_checked
from hvd_transformer.checkpoint.store import CheckpointStore
from hvd_transformer.comm.world import World, agree
from hvd_transformer.parallel.mesh import ParallelMesh
from hvd_transformer.planning.memory_plan import make_plan
from hvd_transformer.planning.plan_text import plan_text
from hvd_transformer.reporting import charts
from hvd_transformer.reporting.metrics_log import MetricsLog
from hvd_transformer.reporting.run_report import write_report
from hvd_transformer.training.job_setup import check_same_configuration, check_same_data, make_task
from hvd_transformer.training.state import TrainState
from hvd_transformer.training.trainer import Trainer

# When a size doubles, calls may grow by this factor: an exponent of 1.15, the limit of benchmarks.growth.
DOUBLED = 2**1.15
# Calls that come and go with caches and counters, or 3 %: with where the cuts between ranks are.
SLACK = 30
SIZES = (4, 8, 16)
LAYOUTS = {
    "alone": (1, []),
    "a bucket per weight": (1, ["communication.bucket_mb=0.00001"]),
    "two stages": (1, ["parallel.pipeline=2", "parallel.partition=uniform", "parallel.micro_batches=2"]),
    "replicas": (2, []),
    "local steps": (2, ["communication.local_steps=2"]),
    "shared state": (2, ["parallel.optimizer_shard=state"]),
    "shared gradients": (2, ["parallel.optimizer_shard=gradients"]),
    "shared matrices": (2, ["parallel.tensor=2", "parallel.vocab_parallel=true"]),
}
Costs = dict[str, int]


def calls(action: Callable[[], object]) -> int:
    """Of functions, of Python's and of C's, in this thread; each value of a generator counts, too."""
    profile = cProfile.Profile()
    gc.disable()  # what it frees may call
    try:
        profile.runcall(action)
    finally:
        gc.enable()
    return sum(entry.callcount for entry in profile.getstats())


def assert_straight(costs: Callable[[int], Costs], *sizes: int) -> None:
    """The sizes double: each cost may grow `DOUBLED` times as much from the second to the third as before."""
    costs(sizes[0])  # imports and caches
    found = [costs(size) for size in sizes]
    bent = {
        name: counts
        for name in found[0]
        for counts in [[each[name] for each in found]]
        if counts[2] - counts[1] > DOUBLED * max(0, counts[1] - counts[0]) + max(SLACK, 0.03 * counts[1])
    }
    assert not bent, f"calls at {sizes}: {bent}"


@contextmanager
def job(num_ranks: int, *words: str) -> Iterator[tuple[Trainer, Costs]]:
    """Rank 0's trainer, and what building it cost."""
    config = settings(*words)
    world = World() if num_ranks == 1 else FakeWorld(0, num_ranks)
    layout = ParallelMesh.of(config, world)
    data = SimpleNamespace(tokenizer=TOKENIZER, splits=SPLITS)
    costs: Costs = {}
    built: list[Any] = []
    costs["model"] = calls(lambda: built.append(make_task(config, data, layout)))
    costs["trainer"] = calls(lambda: built.append(Trainer(config, world, layout, built[0], TrainState())))
    built[1].prefetch.start = lambda *_: None  # batches are made in this thread, and counted
    yield built[1], costs
    built[1].close()


def of_a_job(folder: Path, num_ranks: int, *words: str) -> Costs:
    """Calls of building, stepping, saving, loading and evaluating; of the rank's messages, too."""
    folder.mkdir(exist_ok=True)
    with job(num_ranks, *words) as (trainer, costs):
        run(trainer, 1)
        # The least of ten: a wait for another stage's thread costs calls, unless that was faster. The last step of an
        # epoch may have fewer samples.
        steps = islice(trainer.steps(), 10)
        counted = [(sum(map(len, step.accumulation)), calls(partial(trainer.step, step))) for step in steps]
        most = max(samples for samples, _ in counted)
        costs["step"] = min(count for samples, count in counted if samples == most)
        costs["evaluation"] = calls(lambda: trainer.evaluate("valid"))
        costs["comparison of the replicas"] = calls(lambda: trainer.engine.check_replicas("now"))
        taken = []
        costs["snapshot"] = calls(lambda: taken.append(trainer.capture("digest", 0, False)))
        costs["checkpoint"] = calls(
            lambda: [tensor_file.write(folder / name, part) for name, part in taken[0].parts.items()]
        )
        store = CheckpointStore(folder / "whole", keep_last=1)
        with job(1, *(word for word in words if "tensor" not in word and "vocab" not in word)) as (alone, _):
            run(alone, 1)
            store.save(alone.capture("digest", 0, False))
        state = read_checked(store.steps()[-1], "digest", {}, World())
        assert state is not None
        costs["load"] = calls(lambda: trainer.restore(store.steps()[-1], state))
        if isinstance(trainer.world, FakeWorld):
            costs["messages"] = len(trainer.world.events)
        return costs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_job_by_its_layers(layout: str, tmp_path: Path) -> None:
    num_ranks, words = LAYOUTS[layout]
    assert_straight(lambda size: of_a_job(tmp_path / str(size), num_ranks, f"model.num_layers={size}", *words), *SIZES)


@pytest.mark.parametrize("words", [[], ["parallel.optimizer_shard=gradients"]], ids=["replicas", "shared gradients"])
def test_a_job_by_its_ranks(words: list[str], tmp_path: Path) -> None:
    found = {size: of_a_job(tmp_path / str(size), size, *words) for size in SIZES}
    assert len({costs["messages"] for costs in found.values()}) == 1
    assert_straight(lambda size: of_a_job(tmp_path / str(size), size, *words), *SIZES)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_what_a_rank_sends_is_the_same_for_any_number_of_ranks(compression: str) -> None:
    words = [f"communication.compression={compression}", "communication.embedding_rows=never"]

    def sent(size: int) -> Costs:
        """Messages and bytes of two steps, of a checkpoint, and of comparing the replicas."""
        with job(size, *words) as (trainer, _):
            assert isinstance(trainer.world, FakeWorld)
            found = {"start, messages": len(trainer.world.events), "start, bytes": trainer.world.bytes}
            for name, action in {
                "two steps": lambda: run(trainer, 2),
                "checkpoint": lambda: trainer.capture("digest", 0, False),
                "comparison": lambda: trainer.engine.check_replicas("now"),
            }.items():
                before = len(trainer.world.events), trainer.world.bytes
                action()
                found[f"{name}, messages"] = len(trainer.world.events) - before[0]
                found[f"{name}, bytes"] = trainer.world.bytes - before[1]
            return found

    first = sent(2)
    assert first["two steps, bytes"] > 0
    assert all(sent(size) == first for size in (4, 8, 16, 32, 64))


def test_the_checks_at_a_start_cost_the_same_for_any_number_of_ranks() -> None:
    data: Any = SimpleNamespace(digest="digest")

    def start(world: World) -> None:
        check_same_configuration(settings(), world)
        agree(world, lambda: None)
        check_same_data(data, world)

    found = set()
    for size in (2, 4, 8, 16, 32, 64):
        worlds = make_worlds(size, [f"h{rank:02d}" for rank in range(size)])
        assert on_ranks(worlds, start) == [None] * size
        found |= {(world.link.horovod.messages, world.link.horovod.bytes) for world in worlds[1:]}
    assert len(found) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.micro_batches={}", "training.batch_size={}"],
        ["training.accumulation={}", "training.batch_size=1"],
    ],
    ids=["micro-batches", "rounds"],
)
def test_a_step_by_its_parts(words: list[str], tmp_path: Path) -> None:
    assert_straight(lambda size: of_a_job(tmp_path / str(size), 1, *(word.format(size) for word in words)), *SIZES)


def test_a_plan_by_its_layers() -> None:
    def plan(size: int) -> Costs:
        config = settings(f"model.num_layers={size}", "parallel.pipeline=2")
        return {"plan": calls(lambda: plan_text(make_plan(config, VOCABULARY), 80))}

    assert_straight(plan, 1, 2, 4)


def test_a_plan_by_its_batch() -> None:
    def plan(size: int) -> Costs:
        config = settings(f"training.batch_size={size}", "model.loss_chunk=32")
        return {"plan": calls(lambda: make_plan(config, VOCABULARY))}

    plan(1)  # imports and caches
    assert plan(64)["plan"] < 1.1 * plan(16)["plan"]  # the loss has four times as many chunks


def test_a_run_by_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts.Figure, "savefig", lambda figure, file, format: None)  # matplotlib's calls vary

    def of_run(size: int) -> Costs:
        run = tmp_path / str(size)
        run.mkdir(exist_ok=True)
        (run / "metrics.jsonl").unlink(missing_ok=True)
        log = MetricsLog(run, 0, pytest.fail)

        def write() -> None:
            for step in range(size):
                log.write(step + 1, loss=5 / (step + 2), lr=1e-3, grad_norm=1.0, tokens_per_second=10.0)
                log.write(step + 1, valid_loss=5 / (step + 3), valid_perplexity=8.0)

        costs = {"log": calls(write)}
        log.close()
        costs["report"] = calls(lambda: write_report(run))
        costs["resume"] = calls(lambda: MetricsLog(run, size // 2, pytest.fail).close())
        return costs

    assert_straight(of_run, 1000, 2000, 4000)


def test_calls_that_grow_with_the_square_are_seen() -> None:
    def squared(size: int) -> Costs:
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(size)))
        return {"names": calls(lambda: [dict(model.named_parameters()) for _ in range(size)])}

    with pytest.raises(AssertionError, match="names"):
        assert_straight(squared, *SIZES)
