"""Preparing words: our whole preparation against torchtext's `basic_english` alone, both on two cores, same tokens.

    python -m benchmarks.preparation FOLDER

FOLDER holds text files, which are joined and repeated to `--megabytes`. Ours counts the words, numbers them by
frequency, and writes token files; the peer tokenizes the lines in two processes, one half each, and keeps the words, no
more. Imports are not counted; starting our workers is. Ours needs a C++ compiler once: the first preparation, which
compiles, is printed apart; those of the rounds find its library, as a user's later ones do. The tokens are compared
before any ratio is printed.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import click
import numpy as np

from benchmarks.bootstrap import median_interval
from benchmarks.command_line import write_figures
from benchmarks.machine import machine, processor
from benchmarks.settings import ENVIRONMENT

WANTED = 3.0
PROCESSES = 2
KINDS = ("ours", "torchtext")


def digest(tokens: Iterable[str]) -> str:
    """The same for the same tokens in the same order."""
    found = hashlib.sha256()
    for token in tokens:
        found.update(f"{token}\n".encode())
    return found.hexdigest()


def ours(folder: Path) -> tuple[float, str]:
    """Seconds of the preparation of a folder, which keeps our cache, and the digest of the training split's tokens."""
    from hvd_transformer.comm.process_map import worker_map
    from hvd_transformer.config import load
    from hvd_transformer.tasks.registry import task_class
    from hvd_transformer.tasks.task import PrepareContext

    cache = folder / "cache"
    shutil.rmtree(cache / "prepared", ignore_errors=True)
    config = load(overrides=[f"data.source={folder}", "data.tokenizer=basic_english", f"data.cache_dir={cache}"])
    task = task_class(config)
    began = time.perf_counter()
    with worker_map(PROCESSES) as mapped:
        assert mapped is not None
        data = task.prepare(config, PrepareContext(mapped))
    seconds = time.perf_counter() - began
    tokens = np.array(data.tokenizer.tokens, dtype=object)
    return seconds, digest(tokens[data.splits["train"][:]])


def torchtext(folder: Path) -> tuple[float, str]:
    """The same of torchtext's tokenizer; from the first process's start to the last one's end."""
    lines = (folder / "train.txt").read_text(encoding="utf-8").split("\n")
    middle = len(lines) // PROCESSES
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        began, ended, tokens = zip(*pool.map(_tokenize, [lines[:middle], lines[middle:]], 1), strict=True)
    return max(ended) - min(began), digest(token for part in tokens for token in part)


def _tokenize(lines: list[str]) -> tuple[float, float, list[str]]:
    from torchtext.data.utils import get_tokenizer

    split = get_tokenizer("basic_english")
    began = time.monotonic()
    tokens = [token for line in lines for token in split(line)]
    return began, time.monotonic(), tokens


def run(kind: str, folder: Path) -> tuple[float, str]:
    """`ours` or `torchtext` in a new process."""
    command = [sys.executable, "-m", "benchmarks.preparation", str(folder), "--only", kind]
    output = subprocess.check_output(command, env={**os.environ, **ENVIRONMENT}, text=True)
    took, found = json.loads(output.splitlines()[-1])
    return took, found


def write_folder(source: Path, folder: Path, megabytes: float) -> None:
    """`train.txt` of that size; a line each for validation and test."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(source.rglob("*.txt")))
    if not text.strip():
        raise click.ClickException(f"{source}: has no text file (*.txt) with text")
    times = max(1, round(megabytes * 1e6 / len(text.encode())))
    (folder / "train.txt").write_text("\n".join([text] * times), encoding="utf-8")
    for name in ("valid", "test"):
        (folder / f"{name}.txt").write_text("a line .\n", encoding="utf-8")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--megabytes", default=20.0, show_default=True, help="Of text.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
@click.option("--only", type=click.Choice(KINDS), hidden=True)
def main(folder: Path, megabytes: float, rounds: int, file: Path | None, only: str | None) -> None:
    """Exit code 1 where ours is not three times as fast."""
    if only is not None:
        print(json.dumps((ours if only == "ours" else torchtext)(folder)))
        return
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="preparation-") as name:
        write_folder(folder, Path(name), megabytes)
        size = (Path(name) / "train.txt").stat().st_size / 1e6
        first, _ = run("ours", Path(name))
        compiled = any((Path(name) / "cache").glob("kernels/words-*.so"))
        click.echo(
            f"the first preparation, {'compiler included' if compiled else 'without native code'}: {first:.2f} s"
        )
        for number in range(rounds):
            digests = {}
            for kind in KINDS[:: -1 if number % 2 else 1]:
                took, digests[kind] = run(kind, Path(name))
                seconds[kind].append(took)
            if len(set(digests.values())) > 1:
                raise click.ClickException(f"the tokens differ: {digests}")
            click.echo(f"round {number + 1} of {rounds}: {seconds['ours'][-1]:.2f}, {seconds['torchtext'][-1]:.2f} s")
    ratios = [peer / own for own, peer in zip(seconds["ours"], seconds["torchtext"], strict=True)]
    low, high = median_interval(ratios)
    for kind, values in seconds.items():
        click.echo(f"{kind}: median {median(values):.2f} s, {size / median(values):.1f} MB/s")
    verdict = "met" if median(ratios) >= WANTED else "MISSED"
    click.echo(
        f"ours is {median(ratios):.2f} times as fast ({low:.2f} to {high:.2f}), ≥ {WANTED}: {verdict}\n{machine()}"
    )
    about = {"machine": machine(), "processor": processor()._asdict(), "megabytes": size, "first": first}
    write_figures(file, {**about, "seconds": seconds, "ratios": ratios, "interval": (low, high), "target": WANTED})
    sys.exit(median(ratios) < WANTED)


if __name__ == "__main__":
    main()
