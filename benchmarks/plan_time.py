"""The step time that `hvd-transformer plan --scale` predicts, against the measured one.

    python -m benchmarks.plan_time [--hosts [--mbit 1000]]

The constants are measured on the spot by `hvd-transformer bench`: `train` for the model, `allreduce` for each link. A
shared machine changes its pace within minutes, which is no fault of a prediction: so constants and steps are measured
in turn, several times, and the median of the errors is what counts.

one host    one rank; dp 2 and tp 2, each over gloo and MPI; pp 2 in one rank; the model of the pipeline benchmark
--hosts     dp 2 and tp 2 on two hosts of this machine (`namespace_hosts`, needs root), over gloo, with the link limited
            to 1000, 100 and 10 Mbit/s; the model of shakespeare-char
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from benchmarks.command_line import measured, write_figures
from benchmarks.group import Contestant
from benchmarks.launching import alone, horovod, horovodrun
from benchmarks.namespace_hosts import missing
from benchmarks.paired import Options
from benchmarks.settings import BIN, ENVIRONMENT
from benchmarks.slow_link import LinkedHosts
from benchmarks.workload import PIPELINE, SETTINGS, SMALL, make_config
from hvd_transformer.planning.constants import Backend, load
from hvd_transformer.planning.scaling.layout import Layout, Machine
from hvd_transformer.planning.scaling.measure_work import measure_work
from hvd_transformer.planning.scaling.step_time import step_time

LARGE = (*PIPELINE, "parallel.micro_batches=1")
TENSOR = "parallel.tensor=2"
PIPELINED = ("parallel.pipeline=2", "parallel.micro_batches=8")
SIZES = "1K,64K,1M,8M"
# By Mbit/s: the steps of a block.
STEPS = {1000: 10, 100: 4, 10: 2}
WITHIN = 0.1
BACKENDS: tuple[Backend, ...] = ("gloo", "mpi")


class Step(NamedTuple):
    """Milliseconds."""

    predicted: float
    measured: float


Found = dict[str, Step]  # by the name of the case


class Case(NamedTuple):
    """One contestant and what is predicted for it."""

    contestant: Contestant
    settings: Sequence[str]
    layout: Layout
    backend: Backend = "gloo"


def one_host() -> list[Case]:
    """The layouts of two cores."""
    cases = [Case(alone("one rank", "trainer", *LARGE), LARGE, _layout(LARGE, 1, 1, 1))]
    for backend in BACKENDS:
        for name, settings, layout in (
            ("dp 2", LARGE, _layout(LARGE, 2, 1, 1)),
            ("tp 2", (*LARGE, TENSOR), _layout(LARGE, 1, 2, 1)),
        ):
            cases.append(Case(horovod(f"{name}, {backend}", backend, *settings), settings, layout, backend))
    settings = (*LARGE, *PIPELINED)
    return [*cases, Case(alone("pp 2", "trainer", *settings), settings, _layout(settings, 1, 1, 2))]


def two_hosts(hosts: LinkedHosts) -> list[Case]:
    """One rank on each."""
    return [
        Case(hosts.horovod("dp 2"), SMALL, _layout(SMALL, 2, 1, 1)),
        Case(hosts.horovod("tp 2", TENSOR), (*SMALL, TENSOR), _layout(SMALL, 1, 2, 1)),
    ]


def compared(cases: Sequence[Case], constants: Path, devices_per_host: int, options: Options) -> Found:
    """Milliseconds per step by the name of the case."""
    known = load(str(constants))
    if devices_per_host == 1:  # "hosts" of one machine, whose ranks slow each other down as on one host
        fractions = {name: fraction / known.crowding for name, fraction in known.training_fraction.items()}
        known = known.model_copy(update={"training_fraction": fractions})
    result = measured([replace(case.contestant, trains=None) for case in cases], options)
    found = {}
    for contestant, settings, layout, backend in cases:
        config = make_config(settings)
        machine = Machine(known, backend, devices_per_host)
        time = step_time(measure_work(config, None, 2), config, layout, machine)
        tokens = layout.dp * config.training.batch_size * config.data.sequence_length
        found[contestant.name] = Step(1000 * time.total, 1000 * tokens / median(result.rates[contestant.name]))
    return found


def reported(repeats: Sequence[Found]) -> dict[str, Any]:
    """The figures by the name of the case; printed, too."""
    figures = {}
    for name in repeats[0]:
        steps = [found[name] for found in repeats]
        predicted, taken = ([getattr(step, field) for step in steps] for field in Step._fields)
        errors = [step.predicted / step.measured - 1 for step in steps]
        error = median(errors)
        figures[name] = {"measured": taken, "predicted": predicted, "errors": errors, "error": error}
        verdict = "within" if abs(error) <= WITHIN else "NOT within"
        click.echo(
            f"{name:<22}{median(taken):>10.1f} ms measured{median(predicted):>10.1f} ms predicted{error:>8.1%} "
            f"({min(errors):.1%} to {max(errors):.1%})  {verdict} {WITHIN:.0%}"
        )
    return figures


def _layout(settings: Sequence[str], dp: int, tp: int, pp: int) -> Layout:
    config = make_config(settings)
    count = config.parallel.micro_batches
    return Layout(dp, tp, pp, count, config.training.batch_size // count)


def _bench(words: Sequence[str], constants: Path, launcher: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `hvd-transformer bench` on two ranks; ends the process with its output where it fails."""
    command = [*launcher, BIN / "hvd-transformer", "bench", *words, "--constants", constants]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if result.returncode:
        click.echo(f"benchmark: hvd-transformer bench {words[0]} failed:\n{result.stdout}{result.stderr}", err=True)
        sys.exit(1)


def _bench_here(backend: Backend, words: Sequence[str], constants: Path) -> None:
    _bench(words, constants, horovodrun(backend), ENVIRONMENT)


def _on_one_host(constants: Path, options: Options) -> Found:
    _bench_here("gloo", ["train", *SETTINGS, *LARGE], constants)
    for backend in BACKENDS:
        _bench_here(backend, ["allreduce", "--sizes", SIZES], constants)
    return compared(one_host(), constants, 2, options)


def _on_two_hosts(constants: Path, options: Options, speeds: Sequence[int]) -> Found:
    found: Found = {}
    with LinkedHosts() as hosts:
        launcher = [*hosts.enter("h1"), "horovodrun", "-np", "2", "-H", "h1:1,h2:1", "--gloo"]
        launcher += ["--network-interfaces", "eth0"]
        for mbit in speeds:
            hosts.shape(mbit)
            _bench_here("gloo", ["train", *SETTINGS, *SMALL], constants)
            _bench(["allreduce", "--sizes", SIZES], constants, launcher, hosts.environment)
            steps_of_link = compared(two_hosts(hosts), constants, 1, replace(options, steps=STEPS[mbit]))
            found |= {f"{name}, {mbit} Mbit/s": step for name, step in steps_of_link.items()}
    return found


@click.command()
@click.option("--hosts", is_flag=True, help="Two hosts over links of three speeds, in place of one host.")
@click.option(
    "--mbit", multiple=True, type=click.Choice([str(speed) for speed in STEPS]), help="Of --hosts. Default: all."
)
@click.option("--repeats", default=5, show_default=True, type=click.IntRange(1), help="Constants, then steps.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Blocks of each, in each repeat.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Write every figure to this, too.")
def main(hosts: bool, mbit: tuple[str, ...], repeats: int, rounds: int, file: Path | None) -> None:
    """Compare predicted with measured step times."""
    if hosts and (why := missing(["tc"])) is not None:
        click.echo(f"benchmark: {why}", err=True)
        sys.exit(1)
    speeds = list(map(int, mbit)) or list(STEPS)
    measure, found, texts = partial(_on_two_hosts, speeds=speeds) if hosts else _on_one_host, [], []
    for number in range(1, repeats + 1):
        click.echo(f"repeat {number} of {repeats}", err=True)
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            constants = Path(folder) / "constants.yaml"
            found.append(measure(constants, Options(rounds=rounds, steps=5)))
            texts.append(constants.read_text(encoding="utf-8"))
    write_figures(file, {**reported(found), "constants": texts})


if __name__ == "__main__":
    main()
