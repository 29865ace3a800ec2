"""Curves of files that grow, are cut, and are long."""

import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import add_lines, line, training

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs import plain_files
from hvd_transformer.service.runs.metrics import curves as module
from hvd_transformer.service.runs.metrics import metrics_file, pyramid, raw_blocks
from hvd_transformer.service.runs.metrics.curve import Curve
from hvd_transformer.service.runs.metrics.curves import Curves


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "metrics.jsonl").touch()
    return tmp_path


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of some thousand lines is a long one."""
    monkeypatch.setattr(pyramid, "MOST_RAW", 256)
    monkeypatch.setattr(raw_blocks, "_BLOCK_BYTES", 4096)
    monkeypatch.setattr(metrics_file, "READ_BYTES", 8192)


def test_shows_all_points_of_a_short_run(run: Path) -> None:
    add_lines(run, training(range(10, 110, 10)))
    add_lines(run, [{"step": 100, "epoch": 1, "valid_loss": 0.5}])
    curve = Curves().of(run)
    assert curve.points("loss") == (list(range(10, 110, 10)), [10 / step for step in range(10, 110, 10)], 10)
    assert curve.points("valid_loss") == ([100], [0.5], 1)
    assert curve.points("no such key") == ([], [], 0)
    assert curve.keys() == [
        "epoch",
        "samples",
        "loss",
        "lr",
        "tokens_per_second",
        "milliseconds_per_step",
        "valid_loss",
    ]
    assert curve.last_step == 100
    assert curve.complete.is_set()


@pytest.mark.parametrize(("x", "per_step"), [("step", 1), ("samples", 8), ("seconds", 0.1), ("tokens", 500)])
def test_can_be_drawn_over_every_axis(run: Path, x: str, per_step: float) -> None:
    add_lines(run, training(range(10, 2000, 10)))
    curve = Curves().of(run)
    points = curve.points("loss", 500 * per_step, 604 * per_step, x=x)
    assert points.x == pytest.approx([step * per_step for step in range(500, 610, 10)])
    assert points.y == [10 / step for step in range(500, 610, 10)]


@pytest.mark.parametrize("huge", [10**306, 1e306], ids=["int", "float"])
def test_huge_numbers_end_an_axis(run: Path, huge: float) -> None:
    steps = training([10, 10**9, 2 * 10**9])
    add_lines(run, [row | {"milliseconds_per_step": huge, "tokens_per_second": 0} for row in steps])
    points = Curves().of(run).points("loss", x="seconds")
    assert max(points.x) == 1e18 and points.n == 3
    assert Curves().of(run).points("loss", x="tokens").n == 3


@pytest.mark.usefixtures("small")
def test_an_error_in_the_curves_of_one_run_leaves_those_of_others(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in (run, broken):
        add_lines(path, training(range(1, 5001)))
    advance = Curve.advance

    def fail_in_background(curve: Curve, parts: int = 1) -> bool:
        if curve._run == broken and threading.current_thread() is not threading.main_thread():
            raise RuntimeError("an error nobody thought of")
        return advance(curve, parts)

    monkeypatch.setattr(Curve, "advance", fail_in_background)
    curves = Curves()
    curves.of(broken)
    assert curves.of(run).complete.wait(30)
    assert curves.of(broken).points("loss").n > 0  # read anew


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("x", ["step", "samples", "seconds", "tokens"])
def test_every_pixel_of_every_axis_has_two_points_at_most_and_its_extremes(run: Path, x: str) -> None:
    draw, width = random.Random(4), 50
    rows = training(range(1, 5001))
    for row in rows:  # steps take ever longer: pixels of time are not pixels of steps
        row |= {"loss": draw.random(), "milliseconds_per_step": 0.1 * row["step"]}
    add_lines(run, rows)
    curve = Curves().of(run)
    assert curve.complete.wait(30)
    end = {"step": 5000, "samples": 40_000, "seconds": 1250.25, "tokens": 6_251_250}[x]
    points = curve.points("loss", 0, end, width, x)
    assert (points.x, points.n) == (sorted(points.x), 5000)
    pixels = [min(int(place / end * width), width - 1) for place in points.x]
    assert all(1 <= pixels.count(pixel) <= 2 for pixel in range(width))
    assert {min(row["loss"] for row in rows), max(row["loss"] for row in rows)} <= set(points.y)


def test_values_at_a_step_are_those_of_that_step(run: Path) -> None:
    add_lines(run, [{"step": step, "epoch": 1, "valid_loss": step % 7, "loss": 1.0} for step in range(100)])
    curve = Curves().of(run)
    assert [curve.values_at(step, prefix="valid_") for step in range(100)] == [
        {"valid_loss": step % 7} for step in range(100)
    ]
    assert curve.values_at(100) == {}


def test_unknown_axes_are_refused(run: Path) -> None:
    with pytest.raises(UserError, match="x=epoch: no such axis; axes: step, seconds, samples, tokens"):
        Curves().of(run).points("loss", x="epoch")


def test_new_lines_are_there_at_the_next_look(run: Path) -> None:
    curves = Curves()
    add_lines(run, training([1]))
    assert curves.of(run).points("loss").x == [1]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert curves.of(run).points("loss").x == [1]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'ss": 5}\n')
    assert curves.of(run).points("loss").y == [10, 5]


def test_null_and_nan_are_gaps(run: Path) -> None:
    (run / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3}\n{"step": 2, "loss": null}\n{"step": 3, "loss": NaN}\n{"step": 4, "loss": 1}\n'
    )
    assert Curves().of(run).points("loss") == ([1, 2, 3, 4], [3, None, None, 1], 4)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("place", [0, 1, 1234, 4999])
@pytest.mark.parametrize("x", ["step", "seconds"])
def test_a_single_spike_is_seen_at_every_zoom(run: Path, place: int, x: str) -> None:
    rows = training(range(1, 5001))
    rows[place]["loss"] = 1e9
    add_lines(run, rows)
    curves = Curves()
    curve = curves.of(run)
    assert curve.complete.wait(30)
    there = (place + 1) * (0.1 if x == "seconds" else 1)
    for zoom in (1.0, 0.3, 0.1, 0.03, 0.01, 0.002):
        span = zoom * (500 if x == "seconds" else 5000)
        points = curve.points("loss", there - span / 2, there + span / 2, 40, x)
        assert 1e9 in points.y
        assert points.x[points.y.index(1e9)] == pytest.approx(there)
        assert len(points.x) <= 80
        assert points.x == sorted(points.x)


@pytest.mark.usefixtures("small")
def test_a_close_view_of_a_long_run_shows_every_point(run: Path) -> None:
    draw = random.Random(3)
    rows = training(range(1, 5001))
    for row in rows:
        row["loss"] = draw.random()
    add_lines(run, rows)
    curve = Curves().of(run)
    assert curve.complete.wait(30)
    for first in (1, 1000, 2000, 4990, 4999):
        points = curve.points("loss", first, first + 19, 400)
        wanted = rows[first - 1 : first + 19]
        assert (points.x, points.y) == ([row["step"] for row in wanted], [row["loss"] for row in wanted])
        assert points.n == len(wanted)


@pytest.mark.usefixtures("small")
def test_a_close_view_reads_little_of_a_long_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_lines(run, training(range(1, 5001)))
    curve = Curves().of(run)
    assert curve.complete.wait(30)
    read = []
    pread = os.pread
    monkeypatch.setattr(raw_blocks.os, "pread", lambda file, size, place: read.append(size) or pread(file, size, place))
    for _ in range(3):
        curve.points("loss", 2000, 2010, 400)
    assert len(read) in (1, 2)  # the blocks are kept
    assert sum(read) <= 4 * 8192


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("way", ["in place", "in a new file"])
def test_a_run_that_resumes_loses_the_lines_that_it_repeats(run: Path, way: str) -> None:
    curves = Curves()
    add_lines(run, training(range(1, 3001), loss=1.0))
    assert curves.of(run).complete.wait(30)
    path = run / "metrics.jsonl"
    kept = b"".join(map(line, training(range(1, 2001), loss=1.0)))
    if way == "in place":
        os.truncate(path, len(kept))
        add_lines(run, training(range(2001, 3001), loss=2.0))
    else:
        (run / "aside").write_bytes(kept + b"".join(map(line, training(range(2001, 3001), loss=2.0))))
        (run / "aside").replace(path)
    curve = curves.of(run)
    while not curve.advance():
        pass
    points = curve.points("loss", width=4000)
    assert points.n == 3000
    assert curve.points("loss", 2001, 3000).y[0] == curve.points("loss", 2001, 3000).y[-1] == 2.0
    assert curve.points("loss", 1, 2000).y[-1] == 1.0


def test_a_missing_or_linked_file_is_told_in_one_line(tmp_path: Path) -> None:
    curves = Curves()
    with pytest.raises(UserError, match="metrics.jsonl cannot be read: No such file or directory"):
        curves.of(tmp_path)
    (tmp_path / "elsewhere").write_bytes(line({"step": 1, "loss": 1}))
    (tmp_path / "metrics.jsonl").symlink_to("elsewhere")
    with pytest.raises(UserError, match="cannot be read"):
        curves.of(tmp_path)


def test_a_run_behind_a_link_is_refused(tmp_path: Path, run: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "metrics.jsonl").write_bytes(line({"step": 1, "loss": 1}))
    (tmp_path / "link").symlink_to("inner")
    with pytest.raises(UserError):
        Curves().of(tmp_path / "link")
    with pytest.raises(OSError):
        plain_files.open_folder(tmp_path / "link")


def test_a_file_of_rubbish_has_no_curves(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(os.urandom(100_000) + b"\n" + b"{" * 100_000 + b"\n")
    curve = Curves().of(run)
    assert curve.keys() == []


def test_the_memory_of_all_runs_is_bounded(tmp_path: Path) -> None:
    curves = Curves(limit=1_000_000)
    for number in range(20):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "metrics.jsonl").write_bytes(b"".join(map(line, training(range(1, 1001)))))
        curves.of(run).points("loss")
    sizes = curves.sizes()
    assert sum(sizes.values()) <= 1_000_000
    assert 1 < len(sizes) < 20
    assert tmp_path / "19" in sizes
    assert curves.of(tmp_path / "0").points("loss").n == 1000


def test_runs_that_are_compared_become_coarser_and_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at one would forget another, which would be read again at the next look, for ever."""
    monkeypatch.setattr(metrics_file, "READ_BYTES", 1 << 16)
    monkeypatch.setattr(pyramid, "_LEAST_CHUNKS", 16)
    monkeypatch.setattr(pyramid, "_LEAST_RAW", 256)
    lines = b"".join(map(line, training(range(1, 8001))))
    runs = [tmp_path / str(number) for number in range(12)]
    for run in runs:
        run.mkdir()
        (run / "metrics.jsonl").write_bytes(lines)
    read = []
    advance = Curve.advance
    monkeypatch.setattr(Curve, "advance", lambda self, parts=1: read.append(self._run) or advance(self, parts))
    curves = Curves(limit=2_000_000)  # of which one alone would take a half
    end = time.monotonic() + 60
    complete = [False]
    while not all(complete):
        complete = [curves.of(run).complete.is_set() for run in runs]  # a page looks at all of them
        assert time.monotonic() < end
        assert sum(curves.sizes().values()) < 2_500_000
        time.sleep(0.01)
    assert list(curves.sizes()) == runs
    assert sum(curves.sizes().values()) <= 2_000_000
    for run in runs:
        points = curves.of(run).points("loss")
        assert (max(points.y), min(points.y), points.n) == (10.0, 10 / 8000, 8000)
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    monkeypatch.setattr(module, "_LOOKED_SECONDS", 0.0)  # nobody looks at them any more
    coarsened: list[Path] = []
    monkeypatch.setattr(Curve, "coarsen", lambda self: coarsened.append(self._run))
    assert curves.of(tmp_path).complete.wait(30)
    assert (len(curves.sizes()) < 13, tmp_path in curves.sizes(), coarsened) == (True, True, [])


def test_nobody_waits_for_a_file_that_hangs_while_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyramid, "_LEAST_CHUNKS", 16)
    monkeypatch.setattr(pyramid, "_LEAST_RAW", 256)
    runs = [tmp_path / str(number) for number in range(3)]
    for run, count in zip(runs, (4000, 2000, 2000), strict=True):
        run.mkdir()
        add_lines(run, training(range(1, count + 1)))
    curves, go, hangs = Curves(), threading.Event(), threading.Event()
    hung = curves.of(runs[0])  # the largest
    assert hung.complete.wait(30)
    curves._limit = sum(curves.sizes().values())

    def hang() -> None:
        hangs.set()
        go.wait(60)

    monkeypatch.setattr(hung._file, "read", hang)
    waiting = threading.Thread(target=curves.of, args=[runs[0]], daemon=True)
    waiting.start()
    assert hangs.wait(30)
    shown = threading.Event()

    def look() -> None:
        for run in runs[1:]:
            assert curves.of(run).points("loss").n == 2000
        shown.set()

    threading.Thread(target=look, daemon=True).start()
    try:
        assert shown.wait(30)
    finally:
        go.set()
    waiting.join(30)
    assert sum(curves.sizes().values()) <= curves._limit


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Curve]]:
    """Whose turn it was in the background, which waits at its first turn until `go`."""
    seen: list[Curve] = []
    advance = Curve.advance

    def recorded(self: Curve, parts: int = 1) -> bool:
        if threading.current_thread().name == "curves":
            assert _GO.wait(30)
            seen.append(self)
        return advance(self, parts)

    _GO.clear()
    monkeypatch.setattr(Curve, "advance", recorded)
    yield seen
    _GO.set()


_GO = threading.Event()


def _long_and_short(folder: Path) -> tuple[Path, Path]:
    runs = folder / "long", folder / "short"
    for run, count in zip(runs, (5000, 400), strict=True):
        run.mkdir()
        add_lines(run, training(range(1, count + 1)))
    return runs


@pytest.mark.usefixtures("small")
def test_long_files_are_read_in_turn(tmp_path: Path, turns: list[Curve]) -> None:
    curves, (long, short) = Curves(), _long_and_short(tmp_path)
    first, second = curves.of(long), curves.of(short)
    assert not first.complete.is_set()
    assert 0 < first.points("loss").n < 5000  # what has been read so far
    _GO.set()
    assert second.complete.wait(30)
    assert first.complete.wait(30)
    assert first.points("loss").n == 5000
    assert turns[:4] == [first, second, first, second]
    assert second not in turns[len(turns) // 2 :]


@pytest.mark.usefixtures("small")
def test_what_is_forgotten_is_not_read_on(tmp_path: Path, turns: list[Curve]) -> None:
    curves, (long, short) = Curves(limit=1), _long_and_short(tmp_path)
    first, second = curves.of(long), curves.of(short)
    _GO.set()
    assert second.complete.wait(30)
    assert turns.count(first) <= 1
    assert not first.complete.is_set()
    assert list(curves.sizes()) == [short]


def test_what_nobody_looks_at_is_forgotten(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curves = Curves()
    curves.of(run)
    curves.tidy()
    assert len(curves.sizes()) == 1
    monkeypatch.setattr(module, "_IDLE_SECONDS", -1.0)
    curves.tidy()
    assert len(curves.sizes()) == 0


def test_values_of_an_evaluation(run: Path) -> None:
    add_lines(run, training([100]))
    add_lines(run, [{"step": 100, "valid_loss": 0.5, "valid_bleu": None}, {"step": 200, "valid_loss": 0.25}])
    curve = Curves().of(run)
    assert curve.values_at(100, "valid_") == {"valid_loss": 0.5}
    assert curve.values_at(150, "valid_") == {}


def test_keeps_the_last_comparisons_of_work(run: Path) -> None:
    add_lines(run, training(range(1, 9)))
    add_lines(run, training([10, 20, 30, 40], slowest_rank=1))
    add_lines(run, training([50]))
    assert [row["step"] for row in Curves().of(run).comparisons()] == [20, 30, 40]


def test_answers_are_json(run: Path) -> None:
    huge = {"loss": 1e308, "milliseconds_per_step": 1e308, "tokens_per_second": 1e308, "samples": 1e308}
    add_lines(run, [{"step": 1} | huge, {"step": 2.0**53, **huge, "loss": -1e308}])
    curve = Curves().of(run)
    for x in ("step", "seconds", "samples", "tokens"):
        points = curve.points("loss", x=x)
        json.dumps(points, allow_nan=False)
        assert not any(math.isnan(value) for value in points.x)


@pytest.mark.parametrize("first", [math.nan, -math.inf, 5, 0, None])
@pytest.mark.parametrize("last", [math.nan, math.inf, 5, 5e-324, 1e308, None])
@pytest.mark.parametrize("x", ["step", "tokens"])
def test_any_range_has_an_answer(run: Path, first: float | None, last: float | None, x: str) -> None:
    add_lines(run, training([0, 5, 6]))
    points = Curves().of(run).points("lr", first, last, width=10**9, x=x)
    assert len(points.x) == len(points.y) <= 3
