"""`hvd-transformer bench`: measures allreduce, training, checkpoints and data, on one rank or on all ranks of a job."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from hvd_transformer.bench.sizes import DEFAULT_SIZES, parse_sizes
from hvd_transformer.cli import options
from hvd_transformer.cli.bench_files import BenchFiles
from hvd_transformer.cli.rank_process import run_ranks
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.bench.report import Report
    from hvd_transformer.comm.world import World
    from hvd_transformer.config import Config
    from hvd_transformer.monitoring.watchdog import Watchdog
    from hvd_transformer.parallel.mesh import ParallelMesh
    from hvd_transformer.training.process import StopRequest

    Measure = Callable[[Config, World, StopRequest, Watchdog], Report]

_SECONDS = options.FiniteRange(min=0, min_open=True, max=3600)
_CONSTANTS = "~/.cache/hvd-transformer/constants.yaml"
ONE_RANK = (
    "bench allreduce: over 1 rank it sends nothing; start it on several ranks, for example: "
    "hvd-transformer launch -np 2 -- bench allreduce"
)

json_file = click.option("--json", "json_file", type=options.PATH, metavar="FILE", help="Write all figures as JSON.")
constants = click.option(
    "--constants",
    type=options.PATH,
    default=_CONSTANTS,
    show_default=True,
    metavar="FILE",
    help="File of constants for `plan --scale` that the figures are added to.",
)
vocab_size = click.option(
    "--vocab-size", type=int, metavar="N", help="Vocabulary size, if only the data would tell it."
)


@click.group()
def bench() -> None:
    """Measure this machine, or the ranks of a job.

    Each benchmark runs on any number of ranks: `hvd-transformer launch -np 2 -- bench allreduce`, or
    `horovodrun -np 2 hvd-transformer bench allreduce`. Only rank 0 prints and writes files.
    """


@bench.command()
@click.option(
    "--sizes", default=DEFAULT_SIZES, show_default=True, metavar="LIST", help="Message sizes in bytes, or with K, M, G."
)
@click.option(
    "--seconds", type=_SECONDS, default=1, show_default=True, metavar="N", help="Approximate time per size and library."
)
@options.device
@json_file
@click.option("--plot", type=options.PATH, metavar="FILE.png", help="Draw time and bus bandwidth by size.")
@constants
def allreduce(
    sizes: str, seconds: float, device: str, json_file: Path | None, plot: Path | None, constants: Path
) -> None:
    """Measure allreduce by message size, on several ranks.

    Compares training's allreduce, through Horovod, with raw MPI (if the ranks run over MPI) and with torch.distributed.
    Bandwidths are defined as in NCCL's tests.
    """

    def measure(config: "Config", world: "World", stop: "StopRequest", watchdog: "Watchdog") -> "Report":
        from hvd_transformer.bench.allreduce import bench_allreduce
        from hvd_transformer.bench.constants_file import device_constants
        from hvd_transformer.bench.report import allreduce_report
        from hvd_transformer.bench.train import checked_mesh

        stop.end_at_once()
        mesh = checked_mesh(config, world)
        known = device_constants(constants, mesh.device, world)
        found = bench_allreduce(world, mesh.device, parse_sizes(sizes), seconds)
        return _with_warning(allreduce_report(world, found, known), mesh)

    _run("allreduce", measure, BenchFiles(json_file, plot, constants))


@bench.command()
@options.config_file
@options.preset
@vocab_size
@click.option(
    "--seconds", type=_SECONDS, default=10, show_default=True, metavar="N", help="Approximate time for the steps."
)
@json_file
@constants
@options.settings
def train(vocab_size: int | None, seconds: float, json_file: Path | None, constants: Path, **_: Any) -> None:
    """Measure training steps on random tokens: tokens per second, MFU, and the parts of a step.

    Takes the settings of hvd-train. No data is needed and nothing is saved.
    """

    def measure(config: "Config", world: "World", stop: "StopRequest", watchdog: "Watchdog") -> "Report":
        from hvd_transformer.bench.constants_file import device_constants
        from hvd_transformer.bench.report import train_report
        from hvd_transformer.bench.train import bench_train, checked_mesh
        from hvd_transformer.comm.world import agree
        from hvd_transformer.planning.memory_plan import vocabulary

        stop.end_at_once()
        size, _ = agree(world, lambda: vocabulary(config, vocab_size))
        mesh = checked_mesh(config, world)
        known = device_constants(constants, mesh.device, world, anew=True)
        report = train_report(config, known, bench_train(config, size, seconds, world, watchdog.heartbeat))
        return _with_warning(report, mesh)

    _run("train", measure, BenchFiles(json_file, constants=constants))


@bench.command()
@options.config_file
@options.preset
@vocab_size
@click.option(
    "--folder",
    type=options.PATH,
    default=".",
    show_default=True,
    metavar="DIR",
    help="Existing folder on the disk to measure; what is written there is removed.",
)
@click.option(
    "--seconds",
    type=_SECONDS,
    default=10,
    show_default=True,
    metavar="N",
    help="Approximate time to save, and to load.",
)
@json_file
@options.settings
def checkpoint(vocab_size: int | None, folder: Path, seconds: float, json_file: Path | None, **_: Any) -> None:
    """Measure checkpoints: how long a step waits for one, how fast it is saved and loaded.

    Takes the settings of hvd-train.
    """

    def measure(config: "Config", world: "World", stop: "StopRequest", watchdog: "Watchdog") -> "Report":
        from hvd_transformer.bench.checkpoint import bench_checkpoint
        from hvd_transformer.bench.report import checkpoint_report
        from hvd_transformer.comm.world import agree
        from hvd_transformer.planning.memory_plan import vocabulary

        size, _ = agree(world, lambda: vocabulary(config, vocab_size))
        return checkpoint_report(
            world, bench_checkpoint(config, size, folder, seconds, world, stop, watchdog.heartbeat)
        )

    _run("checkpoint", measure, BenchFiles(json_file))


@bench.command()
@options.config_file
@options.preset
@click.option(
    "--seconds", type=_SECONDS, default=5, show_default=True, metavar="N", help="Approximate time for the batches."
)
@json_file
@options.settings
def data(seconds: float, json_file: Path | None, **_: Any) -> None:
    """Measure how fast the data of data.source is prepared, and batches are made of it.

    Takes the settings of hvd-train. The token files are prepared anew in a temporary folder in data.cache_dir.
    """

    def measure(config: "Config", world: "World", stop: "StopRequest", watchdog: "Watchdog") -> "Report":
        from hvd_transformer.bench.data import bench_data
        from hvd_transformer.bench.report import data_report

        return data_report(config, world, bench_data(config, seconds, world, stop, watchdog.heartbeat))

    _run("data", measure, BenchFiles(json_file))


def config_of(words: Sequence[str]) -> "Config":
    """The configuration of `bench` with these arguments. Raises `UserError` for what can be seen without torch."""
    context = bench.make_context("bench", list(words))
    name, command, rest = bench.resolve_command(context, list(words))
    assert name is not None and command is not None
    return _checked(name, command.make_context(name, rest, parent=context).params)


def _checked(name: str, given: Mapping[str, Any]) -> "Config":
    from hvd_transformer.config import load

    if name == "allreduce":
        parse_sizes(given["sizes"])
        return load(None, None, [f"training.device={given['device']}"])
    if name == "checkpoint" and not given["folder"].is_dir():
        raise UserError(f"--folder {given['folder']}: no such folder")
    return load(given["preset"], given["file"], given["settings"])


def _run(name: str, measure: "Measure", files: BenchFiles) -> NoReturn:
    """Check the command line, measure on all ranks, and exit."""
    from hvd_transformer.comm.horovod_env import launched

    config, mistake, place = None, None, launched()
    try:
        config = _checked(name, click.get_current_context().params)
        if name == "allreduce" and place.size == 1:
            raise UserError(ONE_RANK)
        if place.rank == 0:  # the folders of other hosts do not matter
            files.check()
    except UserError as error:
        mistake = error

    def work(world: "World", stop: "StopRequest", watchdog: "Watchdog") -> int:
        from hvd_transformer.comm.world import agree
        from hvd_transformer.training.job_setup import check_same_configuration

        def checked() -> "Config":
            if mistake is not None:
                raise mistake
            assert config is not None
            return config

        agreed = agree(world, checked)
        agree(world, lambda: check_same_configuration(agreed, world))
        watchdog.use(None, world.hosts)
        report = measure(agreed, world, stop, watchdog)
        if world.rank == 0:
            _show(report)
        for line in agree(world, lambda: files.write(report) if world.rank == 0 else []):
            click.echo(line)
        return 0

    sys.exit(run_ranks("hvd-transformer", work, config.parallel.tensor if config else 1, mistake=mistake))


def _with_warning(report: "Report", mesh: "ParallelMesh") -> "Report":
    return report if mesh.warning is None else replace(report, notes=[*report.notes, f"warning: {mesh.warning}"])


def _show(report: "Report") -> None:
    from hvd_transformer.cli.service_tables import print_fields

    print_fields(report.fields)
    widths = [max(map(len, cells)) for cells in zip(report.columns, *report.rows, strict=True)]
    for row in [report.columns, *report.rows] if report.rows else ():
        click.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for note in report.notes:
        click.echo(note)
