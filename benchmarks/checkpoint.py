"""What checkpoints cost training: a checkpoint every 20 steps against none, on two ranks.

    python -m benchmarks.checkpoint

Each round runs both jobs, one after the other. The cost is what the ranks' logs say: the seconds that each rank waited
for its checkpoints, and the CPU time of the threads that wrote them, over cores × the time between first and last
checkpoint. The ratio of wall times is for information: it is no finer than the machine's own noise.
"""

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import NamedTuple

import click

from benchmarks.machine import machine
from benchmarks.settings import ENVIRONMENT

EVERY, RANKS = 20, 2
# Settings, steps, and the most that checkpoints may cost.
MODELS = {
    "shakespeare-char": (["--preset", "shakespeare-char"], 400, 0.03),
    "40 M": (
        [
            "--preset", "shakespeare-char", "model.num_layers=12", "model.d_model=528", "model.num_heads=8",
            "model.d_feedforward=2112",
        ],
        60,
        0.01,
    ),
}  # fmt: skip
_WAITED = re.compile(r"training waited ([\d.]+) s")
_WRITTEN = re.compile(r"written in [\d.]+ s, ([\d.]+) s of it on a core")
_STAMP = "%Y-%m-%d %H:%M:%S,%f"


class Cost(NamedTuple):
    """Of one run, in seconds."""

    wall: float  # from its first logged step to its last
    waited: list[float]  # by rank
    written: list[float]  # on a core, by rank
    checkpoints: int

    @property
    def share(self) -> float:
        """Of what the cores could have done."""
        return sum(self.waited + self.written) / (RANKS * self.wall)

    def milliseconds(self, rank: int) -> tuple[float, float]:
        """That a rank waits for a checkpoint, and that its core writes."""
        waited, written = (1000 * of_ranks[rank] / self.checkpoints for of_ranks in (self.waited, self.written))
        return waited, written


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(MODELS)))
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--gloo/--mpi", default=True)
def main(names: Sequence[str], rounds: int, gloo: bool) -> None:
    """Exit code 1 where checkpoints cost more than they may."""
    missed = False
    for name in names or MODELS:
        settings, steps, limit = MODELS[name]
        costs, ratios = [], []
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
            for number in range(rounds):
                runs = [_run(Path(folder), settings, steps, gloo, every) for every in (EVERY, None)[:: (-1) ** number]]
                with_them, without = sorted(runs, key=lambda cost: -cost.checkpoints)
                costs.append(with_them)
                ratios.append(with_them.wall / without.wall)
        share = median(cost.share for cost in costs)
        missed |= share > limit
        each = [[median(values) for values in zip(*(cost.milliseconds(rank) for cost in costs), strict=True)]
                for rank in range(RANKS)]  # fmt: skip
        print(
            f"{name}: {100 * share:.2f} % (at most {100 * limit:.0f} %: {'MISSED' if share > limit else 'met'}); "
            "a checkpoint, by rank: "
            + ", ".join(f"{waited:.1f} ms of waiting and {written:.1f} ms of CPU to write" for waited, written in each)
            + "; "
            f"wall time over none: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )
    print(f"every {EVERY} steps, {RANKS} ranks over {'gloo' if gloo else 'MPI'}, {rounds} rounds; {machine()}")
    sys.exit(missed)


def _run(folder: Path, settings: Sequence[str], steps: int, gloo: bool, every: int | None) -> Cost:
    source, output = folder / "input.txt", folder / "run"
    if not source.exists():
        draw = random.Random(1)
        words = [
            "".join(draw.choices("abcdefghijklmnopqrstuvwxyzABCDEFG'-", k=draw.randint(2, 9))) for _ in range(5000)
        ]
        source.write_text("\n".join(" ".join(draw.choices(words, k=8)) for _ in range(20_000)), encoding="utf-8")
    shutil.rmtree(output, ignore_errors=True)
    command = ["horovodrun", "-np", str(RANKS), "-H", f"localhost:{RANKS}", "--gloo" if gloo else "--mpi"]
    if not gloo and os.getuid() == 0:
        command += ["--mpi-args=--allow-run-as-root"]
    command += ["hvd-train", *settings, f"data.source={source}", f"data.cache_dir={folder / 'cache'}"]
    command += [f"output_dir={output}", f"training.max_steps={steps}", "training.eval_every=1000000"]
    command += ["training.log_every=1", f"checkpoint.every_steps={every or 'null'}", "training.device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    logs = [file.read_text(encoding="utf-8") for file in sorted((output / "logs").glob("rank-*.log"))]
    steps_at = [
        datetime.strptime(line[:23], _STAMP) for line in logs[0].splitlines() if " of " in line and "lr " in line
    ]
    return Cost(
        wall=(steps_at[-1] - steps_at[0]).total_seconds(),
        waited=[sum(map(float, _WAITED.findall(log))) for log in logs],
        written=[sum(map(float, _WRITTEN.findall(log))) for log in logs],
        checkpoints=len(_WAITED.findall(logs[0])),
    )


if __name__ == "__main__":
    main()
