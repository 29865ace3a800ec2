"""Which evaluation is the best, which weights are tested at the end, and what is said of it when a disk is full."""

import errno
import json
import math
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from commands import command
from small_job import SMALL, write_texts

from hvd_transformer.checkpoint.store import CheckpointStore
from hvd_transformer.reporting import run_report
from hvd_transformer.tasks.language_model_task import LanguageModelTask
from hvd_transformer.tasks.metrics import Evaluation
from hvd_transformer.training import session
from hvd_transformer.training.state import Wishes
from hvd_transformer.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

Train = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("text"))


def six_steps(corpus: Path, run: Path, *words: str, report: bool = False) -> subprocess.CompletedProcess[str]:
    small = [word for word in SMALL if not word.startswith(("data.cache_dir", "training.max_steps"))]
    small += [f"data.source={corpus}", f"data.cache_dir={corpus / 'cache'}", f"output_dir={run}"]
    return command("hvd-train", *small, "training.max_steps=6", "training.eval_every=2", *words, report=report)


@pytest.fixture
def train(corpus: Path, tmp_path: Path) -> Train:
    """Six steps with an evaluation after every second one; the summary, and all that was printed."""

    def run(*words: str, report: bool = False) -> tuple[dict[str, Any], str]:
        done = six_steps(corpus, tmp_path / "run", *words, report=report)
        assert done.returncode in (0, 1), done.stderr
        return json.loads((tmp_path / "run" / "summary.json").read_text()), done.stdout + done.stderr

    return run


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], list[str]]:
    """Sets the losses of the evaluations; returns the list of the splits that are evaluated."""

    def found(losses: Sequence[float]) -> list[str]:
        values, splits = iter(losses), list[str]()

        def evaluate(trainer: Trainer, split: str) -> Evaluation:
            splits.append(split)
            return Evaluation({"loss": next(values), "perplexity": 1.0}, 1)

        monkeypatch.setattr(Trainer, "evaluate", evaluate)
        return splits

    return found


@pytest.fixture
def full_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the checkpoint of a step find no space, so many `times`."""
    monkeypatch.setattr(session, "_PAUSES", (0.1, 0.1))

    def set_step(step: int, times: int = 99) -> None:
        original, failures = CheckpointStore.save, iter(range(times))

        def save(store: CheckpointStore, snapshot: Any, *more: Any) -> Path:
            if snapshot.step == step and next(failures, None) is not None:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(store, snapshot, *more)

        monkeypatch.setattr(CheckpointStore, "save", save)

    return set_step


def test_a_first_loss_that_is_no_number_does_not_stay_the_best(train: Train, evaluations) -> None:
    evaluations([math.nan, 2.0, 3.0, 2.0, 2.1])
    summary, text = train("training.patience=2")
    assert (summary["steps"], summary["best_step"], summary["best_value"]) == (6, 4, 2.0)
    assert "valid loss nan, perplexity 1.00 (best: none)" in text


def test_a_best_value_below_zero_keeps_its_sign(train: Train, evaluations) -> None:
    evaluations([-1.0, -1.5, -1.2, -1.5, 0.0])
    summary, _ = train()
    assert (summary["best_step"], summary["best_value"], summary["valid_loss"]) == (4, -1.5, -1.5)


def test_without_keep_best_the_last_weights_are_not_called_the_best(train: Train, evaluations) -> None:
    evaluations([1.0, 2.0, 3.0, 3.1])
    summary, text = train("checkpoint.keep_best=false")
    assert summary["valid_loss"] == 3.0
    assert "done: valid loss 3.0000, perplexity 1.00 (last, at step 6; best: step 2); test loss 3.1000" in text


@pytest.mark.parametrize(("last", "best"), [(1.6, 6), (3.0, 2)])
def test_a_best_that_was_not_saved_is_none(
    last: float, best: int, train: Train, evaluations, full_at, tmp_path: Path
) -> None:
    """Later evaluations are compared with the best weights that exist."""
    values = {2: 2.0, 6: last}
    evaluations([2.0, 1.0, last, *([values[best]] * (best != 6)), 3.1])
    full_at(4)
    summary, text = train("checkpoint.every_steps=5")
    assert text.count("the checkpoint of step 4 could not be written") == 1
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == f"step-0000000{best}"
    assert (summary["best_step"], summary["best_value"], summary["valid_loss"]) == (best, values[best], values[best])
    assert f"(best, at step {best})" in text


def test_the_first_best_that_was_not_saved_is_none(train: Train, evaluations, full_at) -> None:
    evaluations([1.0, math.nan, 3.0, 3.1])
    full_at(2)
    summary, _ = train()
    assert (summary["best_step"], summary["valid_loss"]) == (6, 3.0)


def test_if_the_best_checkpoint_is_gone_the_last_weights_are_tested(
    train: Train, evaluations, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = evaluations([2.0, 1.0, 3.0, 3.1])
    monkeypatch.setattr(CheckpointStore, "whole", lambda store, step, verify: None)
    summary, text = train()
    assert splits == ["valid", "valid", "valid", "test"]  # not once more with the weights of step 4
    assert (summary["best_step"], summary["valid_loss"]) == (4, 3.0)
    assert "the best checkpoint, of step 4, is not there or damaged; the last weights are tested instead" in text
    assert "(last, at step 6; best: step 4)" in text


@pytest.mark.parametrize("is_full", [False, True])
def test_a_stop_says_that_all_is_saved_only_if_it_is(
    is_full: bool, train: Train, full_at, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Trainer.queue
    stop = Wishes(stop=True)
    monkeypatch.setattr(
        Trainer, "queue", lambda job, plan, wishes, costs, report: queue(job, plan, stop, report=report)
    )
    if is_full:
        full_at(1)
    summary, text = train()
    assert (summary["status"], summary["steps"]) == ("stopped", 1)
    assert ("everything is saved" in text) != is_full
    assert ("this step could not be saved" in text) == is_full


@pytest.mark.parametrize(("losses", "best"), [([2.0, 3.0, 1.0, 1.1], 6), ([2.0, 1.0, 3.0, 1.0, 1.1], 4)])
def test_the_last_checkpoint_is_tried_again(
    losses: list[float], best: int, train: Train, evaluations, full_at, tmp_path: Path
) -> None:
    evaluations(losses)
    full_at(6, times=2)
    summary, text = train()
    assert text.count("the checkpoint of step 6 could not be written") == 2
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "latest").resolve().name == "step-00000006"
    assert (checkpoints / "best").resolve().name == f"step-0000000{best}"
    assert (summary["status"], summary["best_step"]) == ("finished", best)
    assert f"(best, at step {best})" in text


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_and_the_same_command_goes_on(
    corpus: Path, tmp_path: Path, full_at, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the weights of the end would be gone, and nobody would start the job again."""
    full_at(6)
    done = six_steps(corpus, tmp_path / "run", "checkpoint.every_steps=4")
    assert done.returncode == 1
    assert done.stdout.count("the checkpoint of step 6 could not be written") == 3
    assert done.stderr.count("step 6: the last checkpoint could not be written, see the warnings above") == 1
    assert "done:" not in done.stdout and not (tmp_path / "run" / "summary.json").exists()
    monkeypatch.undo()
    done = six_steps(corpus, tmp_path / "run", "checkpoint.every_steps=4")
    assert done.returncode == 0
    assert "after step 4 of 6" in done.stdout and "done: valid loss" in done.stdout


def test_a_report_that_cannot_be_drawn_does_not_fail_the_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ticks(run: Path) -> None:
        raise ValueError("arange: cannot compute length")

    monkeypatch.setattr(run_report, "write_report", no_ticks)
    summary, text = train(report=True)
    assert summary["status"] == "finished"
    assert "the report could not be written: arange: cannot compute length" in text and "done: valid loss" in text


def test_steps_without_any_target_make_no_line_and_no_error(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a task may have that predicts few of its tokens."""
    original, left = LanguageModelTask.num_targets, iter([0, 0, None, 0])
    monkeypatch.setattr(
        LanguageModelTask, "num_targets", lambda task, batch: original(task, batch) if next(left, None) is None else 0
    )
    train("training.log_every=1", "training.eval_every=6", "training.eval_batches=1")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [3, 5, 6]
