"""`training.batch_size=auto`: what is found, on ranks that differ, and what a resumed run does with it."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import Done, command
from fake_world import FakeWorld
from small_job import SMALL, run, settings, trainer, weights, write_texts
from thread_world import make_worlds, on_ranks

from hvd_transformer.config import Config
from hvd_transformer.errors import UserError
from hvd_transformer.models.layers import Block
from hvd_transformer.monitoring.heartbeat import Heartbeat
from hvd_transformer.monitoring.host_usage import HostMemory
from hvd_transformer.reporting.progress import Silent
from hvd_transformer.tasks.decoder_task import DecoderTask
from hvd_transformer.training import batch_size_search
from hvd_transformer.training.batch_size_search import (
    _can_try,
    _leaves_enough,
    by_plan,
    by_trial,
    search,
    settle_batch_size,
)
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

AUTO = ("training.batch_size=auto", "training.global_batch_size=24", "optimizer.lr_scaling=none")
SIZES = [1, 2, 3, 4, 5, 6, 8, 12, 24]


def fixed(*words: str) -> Config:
    small = [word for word in SMALL if not word.startswith("training.batch_size")]
    return settings(*small, "training.batch_size=4", *AUTO[1:], *words)


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Lets a block have memory for so many samples in forward; the list has what it was given."""

    def limit(samples: int) -> list[int]:
        original, seen = Block.forward, []

        def forward(block, hidden, *words, **options):
            seen.append(len(hidden))
            if len(hidden) > samples:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return original(block, hidden, *words, **options)

        monkeypatch.setattr(Block, "forward", forward)
        return seen

    return limit


def test_nothing_of_the_trials_is_left_when_the_real_model_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may need more than half of a GPU's memory."""
    built: list[weakref.ref[object]] = []

    class Watched(Trainer):
        def __init__(self, *words: object, **options: object) -> None:
            super().__init__(*words, **options)
            built.extend(map(weakref.ref, (self, self.engine, *self.engine.buffers)))

    monkeypatch.setattr(batch_size_search, "_can_try", lambda config, mesh: True)
    monkeypatch.setattr(batch_size_search, "make_task", lambda config, data, mesh: trainer(config).task)
    monkeypatch.setattr(batch_size_search, "Trainer", Watched)
    job = trainer(fixed())
    small = [word for word in SMALL if not word.startswith("training.batch_size")]
    config, _ = settle_batch_size(settings(*small, *AUTO), job.world, job.mesh, None, None, None, Silent(), Heartbeat())  # type: ignore[arg-type]
    assert config.training.batch_size == SIZES[-1]
    assert built and [found() for found in built] == [None] * len(built)
    job.close()


@pytest.mark.parametrize(
    ("dp", "words", "tries"),
    [
        (1, [], True),
        (1, ["communication.compression=auto"], True),
        (2, ["communication.compression=fp16"], True),
        (2, ["communication.compression=auto"], False),  # its errors may take more memory after some steps
        (2, ["parallel.optimizer_shard=state"], False),
    ],
)
def test_on_gpus_sizes_are_tried_out_where_later_steps_need_no_more(dp: int, words: list[str], tries: bool) -> None:
    mesh = SimpleNamespace(dp=dp, tp=1, device=torch.device("cuda", 0))
    assert _can_try(fixed(*words), mesh) == tries  # type: ignore[arg-type]


@pytest.mark.parametrize(("free", "enough"), [(4, False), (6, True)])
def test_a_trial_leaves_some_of_a_gpu_s_memory(free: int, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    assert _leaves_enough(torch.device("cuda", 0)) == enough


@pytest.mark.parametrize("words", [(), ("parallel.pipeline=2", "parallel.partition=uniform")])
def test_trials_find_what_a_step_has_memory_for(words: tuple[str, ...], memory_of) -> None:
    job = trainer(fixed(*words))
    seen = memory_of(7)
    assert search(job.world, SIZES, by_trial(job), Heartbeat()) == 6
    assert max(seen) <= 12
    job.close()


def test_micro_batches_are_what_has_to_fit(memory_of) -> None:
    job = trainer(fixed("parallel.micro_batches=3"))
    memory_of(7)
    assert search(job.world, [3, 4, 6, 8, 12, 24], by_trial(job), Heartbeat()) == 12  # 3 × 4; of 24 one has 8


def test_trials_leave_weights_and_steps_as_they_were(memory_of) -> None:
    wanted = trainer(fixed())
    losses = run(wanted, 3)
    job = trainer(fixed())
    before = weights(job)
    fits = by_trial(job)
    assert fits(12) and fits(24)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(job).items())
    assert all(not tensor.any() for state in job.engine.optimizer_state() for tensor in state.values())
    assert run(job, 3) == losses


def test_a_trial_sends_nothing() -> None:
    world = FakeWorld()
    job = trainer(fixed("communication.bucket_mb=0.001"), world)
    world.events.clear()
    assert by_trial(job)(8)
    assert world.events == []
    run(job, 1)
    assert any(event.startswith("send bucket") for event in world.events)


def test_another_error_of_a_trial_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_, **__):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(Block, "forward", forward)
    with pytest.raises(RuntimeError, match="shapes differ"):
        by_trial(trainer(fixed()))(2)


def test_with_zero_a_size_fits_into_the_smallest_of_a_rank_s_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    totals, asked = {0: 80, 1: 40}, list[tuple[str, int]]()

    def fits(config: Config, size: int, vocab_size: int, dp: int, limit: float) -> bool:
        asked.append((config.training.device, size))
        return size <= limit

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=totals[device.index])

    monkeypatch.setattr(batch_size_search, "fits_by_plan", fits)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    config = fixed("parallel.optimizer_shard=state")
    devices = tuple(torch.device("cuda", index) for index in totals)
    mesh = SimpleNamespace(dp=2, device=devices[0], devices=devices)
    fit = by_plan(config, FakeWorld(), mesh, trainer(fixed()).task)  # type: ignore[arg-type]
    assert [fit(40), fit(41)] == [True, False]
    assert asked == [("cuda", 40), ("cuda", 41)]


def test_all_ranks_take_the_least_of_what_fits() -> None:
    tried: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def find(world) -> int:
        def fits(size: int) -> bool:
            tried[world.rank].append(size)
            return size <= [24, 6, 12][world.rank]

        return search(world, SIZES, fits, Heartbeat())

    assert on_ranks(make_worlds(3), find) == [6, 6, 6]
    assert tried[0] == tried[1] == tried[2]


def test_where_nothing_fits_on_one_rank_all_are_told() -> None:
    found = on_ranks(make_worlds(2), lambda world: search(world, SIZES, lambda size: world.rank == 0, Heartbeat()))
    assert all(isinstance(error, UserError) and "not even 1 samples" in str(error) for error in found)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture
def plan_has_room_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    def limit(samples: int, total: int = 1 << 30) -> list[int]:
        asked: list[int] = []

        def fits(config: Config, size: int, *_: float) -> bool:
            asked.append(size)
            return size <= samples

        monkeypatch.setattr(batch_size_search, "fits_by_plan", fits)
        monkeypatch.setattr(batch_size_search, "host_memory_left", lambda: HostMemory(total, total))
        return asked

    return limit


def train(corpus: Path, folder: Path, *words: str) -> Done:
    model = [word for word in SMALL if word.startswith(("model.", "data.sequence", "data.tokenizer", "optimizer."))]
    more = ["training.device=cpu", "training.log_every=1", "checkpoint.every_steps=1"]
    where = [f"data.source={corpus}", f"data.cache_dir={corpus / 'cache'}", f"output_dir={folder}"]
    return command("hvd-train", *model, *more, *where, *AUTO[1:], *words)


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_a_run_keeps_what_it_found_until_devices_or_settings_change(
    corpus: Path, tmp_path: Path, plan_has_room_for
) -> None:
    asked = plan_has_room_for(7)
    done = train(corpus, tmp_path / "auto", AUTO[0], "training.max_steps=2")
    assert done.returncode == 0, done.stderr
    line = "training.batch_size=auto: 6 samples of the 24 of a step"
    assert line in done.stdout + done.stderr and asked
    assert json.loads((tmp_path / "auto/batch_size.json").read_text())["batch_size"] == 6
    assert line in (tmp_path / "auto/logs/rank-000.log").read_text()
    assert "batch_size: auto" in (tmp_path / "auto/config.yaml").read_text()

    asked = plan_has_room_for(3)  # less is free now
    assert train(corpus, tmp_path / "auto", AUTO[0], "training.max_steps=4").returncode == 0
    assert asked == []
    # It is the training of the number that was found.
    assert train(corpus, tmp_path / "six", "training.batch_size=6", "training.max_steps=2").returncode == 0
    assert train(corpus, tmp_path / "six", "training.batch_size=6", "training.max_steps=4").returncode == 0
    assert losses(tmp_path / "auto") == losses(tmp_path / "six") and len(losses(tmp_path / "six")) == 4

    asked = plan_has_room_for(3, total=1 << 29)  # another machine
    assert train(corpus, tmp_path / "auto", AUTO[0], "training.max_steps=5").returncode == 0
    assert asked and json.loads((tmp_path / "auto/batch_size.json").read_text())["batch_size"] == 3
    asked.clear()
    again = train(corpus, tmp_path / "auto", AUTO[0], "training.max_steps=6", "parallel.recompute=always")
    assert again.returncode == 0 and asked


def test_an_epoch_of_batches_ends_with_the_number_that_it_was_begun_with(tmp_path: Path, plan_has_room_for) -> None:
    """Also on another machine: what remains of it are batches of so many samples."""
    rows = [f"{number},{'no' if number % 2 else 'yes'}\n" for number in range(160)]
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(rows))
    (tmp_path / "valid.csv").write_text("text,label\n" + "".join(rows[:9]))
    words = [AUTO[0], "task=classification"]
    for total, steps, size in [(1 << 30, 3, 6), (1 << 29, 7, 6), (1 << 29, 8, 3)]:
        asked = plan_has_room_for(7 if size == 6 else 3, total)
        done = train(tmp_path, tmp_path / "run", *words, "training.epochs=2", f"training.max_steps={steps}")
        assert done.returncode == 0, done.stderr
        assert f"training.batch_size=auto: {size} samples" in done.stdout + done.stderr
        assert bool(asked) == (steps != 7)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert {line["step"]: line["samples"] for line in lines if "loss" in line}[7] == len(rows)


def test_what_is_wrong_is_told_before_anything_is_written(corpus: Path, tmp_path: Path, plan_has_room_for) -> None:
    plan_has_room_for(0)
    done = train(corpus, tmp_path / "run", AUTO[0])
    assert done.returncode == 2 and "training.batch_size=auto: not even 1 samples" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_task_that_cannot_be_planned_needs_a_number(
    corpus: Path, tmp_path: Path, plan_has_room_for, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sketch(*_) -> None:
        raise UserError("task=mine:Task: cannot be planned")

    plan_has_room_for(8)
    monkeypatch.setattr(DecoderTask, "sketch", sketch)
    done = train(corpus, tmp_path / "run", AUTO[0])
    assert done.returncode == 2
    assert "training.batch_size=auto: task=mine:Task: cannot be planned; give a number" in done.stderr


@pytest.mark.slow
def test_the_plan_shows_what_it_would_take() -> None:
    words = [*SMALL[:7], *AUTO[1:], "training.device=cuda", "data.sequence_length=16"]
    done = command("hvd-transformer", "plan", "--vocab-size", 97, "--memory-gib", 0.0002, AUTO[0], *words)
    assert done.returncode == 0, done.stderr
    size = int(done.stdout.split("training.batch_size=auto: ")[1].split(",")[0])
    assert f"1 per accumulation step: {size} sample" in done.stdout and 1 < size < 24
    for other, fits in ((size, True), (SIZES[SIZES.index(size) + 1], False)):
        plan = command(
            "hvd-transformer", "plan", "--vocab-size", 97, "--memory-gib", 0.0002 * 0.9, *words,
            f"training.batch_size={other}",
        )  # fmt: skip
        assert ("of 188.74: fits" in plan.stdout) == fits, plan.stdout
    refused = command("hvd-transformer", "plan", "--vocab-size", 97, AUTO[0], *words)
    assert refused.returncode == 2 and "training.batch_size=auto: needs --memory-gib" in refused.stderr
