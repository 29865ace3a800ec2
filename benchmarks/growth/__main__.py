"""Measures, fits, prints a table; exit code 1 where a cost grows too fast."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.growth.child import PARTS
from benchmarks.growth.fit import LEAST_SIZES, LIMIT, Growth, Point, fit
from benchmarks.machine import machine
from hvd_transformer.atomic import write_text

# Costs that end so are counts; all others are seconds.
_COUNTS = ("bytes", "bytes written", "collectives", "connections", "files", "messages", "writes")
_COLUMNS = "| {:<10} | {:<29} | {:<32} | {:>12} | {:>12} | {:<16} |{}"


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(PARTS)), metavar="[PART]...")
@click.option("--rounds", type=click.IntRange(min=1), help="Measurements at each size; default: 2 or 3, by the part.")
@click.option("--most", type=int, help="Leave out the sizes above this.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure there.")
def main(names: tuple[str, ...], rounds: int | None, most: int | None, json_file: Path | None) -> None:
    """Fit the growth of each cost of PART (default: all)."""
    print(_COLUMNS.format("part", "cost", "sizes", "first", "last", f"k, at most {LIMIT}", ""))
    print(_COLUMNS.format(*["---"] * 6, ""), flush=True)
    results = []
    failed = False
    for name in names or PARTS:
        for cost, points in measure(name, rounds or PARTS[name].rounds, most).items():
            growth = fit(points)
            failed |= growth.too_fast
            print(line(name, cost, points, growth), flush=True)
            results.append(
                {"part": name, "cost": cost, "points": [asdict(point) for point in points], **asdict(growth)}
            )
    print(machine())
    if json_file is not None:
        write_text(json_file, json.dumps({"machine": machine(), "results": results}))
    sys.exit(failed)


def measure(name: str, rounds: int, most: int | None) -> dict[str, list[Point]]:
    """The points of every cost. Each size in turn, so that a slow while of the machine meets them all."""
    sizes = [size for size in PARTS[name].sizes if most is None or size <= most]
    if len(sizes) < LEAST_SIZES:
        raise click.BadParameter(f"{name} has fewer than {LEAST_SIZES} sizes up to {most}", param_hint="--most")
    found: dict[str, dict[float, Point]] = {}
    for _ in range(rounds):
        for size in sizes:
            for cost, point in _in_a_process(name, size).items():
                points = found.setdefault(cost, {})
                before = points.get(point.n, Point(point.n, []))
                points[point.n] = Point(point.n, [*before.values, *point.values], point.scale)
    return {cost: list(points.values()) for cost, points in found.items()}


def _in_a_process(name: str, size: int) -> dict[str, Point]:
    with tempfile.TemporaryDirectory(prefix="growth-") as folder:
        file = Path(folder) / "costs.json"
        words = [sys.executable, "-m", "benchmarks.growth.child", name, str(size), str(file)]
        done = subprocess.run(
            words,
            env={**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise click.ClickException(f"{name} at {size} failed:\n{done.stdout}")
        return {cost: Point(**point) for cost, point in json.loads(file.read_text()).items()}


def line(name: str, cost: str, points: list[Point], growth: Growth) -> str:
    """One row of the table."""
    first, last = points[0], points[-1]
    sizes = f"{first.n:,.0f} to {last.n:,.0f} {PARTS[name].of}"
    k = "in the noise" if growth.is_flat else f"{growth.k:.2f} ({growth.low:.2f}–{growth.high:.2f})"
    verdict = " TOO FAST" if growth.too_fast else ""
    return _COLUMNS.format(name, cost, sizes, _value(first, cost), _value(last, cost), k, verdict)


def _value(point: Point, cost: str) -> str:
    return f"{point.median:,.0f}" if cost.endswith(_COUNTS) else f"{1000 * point.median:,.1f} ms"


if __name__ == "__main__":
    main()
