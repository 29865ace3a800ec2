"""The table's rows: right after every change, and cheap without one."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from made_runs import add_lines, foreign_lock, left_over_lock, line, make_run, training

from hvd_transformer.atomic import write_text
from hvd_transformer.folder_lock import FolderLock
from hvd_transformer.service.runs import folders
from hvd_transformer.service.runs import watched_run as module
from hvd_transformer.service.runs.index import RunIndex, run_id
from hvd_transformer.service.runs.status import RunStatus


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[FolderLock]:
    """Of the run "a", for which this process stands in."""
    made = FolderLock(tmp_path / "a" / ".lock", "hvd-train")
    yield made
    made.release()


def _row(index: RunIndex, run: Path) -> module.RunRow:
    index.refresh()
    row = index.row(run_id(run))
    assert row is not None
    return row


def _age(run: Path) -> None:
    before = time.time() - 60
    for path in (run.parent, run, *run.iterdir()):
        os.utime(path, (before, before), follow_symlinks=False)


def test_a_finished_run(tmp_path: Path) -> None:
    rows = [*training([1, 10, 20]), {"step": 20, "epoch": 2, "valid_loss": 0.5}]
    ended = {"steps": 20, "samples": 160, "world": 4, "tokens_per_second": 9.5, "test_loss": 0.75, "test_bleu": None}
    best = {"best_step": 10, "best_metric": "bleu", "best_value": 30.5}
    run = make_run(
        tmp_path / "sweep" / "a", rows, "seed=7", "training.max_steps=none", status="finished", **ended, **best
    )
    (run / "tensorboard").mkdir()
    for began in (1700000500, 1700000000):
        (run / "tensorboard" / f"events.out.tfevents.{began}.h1.1").touch()
    row = _row(RunIndex(tmp_path), run)
    assert (row.name, row.path, row.status) == ("sweep/a", run, RunStatus.FINISHED)
    assert (row.step, row.total_steps, row.epoch, row.samples, row.world) == (20, 20, 2, 160, 4)
    assert (row.task, row.config["seed"], row.tokens_per_second) == ("language_model", 7, 9.5)
    assert row.metrics["loss"] == 0.5
    assert (row.metrics["valid_loss"], row.metrics["test_loss"]) == (0.5, 0.75)
    assert "test_bleu" not in row.metrics
    assert row.best == {"step": 10, "metric": "bleu", "value": 30.5}
    assert row.began == 1700000000
    assert row.updated == pytest.approx((run / "metrics.jsonl").stat().st_mtime)
    assert row.problem == ""


def test_a_run_from_its_start_to_its_end(tmp_path: Path, lock: FolderLock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.0)
    index = RunIndex(tmp_path)
    index.refresh()
    run = make_run(tmp_path / "a")
    lock.take()
    assert _row(index, run).status is RunStatus.RUNNING
    (run / "logs" / "rank-000.log").write_text("INFO rank 0 of 2 (gloo) on h\nINFO epoch 1, step 1 of 300, lr 1\n")
    add_lines(run, training([10]))
    version = index.version
    row = _row(index, run)
    assert (row.step, row.total_steps, row.world, row.metrics["loss"]) == (10, 300, 2, 1.0)
    assert index.changed_since(version) == [row.id]
    progress = index.progress(run)
    assert (progress.step, progress.total_steps) == (10, 300)
    assert progress.seconds_left == pytest.approx(29.0, abs=0.2)
    assert progress.seconds_per_step == pytest.approx(0.1)
    lock.release()
    assert _row(index, run).status is RunStatus.FAILED
    assert index.progress(run).seconds_left is None
    (run / "summary.json").write_text(json.dumps({"status": "stopped", "steps": 12}))
    row = _row(index, run)
    assert (row.status, row.step) == (RunStatus.STOPPED, 12)


def test_the_time_between_two_starts_does_not_count_as_that_of_steps(tmp_path: Path, lock: FolderLock) -> None:
    run, began = make_run(tmp_path / "a"), time.time() - 100_000
    lock.take()
    index = RunIndex(tmp_path)

    def train(begin: float, steps: Sequence[int]) -> None:  # a step per second
        for second, step in enumerate(steps):
            add_lines(run, training([step]))
            os.utime(run / "metrics.jsonl", (begin + second, begin + second))
            index.refresh()

    train(began, range(1, 31))
    assert index.progress(run).seconds_per_step == pytest.approx(1.0)
    write_text(run / "config.yaml", (run / "config.yaml").read_text())  # it was preempted, and resumes after a day
    train(began + 90_000, range(31, 61))
    assert index.progress(run).seconds_per_step == pytest.approx(1.0)


def test_an_end_before_the_last_start_does_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", training([10]), status="finished", steps=10, valid_loss=1)
    (run / "exit.json").write_text(json.dumps({"code": 3, "cause": "rank 0 failed"}))
    index = RunIndex(tmp_path)
    row = _row(index, run)
    assert (row.status, row.cause) == (RunStatus.FINISHED, "rank 0 failed")
    _age(run)
    _row(index, run)
    aside = run / ".new"
    shutil.copy(run / "config.yaml", aside)
    aside.replace(run / "config.yaml")
    add_lines(run, training([20]))
    row = _row(index, run)
    assert (row.status, row.step, row.cause, row.summary) == (RunStatus.FAILED, 20, "", {})
    assert "valid_loss" not in row.metrics


def test_locks_of_dead_processes_and_other_hosts(tmp_path: Path) -> None:
    dead, away, old = (make_run(tmp_path / name, training([1])) for name in ("dead", "away", "old"))
    left_over_lock(dead / ".lock")
    foreign_lock(away / ".launcher")
    foreign_lock(old / ".lock")
    os.utime(old / ".lock", (0, 0))
    index = RunIndex(tmp_path)
    index.refresh()
    assert {row.name: row.status for row in index.rows()} == {
        "dead": RunStatus.FAILED,
        "away": RunStatus.RUNNING,
        "old": RunStatus.UNKNOWN,
    }


@pytest.mark.parametrize(("metric", "kept", "value"), [("bleu", -31.5, 31.5), ("r2", 0.5, -0.5), ("loss", -2.5, -2.5)])
def test_the_best_evaluation_so_far(tmp_path: Path, metric: str, kept: float, value: float) -> None:
    run = make_run(tmp_path / "a", training([10]))
    saved = run / "checkpoints" / "step-00000010"
    saved.mkdir(parents=True)
    position = {"best": kept, "best_metric": metric, "best_step": 10}
    (saved / "state.json").write_text(json.dumps({"position": position}))
    index = RunIndex(tmp_path)
    assert _row(index, run).best == {}
    (run / "checkpoints" / "best").symlink_to("step-00000010")
    _age(run)
    os.utime(run)
    assert _row(index, run).best == {"step": 10, "metric": metric, "value": value}


def test_finished_runs_cost_a_look_at_their_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / str(number), training([1]), status="finished") for number in range(20)]
    for run in runs:
        _age(run)
    index = RunIndex(tmp_path)
    for _ in range(2):
        index.refresh()
    version, looked = index.version, []
    monkeypatch.setattr(module.WatchedRun, "_read_metrics", lambda self: looked.append(self.path))
    for _ in range(10):
        index.refresh()
    assert len(looked) <= 1  # a thorough look now and then
    assert index.version == version
    os.utime(runs[7])
    index.refresh()
    assert runs[7] in looked


def test_a_run_that_is_removed_or_moved(tmp_path: Path) -> None:
    first, second = (make_run(tmp_path / name, training([1])) for name in ("a", "b"))
    index = RunIndex(tmp_path)
    index.refresh()
    version = index.version
    shutil.rmtree(first)
    second.rename(tmp_path / "c")
    index.refresh()
    assert [row.name for row in index.rows()] == ["c"]
    assert set(index.changed_since(version)) == {run_id(tmp_path / name) for name in "abc"}
    assert index.row(run_id(first)) is None
    assert index.progress(first) == (0, None, None, None)


def test_a_run_that_loses_its_files_is_no_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", training([1]))
    index = RunIndex(tmp_path)
    index.refresh()
    (run / "config.yaml").unlink()
    index.refresh()
    assert index.rows() == []
    (run / "config.yaml").touch()
    index.refresh()
    assert [row.name for row in index.rows()] == ["a"]


def test_unreadable_runs_say_why(tmp_path: Path) -> None:
    one, other = (make_run(tmp_path / name, training([1])) for name in ("a", "b"))
    (one / "config.yaml").write_text("[")
    index = RunIndex(tmp_path)
    assert _row(index, one).problem == "config.yaml cannot be read"
    (other / "metrics.jsonl").unlink()
    (other / "metrics.jsonl").mkdir()
    assert _row(index, other).problem.startswith("metrics.jsonl cannot be read: ")


def test_resumed_runs_lose_the_lines_that_they_repeat(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", training([10, 20, 30]))
    index = RunIndex(tmp_path)
    assert _row(index, run).step == 30
    (run / "aside").write_bytes(b"".join(map(line, training([10]))))
    (run / "aside").replace(run / "metrics.jsonl")
    assert _row(index, run).step == 10


def test_ids_name_the_real_folder(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    assert run_id(tmp_path / "link") == run_id(run)
    assert run_id(run) != run_id(tmp_path)
    assert len(run_id(run)) == 12


def test_ids_of_known_runs_ask_no_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still would stop the manager and every request."""
    make_run(tmp_path / "a")
    index = RunIndex(tmp_path)
    index.refresh()
    known = run_id(tmp_path / "a")
    monkeypatch.setattr(os, "lstat", lambda *words: pytest.fail("it stands still"))
    monkeypatch.setattr(os, "readlink", lambda *words: pytest.fail("it stands still"))
    assert run_id(tmp_path / "a") == known
    assert index.progress(tmp_path / "a").step == index._watched[tmp_path / "a"].row.step


def test_too_many_folders_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, run = RunIndex(tmp_path), make_run(tmp_path / "zz-run", training([1]))
    index.refresh()
    assert index.notes == []
    monkeypatch.setattr(folders, "MOST_FOLDERS", 2)
    for number in range(5):
        (tmp_path / str(number)).mkdir()
    index.refresh()
    assert index.notes == [
        f"{tmp_path} has more than 2 folders that are no runs: new runs may be missing here; move other folders away"
    ]
    add_lines(run, training([2]))
    assert _row(index, run).step == 2
    shutil.rmtree(run)
    index.refresh()
    assert index.rows() == []


def test_names_that_are_no_text_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "plain", training([1]), status="finished", note="\ud800", valid_loss=float("nan"))
    run.rename(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    index = RunIndex(tmp_path)
    index.refresh()
    (row,) = index.rows()
    assert row.name == "?"
    assert row.summary["note"] == "?"
    json.dumps([row.summary, row.metrics, row.config], allow_nan=False, ensure_ascii=False).encode()
