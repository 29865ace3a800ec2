"""metrics.jsonl and TensorBoard hold the same numbers, each step once, whatever happened."""

import gc
import json
import math
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvd_transformer.reporting import step_lines
from hvd_transformer.reporting.metrics_log import Columns, MetricsLog, read_rows


def fail(message: str) -> None:
    pytest.fail(message)


def rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "metrics.jsonl").read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=fail) for line in text.splitlines()]


def curve(folder: Path, key: str) -> list[tuple[int, float]]:
    """The values that TensorBoard shows."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(key)]


def test_same_numbers_in_both(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, fail)
    assert rows(tmp_path) == []
    log.write(10, epoch=1, loss=5.5, lr=1e-3)
    # Readable while the run is in progress.
    assert rows(tmp_path) == [{"step": 10, "epoch": 1, "loss": 5.5, "lr": 1e-3}]
    log.write(10, valid_loss=5.25, valid_perplexity=math.exp(5.25))
    log.write(20, epoch=1, loss=4.5, lr=9e-4)
    assert curve(tmp_path, "loss") == [(10, 5.5), (20, 4.5)]
    log.close()
    assert rows(tmp_path)[1] == {"step": 10, "valid_loss": 5.25, "valid_perplexity": math.exp(5.25)}
    assert curve(tmp_path, "valid_loss") == [(10, 5.25)]
    assert curve(tmp_path, "lr") == [(10, pytest.approx(1e-3)), (20, pytest.approx(9e-4))]


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, fail)
    log.write(1, loss=float("nan"), grad_norm=float("inf"), lr=0.5)
    log.close()
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]
    assert math.isnan(curve(tmp_path, "loss")[0][1])


def test_a_resumed_run_holds_each_step_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, fail)
    for step in (10, 20, 30, 40):
        log.write(step, loss=step / 10)
        if step == 20:
            log.write(step, valid_loss=1.0)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "lo')
    log = MetricsLog(tmp_path, 20, fail)
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 20]
    for step in (30, 40, 50):
        log.write(step, loss=-step / 10)
    log.close()
    assert [(row["step"], row.get("loss")) for row in rows(tmp_path)] == [
        (10, 1),
        (20, 2),
        (20, None),
        (30, -3),
        (40, -4),
        (50, -5),
    ]
    assert curve(tmp_path, "loss") == [(10, 1), (20, 2), (30, -3), (40, -4), (50, -5)]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_evaluation_that_is_repeated_is_removed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, fail)
    for step in (10, 20, 30):
        log.write(step, loss=1.0)
        log.write(step, valid_loss=2.0)
    log.close()
    MetricsLog(tmp_path, 20, fail, evaluates=True).close()
    assert [(row["step"], "valid_loss" in row) for row in rows(tmp_path)] == [(10, False), (10, True), (20, False)]
    MetricsLog(tmp_path, 20, fail).close()
    MetricsLog(tmp_path, 10, fail).close()
    assert [(row["step"], "valid_loss" in row) for row in rows(tmp_path)] == [(10, False), (10, True)]


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 16])
@pytest.mark.parametrize("tail", [b"", b'{"step": 9', b"\n", b"\r\n{}\n\n"])
def test_lines_are_cut_wherever_the_blocks_end(
    block: int, tail: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_lines, "_BLOCK_BYTES", block)
    lines = [json.dumps({"step": step, "text": "x" * (step * 5 % 13)}).encode() + b"\n" for step in range(1, 9)]
    path = tmp_path / "lines.jsonl"
    for last in range(10):
        path.write_bytes(b"".join(lines) + tail)
        step_lines.cut_after(path, lambda row, last=last: row["step"] <= last)
        assert path.read_bytes() == b"".join(lines[:last])
    path.write_bytes(tail)
    step_lines.cut_after(path, lambda row: True)
    assert path.read_bytes() == b""


def test_a_long_file_is_neither_read_whole_at_the_start_nor_kept_at_the_end(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step} | {f"metric_{key}": step / 7 + key for key in range(20)}) + "\n")
    size = (tmp_path / "metrics.jsonl").stat().st_size

    def peak(action: Callable[[], object]) -> float:
        """Of memory, as a fraction of the file."""
        gc.collect()
        tracemalloc.start()
        try:
            action()
            return tracemalloc.get_traced_memory()[1] / size
        finally:
            tracemalloc.stop()

    assert peak(lambda: step_lines.cut_after(tmp_path / "metrics.jsonl", lambda row: row["step"] <= 19_990)) < 0.1
    assert peak(lambda: Columns(read_rows(tmp_path))) < 0.8


@pytest.mark.parametrize("tail", [b'{"step": 2', b'{"step": 2}', b"\0\0\0\0", b'[1]\n{"st', b'"\xff\n', b"{}\n"])
def test_torn_and_foreign_lines_are_removed(tmp_path: Path, tail: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n' + tail)
    log = MetricsLog(tmp_path, 5, fail)
    log.write(6, loss=1.0)
    log.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 6]


def test_a_file_that_needs_no_repair_is_not_rewritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    MetricsLog(tmp_path, 1, fail).close()
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode


def test_a_long_run_keeps_tensorboard_small(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, fail)
    for step in range(0, 4_000_000, 100):
        log.write(step, loss=1.0)
    log.close()
    assert len(rows(tmp_path)) == 40_000
    points = curve(tmp_path, "loss")
    assert 10_000 < len(points) < 25_000
    assert [step for step, _ in points[:100]] == list(range(0, 10_000, 100))


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from hvd_transformer.reporting.metrics_log import MetricsLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is then an OSError, half of it done
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
warnings = []
log = MetricsLog(Path(sys.argv[1]), 0, warnings.append)
for step in range(1, 101):
    if step == 41:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    if step == 81:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    log.write(step, loss=step / 7, grad_norm=1.0, text_to_make_the_line_longer=1)
log.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
log = MetricsLog(Path(sys.argv[1]) / "second", 0, warnings.append)
log.write(1, loss=1.0)
log.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(*warnings, sep="\\n")
"""


def test_a_full_disk_is_told_once_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=True)
    warnings = done.stdout.splitlines()
    assert [warning.split(": ")[0] for warning in warnings] == [
        str(tmp_path / "metrics.jsonl"),
        str(tmp_path / "second" / "metrics.jsonl"),
    ]
    assert "cannot write: File too large" in warnings[0]
    assert done.stderr == ""
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 101))
    assert [step for step, _ in curve(tmp_path, "loss")] == list(range(1, 101))
    assert rows(tmp_path / "second") == []


RESUME_ON_A_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from hvd_transformer.reporting.metrics_log import MetricsLog

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
log = MetricsLog(Path(sys.argv[1]), 0, print)
for step in range(1, 101):
    log.write(step, loss=1.0)
log.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
MetricsLog(Path(sys.argv[1]), 60, print).close()
"""


def test_a_full_disk_does_not_hinder_going_on(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", RESUME_ON_A_FULL_DISK, tmp_path], check=True)
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, 61))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]
