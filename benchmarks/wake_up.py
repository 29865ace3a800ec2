"""What a small collective takes and what an idle rank costs: our Horovod over gloo and MPI, and torch's own gloo.

    python -m benchmarks.wake_up [--published FOLDER]

Every contestant is started once a round, in turn; ratios are taken round by round. FOLDER holds a Horovod without
docker/patches, to compare: `pip install --no-deps --target FOLDER horovod-0.28.1-….whl`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import click

from benchmarks.group import REPOSITORY
from benchmarks.launching import torchrun
from benchmarks.machine import machine
from benchmarks.settings import ENVIRONMENT
from hvd_transformer.atomic import write_text

LATE_SECONDS = 0.005
CASES = ("1 KB, ms", "8 MB and 1 KB, ms", "1 KB, a rank 5 ms late, ms", "idle, % of a core")
LATENCY, IDLE = CASES[0], CASES[-1]
GLOO, MPI, TORCH = "gloo", "MPI", "torch gloo"
RATIO_WANTED, IDLE_WANTED = 1.5, 1.0
Figures = Mapping[str, Mapping[str, Sequence[float]]]  # contestant, case: one of each round


@click.command()
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(min=1), help="Starts of each.")
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(min=2), help="All on this machine.")
@click.option("--published", type=click.Path(exists=True, path_type=Path), help="A folder with Horovod as published.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(rounds: int, ranks: int, published: Path | None, json_file: Path | None) -> None:
    """Exit code 1 where 1 KB over gloo takes more than 1.5 times torch's own, or an idle rank over 1 % of a core."""
    contestants = {
        GLOO: (_horovodrun(ranks, "--gloo"), ENVIRONMENT),
        MPI: (_horovodrun(ranks, "--mpi"), ENVIRONMENT),
        TORCH: _torchrun(ranks),
    }
    if published is not None:
        other = {**ENVIRONMENT, "PYTHONPATH": str(published.resolve())}
        contestants |= {f"published, {name}": (contestants[name][0], other) for name in (GLOO, MPI)}
    figures: dict[str, dict[str, list[float]]] = {name: {case: [] for case in CASES} for name in contestants}
    for number in range(rounds):
        for name, (command, environment) in list(contestants.items())[:: -1 if number % 2 else 1]:
            for case, value in _run(name, command, environment).items():
                figures[name][case].append(value)
        click.echo(f"round {number + 1} of {rounds}", err=True)
    click.echo(_table(figures))
    verdicts = _verdicts(figures)
    click.echo("\n".join(f"{text}: {'met' if met else 'MISSED'}" for text, met in verdicts))
    click.echo(f"{ranks} ranks, {rounds} rounds; {machine()}")
    if json_file is not None:
        write_text(json_file, json.dumps({"machine": machine(), "ranks": ranks, "figures": figures}, indent=1) + "\n")
    sys.exit(not all(met for _, met in verdicts))


def _horovodrun(ranks: int, backend: str) -> list[str]:
    python = [sys.executable, "-m", "benchmarks.wake_up_ranks", "horovod", "FILE"]
    return ["horovodrun", "-np", str(ranks), "-H", f"localhost:{ranks}", backend, *python]


def _torchrun(ranks: int) -> tuple[list[str], Mapping[str, str]]:
    contestant = torchrun(TORCH, "torch")
    (words,) = contestant.commands
    words = [{"benchmarks.contestants": "benchmarks.wake_up_ranks", "SOCKET": "FILE"}.get(word, word) for word in words]
    words[words.index("--nproc-per-node") + 1] = str(ranks)
    return words, contestant.environment


def _run(name: str, command: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    """Rank 0's figures."""
    with tempfile.TemporaryDirectory(prefix="wake-up-") as folder:
        file = Path(folder) / "figures.json"
        result = subprocess.run(
            [str(file) if word == "FILE" else word for word in command],
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise click.ClickException(f"{name} failed:\n{result.stdout}{result.stderr}")
        figures: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return figures


def _table(figures: Figures) -> str:
    """Medians, least and most in brackets."""
    lines = ["| | " + " | ".join(CASES) + " |", "|" + "---|" * (len(CASES) + 1)]
    for name, cases in figures.items():
        cells = [f"{median(values):.2f} ({min(values):.2f}–{max(values):.2f})" for values in cases.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _verdicts(figures: Figures) -> list[tuple[str, bool]]:
    pairs = zip(figures[GLOO][LATENCY], figures[TORCH][LATENCY], strict=True)
    ratio = median(own / peer for own, peer in pairs)
    idle = max(median(figures[name][IDLE]) for name in (GLOO, MPI))
    return [
        (f"1 KB over gloo / torch's gloo {ratio:.2f}, at most {RATIO_WANTED}", ratio <= RATIO_WANTED),
        (f"an idle rank {idle:.2f} % of a core, at most {IDLE_WANTED}", idle <= IDLE_WANTED),
    ]


if __name__ == "__main__":
    main()
