"""Seconds from a command to the first training step: launch against horovodrun, one rank against its imports.

    python -m benchmarks.start_up -H h1:1,h2:1

`hvd-transformer launch` and bare horovodrun start the same tiny job on the same hosts, which must share this folder;
`hvd-train` alone does the same job on one rank, and another process imports torch and Horovod and ends. A round is one
start of each, in turn. Ratios are taken round by round.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click

from benchmarks.bootstrap import median_interval
from benchmarks.command_line import write_figures
from benchmarks.machine import machine, processor
from benchmarks.settings import ENVIRONMENT

# Of what is started, what it is compared with, and the most that the ratio should be.
LAUNCH, HOROVODRUN, ALONE, IMPORTS = "launch", "horovodrun", "hvd-train", "imports"
WANTED = ((LAUNCH, HOROVODRUN, 1.2), (ALONE, IMPORTS, 1.5))
TINY = [
    "data.tokenizer=char", "data.sequence_length=12", "model.num_layers=2", "model.d_model=16", "model.num_heads=2",
    "model.d_feedforward=32", "training.device=cpu", "training.batch_size=4", "training.max_steps=2",
    "training.log_every=1",
]  # fmt: skip


@click.command()
@click.option("-H", "hosts", default="localhost:2", show_default=True, help="As horovodrun takes them.")
@click.option("--gloo/--mpi", default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=21, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure there.")
def main(hosts: str, gloo: bool, rounds: int, json_file: Path | None) -> None:
    """Exit code 1 where launch takes more than 1.2 times as long as horovodrun, or one rank more than 1.5 times as long
    as its imports."""
    num_ranks = sum(int(host.rpartition(":")[2]) for host in hosts.split(","))
    options = ["-np", str(num_ranks), "-H", hosts, "--gloo" if gloo else "--mpi"]
    starters = {
        HOROVODRUN: ["horovodrun", *options, "hvd-train"],
        LAUNCH: ["hvd-transformer", "launch", *options, "--"],
        ALONE: ["hvd-train"],
        IMPORTS: [sys.executable, "-c", "import torch, horovod.torch"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in starters}
    with tempfile.TemporaryDirectory(prefix="start-up-", dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "text.txt").write_text("the cat sat on my big red rug.\n" * 100)
        for number in range(-1, rounds):  # the first prepares the data, and reads torch from the disk
            for starter, words in list(starters.items())[:: 1 if number % 2 else -1]:
                run = folder / f"{starter}-{number}"
                if starter == IMPORTS:
                    took = _seconds(words)
                else:
                    took = _seconds([*words, *_settings(folder), f"output_dir={run}"], run / "metrics.jsonl")
                if number >= 0:
                    seconds[starter].append(took)
                    print(f"round {number + 1} of {rounds}: {starter} {took:.2f} s", flush=True)
    for starter, values in seconds.items():
        print(f"{starter}: median {median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    ratios = {}
    for own, base, most in WANTED:
        values = [mine / other for mine, other in zip(seconds[own], seconds[base], strict=True)]
        low, high = median_interval(values)
        verdict = f"at most {most}: {'met' if median(values) <= most else 'MISSED'}"
        print(f"{own} / {base}: {median(values):.3f} ({low:.3f} to {high:.3f}), {verdict}")
        ratios[f"{own} / {base}"] = {"rounds": values, "median": median(values), "interval": (low, high), "most": most}
    print(f"{hosts}, {'gloo' if gloo else 'MPI'}, {rounds} rounds; {machine()}")
    about = {"machine": machine(), "processor": processor()._asdict(), "hosts": hosts}
    write_figures(json_file, {**about, "seconds": seconds, "ratios": ratios})
    sys.exit(any(ratio["median"] > ratio["most"] for ratio in ratios.values()))


def _settings(folder: Path) -> list[str]:
    return [*TINY, f"data.source={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"]


def _seconds(command: list[str], metrics: Path | None = None) -> float:
    """Until the first line of `metrics` is written; the job then goes on to its end. Without it, until the end."""
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment()
        ) as process:
            took = None
            while process.poll() is None:
                if took is None and metrics is not None and metrics.exists() and metrics.stat().st_size:
                    took = time.perf_counter() - began
                time.sleep(0.01)
            ended = time.perf_counter() - began
        if process.returncode or (took is None and metrics is not None):
            output.seek(0)
            raise click.ClickException(f"{command[0]} failed:\n{output.read().decode(errors='replace')}")
        return ended if took is None else took


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": ENVIRONMENT["PATH"], "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
