"""What the service's view of runs costs: the list of runs, one long curve, many curves and their page, memory.

    python -m benchmarks.service_runs [--folder DIR] [--json FILE]

The runs are made first: 1,000 finished ones of 50 lines, one of 1,000,000 lines, twenty of 100,000. Their files are
kept in `--folder` for the next time (800 MB), and removed without it. Exit code 1 where a bound is missed. The page is
drawn where Chromium and selenium are installed.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click

from hvd_transformer.atomic import write_text
from hvd_transformer.config import dump, load
from hvd_transformer.service.runs.index import RunIndex
from hvd_transformer.service.runs.metrics.axes import AXES
from hvd_transformer.service.runs.metrics.curves import Curves
from hvd_transformer.service.runs.query import Query, select, table_rows

NUM_RUNS, LONG, NUM_MANY, MANY = 1000, 1_000_000, 20, 100_000
WIDTH = 1000
SPIKE = 999.0
BOUNDS = {
    "list, p95, ms": 200.0,
    "refresh of 1,000 finished runs, ms": 10.0,
    "memory with 1,000 runs, MB": 80.0,
    "curve of 1,000,000 lines, slowest, ms": 100.0,
    "new line of 1,000,000, ms": 100.0,
    "20 curves of 100,000 lines, ms": 1000.0,
    "20 runs compared, drawn in a browser, ms": 1000.0,
}


@click.command()
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the runs there.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure there.")
@click.option("--part", type=click.Choice(["listed", "long", "many"]), hidden=True)
def main(folder: Path | None, json_file: Path | None, part: str | None) -> None:
    """Measure each part in a process of its own, and say which bounds are met."""
    if part is not None and folder is not None:
        print(json.dumps(_PARTS[part](folder)))
        return
    from benchmarks.drawn_page import compare_page
    from benchmarks.machine import machine

    figures: dict[str, float] = {}
    with ExitStack() as stack:
        made = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="service-runs-")))
        for name in _PARTS:
            _make(made / name, name)
            words = [sys.executable, "-m", "benchmarks.service_runs", "--part", name, "--folder", str(made / name)]
            figures |= json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
        drawn = compare_page(made / "many")
    if not drawn:
        print("not drawn in a browser: Chromium, chromedriver or selenium is not installed")
    figures |= drawn
    for name, value in figures.items():
        print(f"{name}: {value:.1f}" + (f" (at most {BOUNDS[name]:.0f})" if name in BOUNDS else ""))
    missed = [name for name, bound in BOUNDS.items() if figures.get(name, 0.0) > bound]
    print(f"{'MISSED: ' + '; '.join(missed) if missed else 'all bounds met'}; {machine()}")
    if json_file is not None:
        write_text(json_file, json.dumps(figures, indent=1) + "\n")
    sys.exit(bool(missed))


def _listed(folder: Path) -> dict[str, float]:
    """The list of 1,000 runs: filtered by text and by a key of the configuration, sorted by a metric."""
    before = _memory()
    index = RunIndex(folder)
    first = _milliseconds(index.refresh)
    time.sleep(4)  # until the times of all folders tell of later changes
    index.refresh()
    refreshes = [_milliseconds(index.refresh) for _ in range(50)]
    queries = [
        Query(),
        Query(sort="valid_loss", descending=False),
        Query(sort="optimizer.lr", text="run-1"),
        Query(where=[("seed", "3")], sort="loss"),
    ]
    lists = [
        _milliseconds(lambda query=query: select(table_rows(index.rows(), [], {}), query))
        for query in queries
        for _ in range(50)
    ]
    rows = index.rows()
    assert len(rows) == NUM_RUNS
    assert {row.status.value for row in rows} == {"finished"}
    return {
        "first refresh of 1,000 runs, ms": first,
        "refresh of 1,000 finished runs, ms": median(refreshes),
        "list, median, ms": median(lists),
        "list, p95, ms": quantiles(lists, n=20)[-1],
        "memory with 1,000 runs, MB": _memory(),
        "of it for the runs, MB": _memory() - before,
    }


def _long(folder: Path) -> dict[str, float]:
    """A run of 1,000,000 lines: all of it, and ever smaller parts."""
    run, curves, before = folder / "run-0000", Curves(), _memory()
    first = _milliseconds(lambda: curves.of(run))
    began = time.perf_counter()
    curve = curves.of(run)
    curve.complete.wait()
    build = 1000 * (time.perf_counter() - began)
    warm = []
    for x in AXES:
        whole = curve.points("loss", width=WIDTH, x=x)
        place = whole.x[whole.y.index(SPIKE)]
        for part in (1.0, 0.3, 0.1, 0.03, 0.01, 0.001):
            span = part * whole.x[-1]
            for _ in range(3):  # the first time, a close view is read from the file
                began = time.perf_counter()
                found = curves.of(run).points("loss", max(0.0, place - span / 2), place + span / 2, WIDTH, x)
                warm.append(1000 * (time.perf_counter() - began))
                assert SPIKE in found.y
                assert len(found.x) <= 2 * WIDTH
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(_line(random.Random(0), LONG + 1))
    added = _milliseconds(lambda: curves.of(run).points("loss", width=WIDTH))
    assert curve.last_step == LONG + 1
    with (run / "metrics.jsonl").open("rb+") as file:
        file.truncate(file.seek(0, 2) - len(_line(random.Random(0), LONG + 1)))
    return {
        "first answer of 1,000,000 lines, ms": first,
        "build of 1,000,000 lines in the background, ms": build,
        "curve of 1,000,000 lines, median, ms": median(warm),
        "curve of 1,000,000 lines, slowest, ms": max(warm),
        "new line of 1,000,000, ms": added,
        "memory for 1,000,000 lines of 11 keys, MB": _memory() - before,
    }


def _many(folder: Path) -> dict[str, float]:
    """Twenty runs of 100,000 lines: the same key of all."""
    runs, curves, before = sorted(folder.iterdir()), Curves(), _memory()
    began = time.perf_counter()
    for run in runs:
        curves.of(run)
    for run in runs:
        curves.of(run).complete.wait()
    build = 1000 * (time.perf_counter() - began)

    def compare() -> None:
        for run in runs:
            assert len(curves.of(run).points("loss", width=WIDTH, x="seconds").x) > WIDTH

    compared = [_milliseconds(compare) for _ in range(5)]
    return {
        "build of 20 × 100,000 lines in the background, ms": build,
        "20 curves of 100,000 lines, ms": max(compared),
        "memory for 20 × 100,000 lines, MB": _memory() - before,
    }


_PARTS: dict[str, Callable[[Path], dict[str, float]]] = {"listed": _listed, "long": _long, "many": _many}


def _make(folder: Path, part: str) -> None:
    """The runs of one part, unless they are there."""
    if folder.is_dir():
        return
    count, lines = {"listed": (NUM_RUNS, 50), "long": (1, LONG), "many": (NUM_MANY, MANY)}[part]
    for number in range(count):
        run = folder / f"run-{number:04d}"
        (run / "logs").mkdir(parents=True)
        draw = random.Random(number)
        words = [f"output_dir={run}", f"seed={number % 7}", f"optimizer.lr={draw.uniform(1e-4, 1e-3)}"]
        (run / "config.yaml").write_text(dump(load(preset="tiny", overrides=words)), encoding="utf-8")
        with (run / "metrics.jsonl").open("wb") as file:
            for step in range(1, lines + 1):
                file.write(_line(draw, step, loss=SPIKE if step == 2 * lines // 3 else None))
                if step % max(10, lines // 100) == 0:
                    values = {"step": step, "epoch": 1, "valid_loss": draw.random(), "valid_perplexity": draw.random()}
                    file.write(json.dumps(values).encode() + b"\n")
        summary = {"status": "finished", "steps": lines, "world": 4, "best_step": lines, "best_value": draw.random()}
        (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")


def _line(draw: random.Random, step: int, loss: float | None = None) -> bytes:
    """A line as `hvd-train` writes it."""
    values: dict[str, Any] = {
        "step": step,
        "epoch": 1,
        "samples": 8 * step,
        "loss": 3 * draw.random() if loss is None else loss,
        "perplexity": 20 * draw.random(),
        "lr": 1e-3 * draw.random(),
        "grad_norm": draw.random(),
        "tokens_per_second": 5e4 + 1e4 * draw.random(),
        "milliseconds_per_step": 9 + draw.random(),
        "loss_scale": 1.0,
    }
    return json.dumps(values).encode() + b"\n"


def _milliseconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


def _memory() -> float:
    """Resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


if __name__ == "__main__":
    main()
