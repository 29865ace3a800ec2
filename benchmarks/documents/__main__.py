"""Documents in JSON lines, prepared by two processes: killed and resumed, then a part of them beside `datasets`.

    python -m benchmarks.documents --gigabytes 10 --peer-python PEER/bin/python

1. `hvd-transformer prepare` of all made-up documents, as a user starts it. All its processes get SIGKILL when about a
   third is done; then the same command again. The file must have the end of each document, and the documents around
   the place where the second run resumed, and the last ones, must decode to what they were.
2. The first `--peer-gigabytes` by ours without a kill and by `datasets` with `tokenizers`, whose environment
   `--peer-python` names: same tokenizer.json, same end of a document, files read once before, so that they are cached.
   The peer's tokens must be ours, by their checksum. It is tried in several variants; the best one counts.

Everyone gets two cores. Memory is that of all processes together: the sum of their proportional set sizes, four times
per second. Tokens per second are those that a run has newly written, by the time from the command's start to its end,
with all imports; of the resumed run also with reading what was there.
"""

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from benchmarks.command_line import write_figures
from benchmarks.documents.corpus import MEGABYTE, write_corpus, write_tokenizer
from benchmarks.documents.ours import PROCESSES, Preparation, kill_and_resume
from benchmarks.documents.peers import PEERS, run_peer
from benchmarks.machine import machine, processor
from hvd_transformer.data.prepare_text import SAVED_BYTES

MOST_MEGABYTES = 1000
KILLED_AT = 1 / 3
_SHARD, _SAMPLE, _VOCABULARY = 256, 20, 16_384
# Disk space per byte: text and tokens; of the peer's part our tokens once more, and the peer's Arrow files and tokens.
_SPACE, _PEER_SPACE = 1.6, 3.0
_COLUMNS = "{:<36} {:>9} {:>14} {:>10}"


def beside_peers(
    python: Path, preparation: Preparation, shards: list[Path], folder: Path
) -> dict[str, dict[str, float]]:
    """The figures of ours and of each peer on these shards."""
    source = folder / "slice"
    source.mkdir()
    for shard in (*shards, shards[0].with_name("valid.jsonl")):
        (source / shard.name).symlink_to(shard)
    ours = Preparation(source, preparation.tokenizer, folder / "slice-cache")
    _read_all(shards)
    run = ours.run()
    found = {"ours": run.figures(ours.entry["tokens"])}
    for name, (processes, threads) in PEERS.items():
        _read_all(shards)
        found[name] = run_peer(python, processes, threads, preparation.tokenizer, shards, ours.entry)
    return found


def _read_all(shards: list[Path]) -> None:
    for shard in shards:
        with shard.open("rb") as file:
            while file.read(2**20):
                pass


def _row(name: str, figures: dict[str, float]) -> str:
    rate, memory = f"{figures['tokens_per_second']:,.0f}", f"{figures['megabytes']:,.0f}"
    return _COLUMNS.format(name, f"{figures['seconds']:.1f}", rate, memory)


@click.command()
@click.option("--gigabytes", default=10.0, show_default=True, help="Of JSON lines.")
@click.option("--shard-megabytes", default=float(_SHARD), show_default=True, help="Of one file.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keeps the JSON lines here, and finds them again.")
@click.option(
    "--peer-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Of an environment with datasets and tokenizers; without it only ours is measured.",
)
@click.option("--peer-gigabytes", default=1.0, show_default=True, help="Of the same files, as many as have this.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(
    gigabytes: float,
    shard_megabytes: float,
    folder: Path | None,
    peer_python: Path | None,
    peer_gigabytes: float,
    file: Path | None,
) -> None:
    """Exit code 1 where ours takes more than 1000 MB, or loses more by the kill than is saved at a time."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSES])  # its children have it, too
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="documents-")))
        source = folder.absolute() / f"documents-{gigabytes:g}-{shard_megabytes:g}"  # another size, other files
        source.mkdir(parents=True, exist_ok=True)
        aside = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir=folder.absolute())))
        _check_space(source, gigabytes, peer_gigabytes if peer_python else 0)
        shards = write_corpus(source, gigabytes * 1000, shard_megabytes)
        size = sum(shard.stat().st_size for shard in shards)
        click.echo(f"{size / 1e9:.2f} GB of JSON lines in {len(shards)} files; a vocabulary of {_VOCABULARY:,}")
        preparation = Preparation(
            source, write_tokenizer(aside / "bpe", shards[0], _VOCABULARY, _SAMPLE), aside / "all"
        )
        found = kill_and_resume(preparation, shards, KILLED_AT)
        limit = SAVED_BYTES * found["tokens"] / size
        missed = report(found, limit)
        beside: dict[str, dict[str, float]] = {}
        if peer_python is None:
            click.echo("datasets + tokenizers: left out without --peer-python")
        else:
            part = shards[: max(1, round(peer_gigabytes * 1000 / shard_megabytes))]
            beside = beside_peers(peer_python.absolute(), preparation, part, aside)
            report_peers(beside, sum(shard.stat().st_size for shard in part))
    click.echo(machine())
    about = {"machine": machine(), "processor": processor()._asdict(), "bytes": size, "files": len(shards)}
    targets = {"megabytes": MOST_MEGABYTES, "lost_tokens": limit}
    write_figures(file, {**about, **found, "targets": targets, "beside": beside})
    sys.exit(missed)


def report(found: dict[str, Any], limit: float) -> bool:
    """Prints the figures of the killed and the resumed run; whether one is not as wanted."""
    lost, runs = found["written"] - found["kept"], (found["killed"], found["resumed"])
    seconds, most = sum(run["seconds"] for run in runs), max(run["megabytes"] for run in runs)
    both = {"seconds": seconds, "tokens_per_second": found["tokens"] / seconds, "megabytes": most}
    click.echo(_COLUMNS.format("", "seconds", "tokens/s", "MB"))
    for name, figures in (("until SIGKILL", runs[0]), ("resumed", runs[1]), ("both", both)):
        click.echo(_row(name, figures))
    click.echo(
        f"{found['tokens']:,} tokens of {found['documents']:,} documents; at the kill {found['written']:,} were "
        f"written, {found['kept']:,} kept\n"
        f"lost: {lost:,}, at most {limit:,.0f} as saved at a time: {'met' if lost <= limit else 'MISSED'}\n"
        f"memory of all processes: {most:,.0f} MB, ≤ {MOST_MEGABYTES}: {'met' if most <= MOST_MEGABYTES else 'MISSED'}"
    )
    return bool(lost > limit or most > MOST_MEGABYTES)


def report_peers(beside: dict[str, dict[str, float]], size: int) -> None:
    """Prints the figures of ours and the peers, and the ratio to the best."""
    click.echo(f"the first {size / 1e9:.2f} GB, same tokens:")
    for name, figures in beside.items():
        click.echo(_row(name, figures))
    for key, what in (("tokens_per_second", "a file of tokens"), ("arrow_tokens_per_second", "its Arrow file alone")):
        best = max((name for name in beside if name != "ours"), key=lambda name: beside[name][key])
        ratio = beside["ours"]["tokens_per_second"] / beside[best][key]
        click.echo(f"ours is {ratio:.2f} times as fast as {best}, up to {what}")


def _check_space(source: Path, gigabytes: float, peer_gigabytes: float) -> None:
    """Raises `ClickException` where the disk has too little."""
    there = sum(shard.stat().st_size for shard in source.glob("*.jsonl"))
    needed = (_SPACE * gigabytes + _PEER_SPACE * peer_gigabytes) * 1000 * MEGABYTE - there
    if (free := shutil.disk_usage(source).free) < needed:
        raise click.ClickException(f"{source}: needs {needed / 1e9:.1f} GB on the disk, {free / 1e9:.1f} GB are free")


if __name__ == "__main__":
    main()
