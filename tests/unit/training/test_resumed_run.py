"""Runs that are stopped, killed, or begin with the checkpoint of another run: what they keep, write and say."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Done, command
from small_job import SMALL, settings, write_texts

from hvd_transformer.checkpoint.store import CheckpointStore
from hvd_transformer.comm.world import World
from hvd_transformer.reporting import run_report
from hvd_transformer.reporting.trackers.processes import Trackers
from hvd_transformer.tasks.metrics import Evaluation
from hvd_transformer.training import session
from hvd_transformer.training.process import StopRequest
from hvd_transformer.training.state import StepResult, TrainState
from hvd_transformer.training.trainer import Trainer
from hvd_transformer.training.training_step import TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread")

Train = Callable[..., Done]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture
def train(corpus: Path, tmp_path: Path) -> Train:
    """Six steps with an evaluation and a checkpoint after every second one, into the folder `run`."""

    def run(*words: str, report: bool = False) -> Done:
        small = [word for word in SMALL if not word.startswith(("data.cache_dir", "training.max_steps"))]
        small += [f"data.source={corpus}", f"data.cache_dir={corpus / 'cache'}", f"output_dir={tmp_path / 'run'}"]
        every = ["training.max_steps=6", "training.eval_every=2", "checkpoint.every_steps=2", "training.log_every=1"]
        return command("hvd-train", *small, *every, *words, report=report)

    return run


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Sets the losses of the evaluations, and what happens in each; returns the steps at which the validation split is
    evaluated."""

    def found(losses: Sequence[float], then: Callable[[Trainer], object] = lambda job: None) -> list[int]:
        values, steps = iter(losses), list[int]()

        def evaluate(job: Trainer, split: str) -> Evaluation:
            if split == "valid":
                steps.append(job.state.step)
                then(job)
            return Evaluation({"loss": next(values, 9.0), "perplexity": 1.0}, 1)

        monkeypatch.setattr(Trainer, "evaluate", evaluate)
        return steps

    return found


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The checkpoints that are written: their steps, and whether they are the best."""
    found, save = list[tuple[int, bool]](), CheckpointStore.save

    def noted(store: CheckpointStore, snapshot: Any, *more: Any) -> Path:
        found.append((snapshot.step, snapshot.best))
        return save(store, snapshot, *more)

    monkeypatch.setattr(CheckpointStore, "save", noted)
    return found


def changed_steps(monkeypatch: pytest.MonkeyPatch, change: Callable[[Trainer, StepResult], StepResult]) -> None:
    """Lets `change` see and replace the result of each step."""
    result = TrainingStep.result
    monkeypatch.setattr(TrainingStep, "result", lambda step: change(step.trainer, result(step)))


def lines(folder: Path, key: str) -> list[tuple[int, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[key]) for row in rows if key in row]


def position(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())["position"]
    return found


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in CheckpointStore(folder / "checkpoints", 9).steps()]


def test_another_batch_size_cuts_the_same_steps_and_keeps_their_rate(train: Train, tmp_path: Path) -> None:
    words = ["training.global_batch_size=8", "optimizer.lr=0.01", "optimizer.schedule=constant"]
    train(*words, "training.batch_size=2", "training.max_steps=2")
    for max_steps, size in ((4, 4), (6, 8)):  # twice: the second checkpoint has a configuration of its own
        train(*words, f"training.batch_size={size}", f"training.max_steps={max_steps}")
    assert lines(tmp_path / "run", "lr") == [(step, pytest.approx(0.04)) for step in range(1, 7)]


def test_the_batch_size_that_a_rate_is_scaled_by() -> None:
    fixed = settings("training.batch_size=4", "training.global_batch_size=16").training
    state = TrainState()
    state.keep_rate(fixed, {})
    assert state.rate_batch_size == 4
    earlier = TrainState(step=5)  # of a version that did not keep it
    earlier.keep_rate(fixed, {"training.batch_size": 8})
    assert earlier.rate_batch_size == 8
    # Without a global batch size the rate does not depend on it. The step 16 of the next start is one of four times 4.
    grown = TrainState(step=5, rate_batch_size=8)
    grown.keep_rate(settings("training.batch_size=4", "training.accumulation=4").training, {})
    assert grown.rate_batch_size == 4


def test_a_checkpoint_that_is_due_is_written_before_a_long_evaluation(
    train: Train, evaluations, saved: list[tuple[int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops the job may not wait for the end of it."""

    def wait_for_checkpoint(job: Trainer) -> None:
        deadline = time.monotonic() + 20
        while job.state.step not in steps(tmp_path / "run"):
            assert time.monotonic() < deadline, f"no checkpoint of step {job.state.step}"
            time.sleep(0.01)

    monkeypatch.setattr(session, "_LONG_EVALUATION", 0.0)
    evaluations([1.0, 2.0, 0.5], wait_for_checkpoint)
    assert train().returncode == 0
    # Once more only with what has become the best; the last one holds the last evaluation anyway.
    assert saved == [(2, False), (2, True), (4, False), (6, False), (6, True)]
    newest = position(tmp_path / "run/checkpoints/latest")
    assert (newest["evaluated_step"], newest["best_step"]) == (6, 6)


def test_a_short_evaluation_costs_no_second_checkpoint(
    train: Train, evaluations, saved: list[tuple[int, bool]]
) -> None:
    evaluations([3.0, 2.0, 1.0])
    train()
    assert saved == [(2, False), (2, True), (4, True), (6, True)]  # how long the first one takes is not known before


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_a_stop_in_an_evaluation_ends_the_job_after_it(train: Train, evaluations, tmp_path: Path, loss: float) -> None:
    def stop(job: Trainer) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)  # the answer comes from another thread

    found = evaluations([loss], stop)
    done = train("checkpoint.every_steps=none")
    assert done.returncode == 1 and found == [2]
    assert "SIGTERM: the job stops after this evaluation and saves a checkpoint" in done.stdout
    if math.isnan(loss):  # nor are weights that give no loss kept because of a stop
        assert "stopped after step 2 (SIGTERM); this step could not be saved" in done.stdout
        assert steps(tmp_path / "run") == []
        return
    assert "stopped after step 2 (SIGTERM); everything is saved" in done.stdout
    assert position(tmp_path / "run/checkpoints/latest")["evaluated_step"] == 2
    # So it is not evaluated again.
    found = evaluations([2.0, 3.0])
    assert train().returncode == 0 and found[:2] == [4, 6]
    assert [step for step, _ in lines(tmp_path / "run", "valid_loss")] == [2, 4, 6]


def test_a_stop_of_another_rank_in_an_evaluation_ends_the_job(
    train: Train, evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduce = World.all_reduce_

    def all_reduce_(world: World, tensor: torch.Tensor, name: str, operation: Any = "sum") -> torch.Tensor:
        if name == "evaluation.end":
            assert operation == "max"
            tensor[0] = 1.0
        return reduce(world, tensor, name, operation)

    monkeypatch.setattr(World, "all_reduce_", all_reduce_)
    found = evaluations([1.0])
    assert "stopped after step 2 (asked on another rank); everything is saved" in train().stdout
    assert found == [2]


def test_a_stop_in_a_step_is_answered(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(job: Trainer, result: StepResult) -> StepResult:
        if job.state.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return result

    changed_steps(monkeypatch, stop)
    done = train()
    assert done.stdout.count("SIGTERM: the job stops after this step and saves a checkpoint; Ctrl-C again") == 1


def test_an_answer_does_not_wait_for_what_the_signal_has_interrupted() -> None:
    """A handler that prints itself would enter the same print again."""
    stop, told = StopRequest(), list[str]()
    try:
        stop.on_first = lambda: told.append(str(stop.signal))
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        assert told == ["SIGTERM"] and stop
    finally:
        stop.restore()


def test_a_run_that_begins_with_the_last_step_of_another_has_its_checkpoint(train: Train, tmp_path: Path) -> None:
    train()
    other = tmp_path / "other"
    done = train(f"output_dir={other}", f"checkpoint.resume={tmp_path / 'run/checkpoints/latest'}")
    assert done.returncode == 0 and "done: valid loss" in done.stdout
    assert steps(other) == [6]
    assert (other / "checkpoints/best").resolve().name == "step-00000006"
    assert json.loads((other / "summary.json").read_text())["best_step"] == 6


def test_the_best_of_another_run_is_not_that_of_this_one(train: Train, evaluations, tmp_path: Path) -> None:
    evaluations([1.0, 5.0, 6.0, 7.0])
    train("training.max_steps=4")
    assert position(tmp_path / "run/checkpoints/latest")["best_step"] == 2
    other = tmp_path / "other"
    words = [f"output_dir={other}", f"checkpoint.resume={tmp_path / 'run/checkpoints/latest'}"]
    found = evaluations([4.0, 8.0, 9.0])
    done = train(*words)
    assert found[:2] == [4, 6]
    assert "is not there or damaged" not in done.stdout
    assert json.loads((other / "summary.json").read_text())["best_step"] == 4
    assert (other / "checkpoints/best").resolve().name == "step-00000004"


def test_an_evaluation_that_is_repeated_has_one_line(
    train: Train, evaluations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is killed after an evaluation that no checkpoint knows of."""
    words = ["training.text_samples=1", "training.max_steps=4"]
    monkeypatch.setattr(Trainer, "text_samples", lambda job, split: [{"prompt": "a"}])
    evaluations([5.0])
    with monkeypatch.context() as context:

        def killed(job: Trainer, result: StepResult) -> StepResult:
            if job.state.step == 3:
                raise RuntimeError("killed")
            return result

        changed_steps(context, killed)
        context.setattr(session, "is_better", lambda *_: False)
        train(*words)
    assert position(tmp_path / "run/checkpoints/step-00000002")["evaluated_step"] is None
    assert [step for step, _ in lines(tmp_path / "run", "valid_loss")] == [2]
    found = evaluations([5.0, 4.0])
    train(*words)
    assert found[:2] == [2, 4]
    assert [step for step, _ in lines(tmp_path / "run", "valid_loss")] == [2, 4]
    assert [step for step, _ in lines(tmp_path / "run", "loss")] == [1, 2, 3, 4]
    samples = [json.loads(line)["step"] for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert samples == [2, 4]


@pytest.mark.parametrize("every", ["none", "2", "6"])
def test_weights_that_are_no_numbers_at_the_end_are_no_success(
    train: Train, evaluations, tmp_path: Path, every: str
) -> None:
    evaluations([2.0, 1.0, math.nan])
    done = train(f"checkpoint.every_steps={every}")
    assert done.returncode == 1 and "done:" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert "step 6: the last validation loss is nan; a lower optimizer.lr" in line
    assert not (tmp_path / "run/summary.json").exists()
    # What is there is of good weights; the same command takes the last steps again.
    assert steps(tmp_path / "run") == [2, 4]
    # A stop may have saved them before.
    evaluations([math.nan] * 9)
    assert train("checkpoint.keep_best=false", "training.max_steps=4").returncode == 1


def test_weights_that_are_no_numbers_as_patience_ends(train: Train, evaluations, tmp_path: Path) -> None:
    evaluations([1.0, math.nan, math.nan])
    done = train("checkpoint.every_steps=2", "training.patience=1")
    assert done.returncode == 1 and "step 4: the last validation loss is nan" in done.stderr
    assert steps(tmp_path / "run") == [2]


def test_a_signal_in_the_last_evaluation_is_answered(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = Trainer.evaluate

    def signalled(job: Trainer, split: str) -> Evaluation:
        if split == "test":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
        return evaluate(job, split)

    monkeypatch.setattr(Trainer, "evaluate", signalled)
    done = train()
    assert done.returncode == 0
    assert "SIGTERM: training has ended and is saved; only the last evaluation" in done.stdout


def test_a_step_without_a_loss_leaves_the_loss_of_its_interval(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that float16 has skipped."""

    def lose(job: Trainer, result: StepResult) -> StepResult:
        lost = result._replace(totals=result.totals._replace(loss=math.nan))
        return lost if job.state.step == 2 else result

    changed_steps(monkeypatch, lose)
    train("training.log_every=3")
    found = dict(lines(tmp_path / "run", "loss"))
    assert [step for step, loss in found.items() if loss is not None] == [1, 3, 6]


def test_weights_that_may_be_no_numbers_are_not_saved(
    train: Train, evaluations, saved: list[tuple[int, bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, stops = {2, 3}, set[int]()

    def lose(job: Trainer, result: StepResult) -> StepResult:
        job.steps_without_loss = int(job.state.step in bad)
        wishes = result.totals.wishes._replace(stop=job.state.step in stops)
        return result._replace(totals=result.totals._replace(wishes=wishes))

    changed_steps(monkeypatch, lose)
    evaluations([1.0, 1.0, 1.0])
    words = ["checkpoint.every_steps=1", "training.eval_every=5"]
    train(*words)
    assert [step for step, _ in saved[:3]] == [1, 4, 5]
    # Unless an evaluation shows that they are numbers.
    saved.clear()
    bad |= {5}
    train(*words, f"output_dir={tmp_path / 'second'}")
    assert [step for step, _ in saved[:3]] == [1, 4, 5]
    stops |= {2}
    stopped = train(*words, f"output_dir={tmp_path / 'third'}")
    assert "stopped after step 2" in stopped.stdout and "this step could not be saved" in stopped.stdout


def test_a_stop_does_not_wait_for_the_report(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    order, end = list[str](), Trackers.end
    monkeypatch.setattr(Trackers, "end", lambda *words: (order.append("trackers"), end(*words))[1])
    monkeypatch.setattr(run_report, "write_report", lambda run: order.append("report"))
    changed_steps(
        monkeypatch,
        lambda job, result: result._replace(
            totals=result.totals._replace(wishes=result.totals.wishes._replace(stop=True))
        ),
    )
    assert "stopped after step 1" in train(report=True).stdout
    assert order == ["trackers", "report"]
