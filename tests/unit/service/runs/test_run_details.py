"""One run in full: its ranks, checkpoints and logs."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import make_run, training

from hvd_transformer.monitoring.watchdog import Watchdog
from hvd_transformer.service.runs.checkpoints import best_evaluation, checkpoints
from hvd_transformer.service.runs.details import run_details
from hvd_transformer.service.runs.launcher_beats import LauncherBeats
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.runs.samples import StepSamples
from hvd_transformer.service.runs.status import RunStatus
from hvd_transformer.service.runs.watched_run import RunRow, run_id


@pytest.fixture
def launchers() -> Iterator[LauncherBeats]:
    made = LauncherBeats()
    yield made
    made.close()


def _save(run: Path, step: int, *sizes: int) -> None:
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    files = {f"{number}.safetensors": {"size": size} for number, size in enumerate(sizes)}
    (folder / "MANIFEST.json").write_text(json.dumps({"files": files}))
    os.utime(folder / "MANIFEST.json", (step, step))


def _row(run: Path, status: RunStatus) -> RunRow:
    return RunRow(run_id(run), "a", run, "ann", status)


def test_the_parts_of_a_run_at_work(tmp_path: Path, launchers: LauncherBeats) -> None:
    run = make_run(tmp_path / "a", [*training([100]), {"step": 100, "valid_loss": 0.5}, *training([200])])
    _save(run, 100, 1000, 24)
    _save(run, 200, 1000)
    (run / "checkpoints" / "best").symlink_to("step-00000100")
    (run / "checkpoints" / "latest").symlink_to("step-00000200")
    (run / "logs" / "rank-000.log").touch()
    (run / "samples.jsonl").write_text('{"step": 100, "samples": [{"prompt": "a"}]}\n')
    (run / "logs" / "beat-0").write_text(json.dumps(Watchdog(0, 1).beat()))
    details = run_details(_row(run, RunStatus.RUNNING), Curves(), launchers)
    assert [rank.rank for rank in details.ranks] == [0]
    first, second = details.checkpoints
    assert (first.step, first.bytes, first.time, first.best, first.latest) == (100, 1024, 100.0, True, False)
    assert (second.step, second.bytes, second.best, second.latest) == (200, 1000, False, True)
    assert (first.metrics, second.metrics) == ({"valid_loss": 0.5}, {})
    assert details.logs == ["0"]
    assert details.samples == [StepSamples(100, [{"prompt": "a"}])]


def test_ranks_of_a_run_that_has_ended_are_not_shown(tmp_path: Path, launchers: LauncherBeats) -> None:
    run = make_run(tmp_path / "a", training([1]))
    (run / "logs" / "beat-0").write_text(json.dumps(Watchdog(0, 1).beat()))
    assert run_details(_row(run, RunStatus.FAILED), Curves(), launchers).ranks == ()


@pytest.mark.parametrize("status", [RunStatus.RUNNING, RunStatus.FINISHED])
def test_a_run_that_is_gone_has_empty_parts(tmp_path: Path, launchers: LauncherBeats, status: RunStatus) -> None:
    details = run_details(_row(tmp_path / "gone", status), Curves(), launchers)
    assert (list(details.ranks), details.late, details.checkpoints, details.logs) == ([], None, [], [])
    assert details.samples == []


def test_what_is_no_checkpoint_is_left_out(tmp_path: Path) -> None:
    _save(tmp_path, 5, 1)
    _save(tmp_path, 7, 1)
    (tmp_path / "checkpoints" / "step-00000007" / "MANIFEST.json").write_text("half")
    for name in (".saving-step-00000006-ab", "step-00000009.damaged", "step-00000008"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints" / "best").symlink_to("../checkpoints/step-00000005")
    found = checkpoints(tmp_path, lambda step: {})
    assert [(checkpoint.step, checkpoint.bytes, checkpoint.best) for checkpoint in found] == [
        (5, 1, False),
        (7, 0, False),
    ]


@pytest.mark.parametrize("target", ["../..", "/etc", "step-00000005/..", "latest"])
def test_the_best_is_a_checkpoint_of_this_run(tmp_path: Path, target: str) -> None:
    _save(tmp_path, 5, 1)
    for folder in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-00000005"):
        (folder / "state.json").write_text(json.dumps({"position": {"best": 1.0}}))
    (tmp_path / "checkpoints" / "best").symlink_to(target)
    assert best_evaluation(tmp_path) == {}
