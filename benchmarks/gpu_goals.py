"""What training on one GPU should reach, judged by the figures of `benchmarks.gpu` and by the tests of tests/gpu."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

REPOSITORY = Path(__file__).parents[1]
# Of the measured dense peak, with a billion parameters and at least 8k tokens in one batch.
MFU = {"eager": 0.50, "compiled": 0.60}
OFF_PLAN = 0.10  # of what `plan` says


class Goal(NamedTuple):
    """One of them: what was found, and whether that is enough."""

    name: str
    found: str
    reached: bool

    def __str__(self) -> str:
        return f"{'reached' if self.reached else 'MISSED '}  {self.name}: {self.found}"


def judge(figures: Mapping[str, Any]) -> list[Goal]:
    """The goals that these figures can say something about. A case that failed reaches none."""
    cases = {name: found for name, found in figures.items() if isinstance(found, dict)}
    goals = []
    for how, least in MFU.items():
        rates = {
            name: _mfu(found, figures["matmul"])
            for name, found in cases.items()
            if "-1b, " in name and name.endswith(f", {how}")
        }
        if rates:
            worst = min(rates, key=rates.__getitem__)
            found = f"{rates[worst]:.1%} ({worst})"
            goals.append(
                Goal(f"MFU of a billion parameters, {how}, at least {least:.0%}", found, rates[worst] >= least)
            )
    if cases:
        off = {name: _off_plan(found) for name, found in cases.items()}
        worst = max(off, key=off.__getitem__)
        found = f"{off[worst]:.1%} ({worst})"
        goals.append(Goal(f"peak memory within {OFF_PLAN:.0%} of plan", found, off[worst] <= OFF_PLAN))
    return goals


def run_tests(seconds: float) -> Goal:
    """Those of tests/gpu, which may take so long, and their output. Tests that are all skipped reach nothing."""
    name = "pytest -m gpu tests/gpu"
    paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    beside = ["-n", str(min(8, os.cpu_count() or 1))] if find_spec("xdist") else []  # or the time may be too short
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rfEs", *beside, "tests/gpu"]
    # Unbuffered, so that what is still running is known where the time ends.
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": environment, "text": True}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds, **options)
    except subprocess.TimeoutExpired as late:
        click.echo(late.stdout or "")
        return Goal(name, f"not ended after {seconds:.0f} s", False)
    click.echo(done.stdout)
    summary = next(iter(done.stdout.splitlines()[-1:]), "no output").strip("= ")
    return Goal(name, summary, done.returncode == 0 and " passed" in summary)


def _mfu(found: Mapping[str, Any], peak: float) -> float:
    if "failed" in found:
        return 0.0
    rate: float = found["flops"] / median(found["seconds"]) / peak
    return 0.0 if rate != rate else rate  # without a plan


def _off_plan(found: Mapping[str, Any]) -> float:
    if "failed" in found:
        return float("inf")
    off: float = abs(found["peak_memory"] / found["memory"] - 1)
    return float("inf") if off != off else off
