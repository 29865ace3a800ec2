"""Seconds of training until a loss is reached: `hvd-train --preset shakespeare-char` against nanoGPT's setting.

    python -m benchmarks.time_to_loss input.txt --json benchmarks/results/time_to_loss.json

Both use all cores that are given to them, in turn: a plain script of nanoGPT's setting with as many threads
(`benchmarks.nanogpt`), and our training, as two ranks of one thread each or one rank. The model and the 12 samples per
step are nanoGPT's; the optimizer, its schedule and the number of steps are those of `SETTINGS`, which KEY=VALUE words
replace. The goal is what nanoGPT has in the end, after 2,000 iterations, in the same run; nanoGPT's README has 1.8857.
Evaluations happen every so many steps on both sides, and their time is not counted; start-up is not counted either.
Our checkpoints are.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

import click

from benchmarks.bootstrap import median_interval
from benchmarks.command_line import write_figures
from benchmarks.launching import horovodrun
from benchmarks.machine import machine, processor
from benchmarks.nanogpt import BATCH, ITERATIONS
from benchmarks.settings import ENVIRONMENT

README_LOSS, WANTED = 1.8857, 0.45
CORES, LOG_EVERY = 2, 10
SETTINGS = (
    "optimizer.name=muon", "optimizer.lr=1.6e-2", "optimizer.lr_scaling=none", "optimizer.schedule=linear",
    "optimizer.warmup_steps=50", "training.max_steps=600",
)  # fmt: skip
_STEP = re.compile(r"^(\S+ \S+) INFO epoch \d+, step (\d+) of \d+, .*?, ([\d.]+) ms a step", re.MULTILINE)
_VALID = re.compile(r"^(\S+ \S+) INFO step (\d+): valid \{.*, ([\d.]+) s$", re.MULTILINE)


@dataclass(frozen=True)
class Evaluated:
    """The loss after so many steps, and the seconds of training until then."""

    step: int
    seconds: float
    loss: float


def seconds_to(goal: float, run: Sequence[Evaluated]) -> float | None:
    """Of training, until the first evaluation at or below the goal; None: never."""
    return next((one.seconds for one in run if one.loss <= goal), None)


def parse_run(log: str, losses: Mapping[int, float]) -> list[Evaluated]:
    """A run of ours from rank 0's log and the losses by step.

    The clock begins a step before the first step's line, and stands from the line of a step to that of its evaluation.
    """
    steps = {int(step): (_seconds(when), float(took) / 1000) for when, step, took in _STEP.findall(log)}
    evaluations = {int(step): _seconds(when) for when, step, _ in _VALID.findall(log)}
    first, took = steps[min(steps)]
    began, excluded, found = first - took, 0.0, []
    for step, when in sorted(evaluations.items()):
        found.append(Evaluated(step, steps[step][0] - began - excluded, losses[step]))
        excluded += when - steps[step][0]
    return found


def _seconds(when: str) -> float:
    return datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()


def nanogpt(text: Path, seed: int, every: int, iterations: int) -> list[Evaluated]:
    """The peer's run, on all cores."""
    words = ["-m", "benchmarks.nanogpt", text, "--seed", seed, "--every", every, "--iterations", iterations]
    lines = _run([sys.executable, *map(str, words)], threads=CORES).splitlines()
    return [Evaluated(**json.loads(line)) for line in lines]


def ours(text: Path, seed: int, every: int, ranks: int, settings: Iterable[str], folder: Path) -> list[Evaluated]:
    """Our run, on all cores."""
    run = folder / f"seed-{seed}"
    words = [
        "hvd-train", "--preset", "shakespeare-char", f"data.source={text}", f"data.cache_dir={folder / 'cache'}",
        f"output_dir={run}", f"seed={seed}", "training.device=cpu", "training.text_samples=0",
        f"training.log_every={LOG_EVERY}", f"training.eval_every={every}", "training.eval_batch_size=64",
        "checkpoint.keep_best=false", f"training.batch_size={BATCH // ranks}", *SETTINGS, *settings,
    ]  # fmt: skip
    _run([*(horovodrun("gloo", ranks) if ranks > 1 else []), *words], threads=CORES // ranks)
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    losses = {line["step"]: line["valid_loss"] for line in lines if "valid_loss" in line}
    return parse_run((run / "logs" / "rank-000.log").read_text(encoding="utf-8"), losses)


def _run(command: Sequence[str], threads: int) -> str:
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        raise click.ClickException(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return result.stdout


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each, seeds 1, 2, …")
@click.option(
    "--ranks", default=CORES, show_default=True, type=click.IntRange(1, CORES), help="Ours; cores / ranks threads."
)
@click.option("--every", default=50, show_default=True, type=click.IntRange(1), help="Steps between evaluations.")
@click.option("--iterations", default=ITERATIONS, show_default=True, type=click.IntRange(1), help="Of nanoGPT.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(
    text: Path, settings: tuple[str, ...], seeds: int, ranks: int, every: int, iterations: int, file: Path | None
) -> None:
    """Measure the time that our training and nanoGPT's setting take to a loss. Exit code 1 where ours takes more than
    0.45 of nanoGPT's with any seed."""
    if every % LOG_EVERY:
        raise click.BadParameter(f"{every} is no multiple of {LOG_EVERY}", param_hint="--every")
    runs: dict[str, dict[int, list[Evaluated]]] = {"nanoGPT": {}, "ours": {}}
    with tempfile.TemporaryDirectory(prefix="time-to-loss-") as name:
        starts = {
            "nanoGPT": lambda seed: nanogpt(text, seed, every, iterations),
            "ours": lambda seed: ours(text.resolve(), seed, every, ranks, settings, Path(name)),
        }
        for seed in range(1, seeds + 1):
            for who in list(starts)[:: 1 if seed % 2 else -1]:
                run = runs[who][seed] = starts[who](seed)
                last = run[-1]
                click.echo(f"seed {seed}: {who}: loss {last.loss:.4f} after {last.step} steps, {last.seconds:.1f} s")
    goals = {seed: run[-1].loss for seed, run in runs["nanoGPT"].items()}
    ratios = [_report(f"seed {seed}", goal, runs, seed) for seed, goal in goals.items()]
    for seed in goals:
        _report(f"seed {seed}, README", README_LOSS, runs, seed)
    reached = [ratio for ratio in ratios if ratio is not None]
    met = len(reached) == len(ratios) and max(reached) <= WANTED
    if reached:
        low, high = median_interval(reached)
        click.echo(f"ours / nanoGPT to nanoGPT's loss: median {median(reached):.3f} ({low:.3f} to {high:.3f})")
    words = [*SETTINGS, *settings]
    click.echo(f"at most {WANTED} at every seed: {'met' if met else 'MISSED'}; {' '.join(words)}\n{machine()}")
    figures = {
        who: {seed: [list(vars(one).values()) for one in run] for seed, run in of.items()} for who, of in runs.items()
    }
    about = {"machine": machine(), "processor": processor()._asdict(), "ranks": ranks, "settings": words}
    write_figures(file, {**about, "ratios": ratios, "step_seconds_loss": figures})
    sys.exit(not met)


def _report(name: str, goal: float, runs: Mapping[str, Mapping[int, list[Evaluated]]], seed: int) -> float | None:
    """Prints the seconds of both; ours over nanoGPT's, if both reached the goal."""
    times = {who: seconds_to(goal, run[seed]) for who, run in runs.items()}
    shown = ", ".join(f"{who} {'never' if took is None else f'{took:.1f} s'}" for who, took in times.items())
    own, peer = times["ours"], times["nanoGPT"]
    ratio = None if own is None or peer is None else own / peer
    click.echo(f"{name}: to loss {goal:.4f}: {shown}" + ("" if ratio is None else f": {ratio:.3f}"))
    return ratio


if __name__ == "__main__":
    main()
