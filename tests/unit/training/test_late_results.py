"""Steps whose result is read when the next one is queued, as on a GPU: the same run, and nothing ends too late."""

import json
import math
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Done, command
from fake_world import FakeWorld
from small_job import SMALL, run, settings, trainer, write_texts
from torch import Tensor

from hvd_transformer.checkpoint.store import CheckpointStore
from hvd_transformer.monitoring.stall_report import Stragglers
from hvd_transformer.training import step_stats
from hvd_transformer.training import trainer as trainer_module
from hvd_transformer.training.session import Session
from hvd_transformer.training.state import StepResult, Wishes
from hvd_transformer.training.trainer import Trainer
from hvd_transformer.training.training_step import Diverged, TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread")

Train = Callable[..., Done]
TIMED = {"tokens_per_second", "milliseconds_per_step", "mfu", "peak_memory_bytes", "data_wait_milliseconds"}
TIMED |= {"host_cpu_share", "network_sent_bytes_per_second", "network_received_bytes_per_second"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture
def train(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Eleven steps into the folder `name`, with evaluations after 4, 8 and 11 and checkpoints after 3, 6 and 9."""

    def run(name: str, *words: str, late: bool) -> Done:
        monkeypatch.setattr(trainer_module, "has_streams", lambda device: late)
        small = [word for word in SMALL if not word.startswith(("data.cache_dir", "training.max_steps"))]
        small += [f"data.source={corpus}", f"data.cache_dir={corpus / 'cache'}", f"output_dir={tmp_path / name}"]
        every = ["training.max_steps=11", "training.eval_every=4", "checkpoint.every_steps=3", "checkpoint.keep_last=9"]
        return command("hvd-train", *small, *every, *words)

    return run


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps as they are queued and read: q1, r1."""
    found, queue, result = list[str](), Trainer.queue, TrainingStep.result

    def queued(job: Trainer, *words: Any, **options: Any) -> TrainingStep:
        found.append(f"q{job.state.step + 1}")
        return queue(job, *words, **options)

    def read(step: TrainingStep) -> StepResult:
        made = result(step)
        found.append(f"r{made.step}")
        return made

    monkeypatch.setattr(Trainer, "queue", queued)
    monkeypatch.setattr(TrainingStep, "result", read)
    return found


def lines(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, without what depends on the time."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def positions(folder: Path) -> dict[str, Any]:
    """What each checkpoint says of how far the job was, without what depends on the time."""
    found = {}
    for path in CheckpointStore(folder / "checkpoints", 9).steps():
        state = json.loads((path / "state.json").read_text())
        position = state["position"]
        position["interval"].pop("seconds")
        del position["seconds"]
        found[path.name] = (position, state["weights_checksum"], state["loss_scaler"])
    return found


@pytest.mark.parametrize("log_every", [1, 3])
def test_the_run_is_the_same(train: Train, order: list[str], tmp_path: Path, log_every: int) -> None:
    for late in (False, True):
        order.clear()
        done = train(str(late), f"training.log_every={log_every}", late=late)
        assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "True") == lines(tmp_path / "False")
    assert positions(tmp_path / "True") == positions(tmp_path / "False")
    # Before an evaluation or a checkpoint, and at the end, all is read.
    assert " ".join(order) == "q1 q2 r1 q3 r2 r3 q4 r4 q5 q6 r5 r6 q7 q8 r7 r8 q9 r9 q10 q11 r10 r11"


def test_the_costs_of_a_line_are_those_of_its_steps(train: Train, tmp_path: Path) -> None:
    train("run", "training.log_every=1", late=True)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    costs = {row["step"]: row for row in rows if "peak_memory_bytes" in row}
    # The line of a step is about those whose results came since the line before, if there are any.
    assert [*costs] == [3, 4, 5, 7, 9, 10]
    assert all(0 <= row["data_wait_milliseconds"] < 1e4 and row["peak_memory_bytes"] > 1e6 for row in costs.values())


def test_a_stop_is_answered_one_step_later_and_saved(
    train: Train, order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Trainer.queue

    def signalled(job: Trainer, *words: Any, **options: Any) -> TrainingStep:
        if job.state.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return queue(job, *words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "queue", signalled)
        done = train("run", "checkpoint.every_steps=none", "training.eval_every=100", late=True)
    assert done.returncode == 1 and "stopped after step 9 (SIGTERM); everything is saved" in done.stdout
    assert " ".join(order).endswith("q8 r7 q9 r8 r9")
    assert train("run", "checkpoint.every_steps=none", "training.eval_every=100", late=True).returncode == 0
    train("plain", "checkpoint.every_steps=none", "training.eval_every=100", late=False)
    *_, (_, checksum, _) = positions(tmp_path / "run").values()
    *_, (_, wanted, _) = positions(tmp_path / "plain").values()
    assert checksum == wanted


def test_a_wish_to_save_is_fulfilled_after_the_step_that_is_queued(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Trainer.queue

    def wishes(job: Trainer, plan: Any, wishes: Wishes, *words: Any, **options: Any) -> TrainingStep:
        return queue(job, plan, wishes._replace(save=job.state.step == 4), *words, **options)

    monkeypatch.setattr(Trainer, "queue", wishes)
    train("run", "checkpoint.every_steps=none", "training.eval_every=100", late=True)
    assert [*positions(tmp_path / "run")] == ["step-00000006", "step-00000011"]


@pytest.mark.parametrize("late", [False, True])
def test_whole_steps_are_profiled_and_only_those_are_read_at_once(
    train: Train, order: list[str], tmp_path: Path, late: bool
) -> None:
    words = ("checkpoint.every_steps=none", "training.eval_every=100", "profile=true")
    assert train("run", *words, late=late).returncode == 0
    events = json.loads((tmp_path / "run/timeline-000.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("update") == names.count("backward 0") == 5  # of the steps 3 to 7
    if late:
        assert " ".join(order) == "q1 q2 r1 q3 r2 r3 q4 r4 q5 r5 q6 r6 q7 r7 q8 q9 r8 q10 r9 q11 r10 r11"


def test_ranks_are_compared_by_as_many_steps_as_ever(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take_work = list[int](), Stragglers.take_work

    def counted(own: Stragglers) -> float:
        taken.append(len(own._work))
        return take_work(own)

    monkeypatch.setattr(Stragglers, "due", property(lambda own: len(own._work) >= 3))
    monkeypatch.setattr(Stragglers, "take_work", counted)
    monkeypatch.setattr(Stragglers, "judge", lambda *_: {})
    words = ("checkpoint.every_steps=none", "training.eval_every=100", "training.log_every=1")
    assert train("run", *words, late=True).returncode == 0
    assert len(taken) == 2 and min(taken) >= 3


def test_the_watchdog_waits_for_a_step_and_errors_name_it(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    found, phases, result, queue = list[Session](), list[str](), TrainingStep.result, Trainer.queue
    whole = Session.train

    def session_train(own: Session, stop: Any) -> str:
        found.append(own)
        return whole(own, stop)

    def read(step: TrainingStep) -> StepResult:
        phases.append(found[0].heartbeat.phase)
        return result(step)

    def short_of_memory(job: Trainer, *words: Any, **options: Any) -> TrainingStep:
        if job.state.step == 4:
            raise torch.OutOfMemoryError("out of memory")
        return queue(job, *words, **options)

    monkeypatch.setattr(Session, "train", session_train)
    monkeypatch.setattr(TrainingStep, "result", read)
    monkeypatch.setattr(Trainer, "queue", short_of_memory)
    done = train("run", "training.eval_every=2", "checkpoint.every_steps=none", late=True)
    assert phases == ["step"] * 4 and "out of memory in step 5" in done.stderr
    found.clear()
    phases.clear()
    done = train("other", "training.eval_every=100", "checkpoint.every_steps=none", late=True)
    assert phases == ["step"] * 3 and "out of memory in step 5" in done.stderr  # step 4 is not read yet


def late(*words: str) -> Trainer:
    job = trainer(settings(*words))
    job.updates_ahead = True
    return job


def pairs(job: Trainer, count: int) -> list[StepResult]:
    """So many steps, each read when the next one is queued."""
    plans, queued, found = job.steps(), list[TrainingStep](), list[StepResult]()
    for _ in range(count):
        queued.append(job.queue(next(plans)))
        if len(queued) > 1:
            found.append(queued.pop(0).result())
    return [*found, queued[0].result()]


def test_seconds_of_steps_add_up_to_those_of_all() -> None:
    job, firsts = late(), list[float]()
    queue = job.queue

    def timed(*words: Any, **options: Any) -> TrainingStep:
        step = queue(*words, **options)
        firsts.append(step._began)
        return step

    job.queue = timed
    results = pairs(job, 6)
    assert [result.step for result in results] == [1, 2, 3, 4, 5, 6]
    assert all(result.seconds > 0 for result in results)
    assert sum(result.seconds for result in results) == pytest.approx(job.ended - firsts[0], abs=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_diverges_is_told_when_the_next_one_is_queued(value: float) -> None:
    job = late()
    run(job, 3)
    with torch.no_grad():
        job.task.layers[-1].module.norm.weight[0] = value
    before = {name: weight.detach().clone() for name, weight in job.task.model.named_parameters()}
    plans = job.steps()
    first, _ = job.queue(next(plans)), job.queue(next(plans))
    with pytest.raises(Diverged, match="^step 4: "):
        first.result()
    for name, weight in job.task.model.named_parameters():
        torch.testing.assert_close(weight.detach(), before[name], rtol=0, atol=0, equal_nan=True)
    job.close()


def test_a_diverged_job_saves_nothing_of_it(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Trainer.queue

    def poisoned(job: Trainer, *words: Any, **options: Any) -> TrainingStep:
        if job.state.step == 6:
            with torch.no_grad():
                job.task.layers[-1].module.norm.weight[0] = math.nan
        return queue(job, *words, **options)

    monkeypatch.setattr(Trainer, "queue", poisoned)
    done = train("run", late=True)
    assert done.returncode == 1 and "step 7: the loss is nan" in done.stderr
    assert [*positions(tmp_path / "run")] == [f"step-{step:08}" for step in (3, 4, 6)]


def test_the_host_reads_a_step_when_the_next_one_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from the device in between."""
    job, found = late(), list[str]()
    update, copy = job.engine.update, step_stats.start_copy

    def noted_copy(values: Tensor) -> Callable[[], Tensor]:
        wait = copy(values)
        return lambda: (found.append("read"), wait())[1]

    monkeypatch.setattr(job.engine, "update", lambda *given: (found.append("update"), update(*given))[1])
    monkeypatch.setattr(step_stats, "start_copy", noted_copy)
    for name in ("item", "tolist", "__float__", "__bool__", "__int__"):
        plain = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda own, plain=plain: (found.append("read"), plain(own))[1])
    pairs(job, 3)
    monkeypatch.undo()
    reads = ["read", "read"]  # the copy, and its numbers
    assert found == ["update", "update", *reads, "update", *reads, *reads]
    job.close()


@pytest.mark.parametrize(
    "words",
    [
        ["training.precision=fp16"],  # whose scale depends on the step before
        ["communication.local_steps=2", "optimizer.lr_scaling=linear"],
        ["communication.compression=fp16"],
        ["optimizer.name=muon"],
    ],
)
def test_what_depends_on_the_step_before_waits_for_it(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "has_streams", lambda device: True)
    job = trainer(settings(*words), FakeWorld())
    assert not job.reads_late
    job.close()
    plain = trainer(settings(), FakeWorld())
    assert plain.reads_late
    plain.close()
