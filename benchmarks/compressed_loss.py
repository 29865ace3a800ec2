"""Validation losses with compressed gradients: ours with each format, DistributedDataParallel with its hooks.

    python -m benchmarks.compressed_loss input.txt --json benchmarks/results/compressed_loss.json

The preset `shakespeare-char` on two ranks of one thread each over gloo: the same initial weights and samples, so many
steps of 2 × 12 samples. No link is shaped: a loss does not depend on the time that messages take. Uncompressed, ours
and DistributedDataParallel have the same loss. What the file has already is kept, so a long measurement may be made in
parts.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import get_args

import click

from benchmarks.command_line import write_figures
from benchmarks.compressed_peer import PRESET
from benchmarks.launching import horovodrun, local_torchrun
from benchmarks.machine import machine
from benchmarks.settings import ENVIRONMENT, Peer
from hvd_transformer.config.schema import CommunicationConfig

BOUND = 0.5  # per cent that a loss may be above the uncompressed one
COMPRESSIONS = [
    name for name in get_args(CommunicationConfig.model_fields["compression"].annotation) if name != "auto"
]  # auto takes one of the others
# Which the peers have, too: nanoGPT's.
ADAMW = ["optimizer.name=adamw", "optimizer.lr=1e-3", "optimizer.schedule=cosine"]
# The rate of local steps is not scaled with the replicas.
LOCAL = {
    f"ours, {number} local steps": [f"communication.local_steps={number}", "optimizer.lr=1.414e-3"]
    for number in (8, 32)
}
OURS: Mapping[str, list[str]] = {
    f"ours, {name}": [f"communication.compression={name}"] for name in COMPRESSIONS
} | LOCAL
HOOKS = (Peer(), Peer(hook="fp16"), *(Peer(hook="powersgd", rank=rank) for rank in (1, 4, 16, 32)))
PEERS = {peer.method: peer for peer in HOOKS}
BASE = "ours, none"
# By contestant and seed.
Losses = dict[str, dict[str, float]]


def changes(losses: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The mean over the seeds of each loss above the uncompressed one of the same seed, in per cent."""
    base = losses.get(BASE, {})
    found = {
        name: [100 * (loss / base[seed] - 1) for seed, loss in of.items() if seed in base]
        for name, of in losses.items()
    }
    return {name: mean(values) for name, values in found.items() if values}


def read_losses(file: Path, steps: int | None = None) -> Losses:
    """The losses of a file; none where there is no file, or where it is of other steps."""
    if not file.exists():
        return {}
    figures = json.loads(file.read_text(encoding="utf-8"))
    return figures["losses"] if steps in (None, figures["steps"]) else {}


def train(name: str, text: Path, seed: int, steps: int, folder: Path) -> float:
    """The validation loss after one run."""
    run = folder / "run"
    words = [
        f"data.source={text}", f"data.cache_dir={folder / 'cache'}", f"output_dir={run}", "training.device=cpu",
        *ADAMW, f"seed={seed}", f"training.max_steps={steps}",
        f"training.eval_every={steps}", "training.eval_batch_size=64",
        "training.text_samples=0", "checkpoint.every_steps=none", "checkpoint.keep_best=false",
    ]  # fmt: skip
    if name in PEERS:
        chosen = ["--peer", json.dumps(PEERS[name].options())]
        output = _run([*local_torchrun(), "-m", "benchmarks.compressed_peer", *chosen, *words])
        return float(json.loads(output.splitlines()[-1])["valid_loss"])
    _run([*horovodrun("gloo"), "hvd-train", "--preset", PRESET, *words, *OURS[name]])
    return float(json.loads((run / "summary.json").read_text(encoding="utf-8"))["valid_loss"])


def report(losses: Mapping[str, Mapping[str, float]]) -> str:
    """The table for people."""
    above = changes(losses)
    width = max(map(len, losses))
    lines = [f"{'validation loss':{width}}  above {BASE!r}   by seed"]
    for name, of in losses.items():
        change = f"{above[name]:+.2f} %" if name in above else ""
        lines.append(f"{name:{width}}  {change:>20}   " + ", ".join(f"{seed}: {of[seed]:.4f}" for seed in sorted(of)))
    return "\n".join([*lines, machine()])


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        click.echo(f"benchmark: {' '.join(command)} failed:\n{result.stdout}{result.stderr}", err=True)
        sys.exit(1)
    return result.stdout


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, resolve_path=True, path_type=Path))
@click.option("--only", multiple=True, type=click.Choice([*OURS, *PEERS]), help="Default: all.")
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1), help="Runs of each, seeds 1, 2, …")
@click.option("--steps", default=500, show_default=True, type=click.IntRange(1), help="Of 2 × 12 samples.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(text: Path, only: tuple[str, ...], seeds: int, steps: int, file: Path | None) -> None:
    """Measure what compressed gradients do to the loss. Exit code 1 where a run fails."""
    losses = {} if file is None else read_losses(file, steps)
    for seed in map(str, range(1, seeds + 1)):
        for name in only or (*OURS, *PEERS):
            if seed in losses.setdefault(name, {}):
                continue
            with tempfile.TemporaryDirectory(prefix="compressed-loss-") as folder:
                losses[name][seed] = train(name, text, int(seed), steps, Path(folder))
            click.echo(f"seed {seed}, {name}: {losses[name][seed]:.4f}", err=True)
            write_figures(file, {"machine": machine(), "steps": steps, "losses": losses, "above": changes(losses)})
    click.echo(report(losses))


if __name__ == "__main__":
    main()
