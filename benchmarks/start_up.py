"""`hvd-transformer launch` against bare horovodrun: seconds from the command to the first training step.

    python -m benchmarks.start_up -H h1:1,h2:1

Both start the same tiny job on the same hosts, which must share this folder, in turn: one round is one start of each.
The ratio of the two is taken round by round.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import click

from benchmarks.machine import machine
from hvd_transformer.atomic import write_text

WANTED = 1.2
TINY = [
    "data.tokenizer=char", "data.sequence_length=12", "model.num_layers=2", "model.d_model=16", "model.num_heads=2",
    "model.d_feedforward=32", "training.device=cpu", "training.batch_size=4", "training.max_steps=2",
    "training.log_every=1",
]  # fmt: skip


@click.command()
@click.option("-H", "hosts", default="localhost:2", show_default=True, help="As horovodrun takes them.")
@click.option("--gloo/--mpi", default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write every figure there.")
def main(hosts: str, gloo: bool, rounds: int, json_file: Path | None) -> None:
    """Exit code 1 where launch takes more than 1.2 times as long."""
    num_ranks = sum(int(host.rpartition(":")[2]) for host in hosts.split(","))
    options = ["-np", str(num_ranks), "-H", hosts, "--gloo" if gloo else "--mpi"]
    starters = {
        "horovodrun": ["horovodrun", *options, "hvd-train"],
        "launch": ["hvd-transformer", "launch", *options, "--"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in starters}
    with tempfile.TemporaryDirectory(prefix="start-up-", dir=Path.cwd()) as name:
        folder = Path(name)
        (folder / "text.txt").write_text("the cat sat on my big red rug.\n" * 100)
        for number in range(-1, rounds):  # the first prepares the data, and reads torch from the disk
            for starter, words in list(starters.items())[:: 1 if number % 2 else -1]:
                run = folder / f"{starter}-{number}"
                took = _seconds([*words, *_settings(folder), f"output_dir={run}"], run / "metrics.jsonl")
                if number >= 0:
                    seconds[starter].append(took)
                    print(f"round {number + 1} of {rounds}: {starter} {took:.1f} s", flush=True)
    ratios = [own / base for own, base in zip(seconds["launch"], seconds["horovodrun"], strict=True)]
    verdict = f"at most {WANTED}: {'met' if median(ratios) <= WANTED else 'MISSED'}"
    for starter, values in seconds.items():
        print(f"{starter}: median {median(values):.1f} s ({min(values):.1f} to {max(values):.1f})")
    print(f"launch / horovodrun: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {verdict}")
    print(f"{hosts}, {'gloo' if gloo else 'MPI'}, {rounds} rounds; {machine()}")
    if json_file is not None:
        write_text(json_file, json.dumps({"machine": machine(), "hosts": hosts, "seconds": seconds, "ratios": ratios}))
    sys.exit(median(ratios) > WANTED)


def _settings(folder: Path) -> list[str]:
    return [*TINY, f"data.source={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}"]


def _seconds(command: list[str], metrics: Path) -> float:
    """Until the first line of `metrics` is written; the job then goes on to its end."""
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=_environment()
        ) as process:
            took = None
            while process.poll() is None:
                if took is None and metrics.exists() and metrics.stat().st_size:
                    took = time.perf_counter() - began
                time.sleep(0.01)
        if process.returncode or took is None:
            output.seek(0)
            raise click.ClickException(f"{command[0]} failed:\n{output.read().decode(errors='replace')}")
        return took


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
