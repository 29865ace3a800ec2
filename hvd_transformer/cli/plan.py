"""`hvd-transformer plan`: estimates memory, pipeline schedule and, with --scale, step time of a configuration."""

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvd_transformer.cli import options
from hvd_transformer.errors import UserError

if TYPE_CHECKING:
    from hvd_transformer.config import Config
    from hvd_transformer.planning.constants import Backend

_MOST_DEVICES = 10**6


@click.command()
@options.config_file
@options.preset
@click.option("--vocab-size", type=int, metavar="N", help="Vocabulary size, if no data is prepared yet.")
@click.option(
    "-np", "ranks", type=int, metavar="N", help="Number of ranks, for a sharded optimizer or batch_size=auto."
)
@click.option("--memory-gib", type=float, metavar="N", help="Memory of a device: tells whether the job fits.")
@click.option(
    "--scale", metavar="LIST", help="Predict step time and best layout for numbers of devices, such as 8,64,512."
)
@click.option("--constants", metavar="NAME", help="With --scale: a device such as h100, or the file of a machine.")
@click.option("--devices-per-host", type=int, metavar="N", help="With --scale: GPUs per host, or ranks on a CPU.")
@click.option("--backend", type=click.Choice(["gloo", "mpi", "nccl"]), help="With --scale: what sends the messages.")
@click.option("--output", type=options.PATH, metavar="FILE.png", help="Draw the pipeline schedules to this file.")
@options.settings
def plan(
    file: Path | None,
    preset: str | None,
    vocab_size: int | None,
    ranks: int | None,
    memory_gib: float | None,
    scale: str | None,
    constants: str | None,
    devices_per_host: int | None,
    backend: "Backend | None",
    output: Path | None,
    settings: tuple[str, ...],
) -> None:
    """Estimate what a job needs, without data, a GPU or training: parameters, memory per pipeline stage, and pipeline
    bubbles (how long the stages wait for each other).

    Takes the settings of hvd-train, for example
    `hvd-transformer plan --preset tutorial-1b --memory-gib 16 training.device=cuda`.

    With --scale it predicts time per step, tokens per second and memory of every layout of data, tensor and pipeline
    parallelism on so many devices, from what `hvd-transformer bench` measured on this machine or from --constants.
    """
    from hvd_transformer.config import load

    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise UserError(f"--memory-gib {memory_gib:g}: must be above 0")
    if output is not None and output.suffix.lower() != ".png":
        raise UserError(f"--output {output}: must end in .png")
    config = load(preset, file, settings)
    if scale is not None:
        if output is not None or ranks is not None:
            raise UserError(f"{'--output' if output is not None else '-np'}: not with --scale")
        click.echo(_scaled(config, scale, constants, devices_per_host, backend, memory_gib, vocab_size))
        return
    for option, value in (
        ("--constants", constants),
        ("--devices-per-host", devices_per_host),
        ("--backend", backend),
    ):
        if value is not None:
            raise UserError(f"{option}: only with --scale")
    # Imported after the settings are checked: torch takes seconds.
    from hvd_transformer.parallel.pipeline_schedule import SCHEDULES
    from hvd_transformer.planning.memory_plan import make_plan
    from hvd_transformer.planning.plan_text import plan_text
    from hvd_transformer.planning.schedule_drawing import draw_png

    if config.training.batch_size == "auto":
        config = _with_found_batch_size(config, vocab_size, ranks, memory_gib)
    made = make_plan(config, vocab_size, ranks)
    width = min(shutil.get_terminal_size().columns, 120)
    click.echo(plan_text(made, max(width, 40), memory_gib))
    if output is not None:
        try:
            draw_png({schedule: made.timeline(schedule) for schedule in SCHEDULES}, output)
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written: {error.strerror}") from error
        click.echo(f"\nschedules: {output}")


def _with_found_batch_size(
    config: "Config", vocab_size: int | None, ranks: int | None, memory_gib: float | None
) -> "Config":
    """With the largest batch size that fits by the estimate, which is printed. Raises `UserError` if none does."""
    from hvd_transformer.config.batch_size import possible_batch_sizes, with_batch_size
    from hvd_transformer.planning.batch_size_fit import fits_by_plan, largest_that_fits
    from hvd_transformer.planning.memory_plan import num_replicas, vocabulary

    if memory_gib is None:
        raise UserError("training.batch_size=auto: needs --memory-gib, the memory that a batch is to fit into")
    dp, num_bytes = num_replicas(config, ranks), memory_gib * 2**30
    tokens, _ = vocabulary(config, vocab_size)
    sizes = possible_batch_sizes(config, dp)
    found = largest_that_fits(sizes, lambda size: fits_by_plan(config, size, tokens, dp, num_bytes))
    if found is None:
        raise UserError(f"training.batch_size=auto: not even {sizes[0]} samples fit into --memory-gib {memory_gib:g}")
    click.echo(
        f"training.batch_size=auto: {found}, the largest of {sizes[0]} to {sizes[-1]} that fits by this estimate\n"
    )
    return with_batch_size(config, found)


def _scaled(
    config: "Config",
    scale: str,
    chosen: str | None,
    devices_per_host: int | None,
    backend: "Backend | None",
    memory_gib: float | None,
    vocab_size: int | None,
) -> str:
    from hvd_transformer.planning.constants import load

    numbers = scale.split(",")
    if not all(number.isdecimal() and len(number) < 10 and 1 <= int(number) <= _MOST_DEVICES for number in numbers):
        raise UserError(f"--scale {scale}: must be numbers of devices from 1 to {_MOST_DEVICES}, such as 8,64,512")
    if devices_per_host is not None and devices_per_host < 1:
        raise UserError(f"--devices-per-host {devices_per_host}: must be at least 1")
    communication = config.communication
    if communication.compression in ("auto", "powersgd") or communication.local_steps > 1:
        key = "local_steps" if communication.local_steps > 1 else "compression"
        raise UserError(
            f"communication.{key}={getattr(communication, key)}: not modelled by --scale; it takes local_steps=1 and "
            "compression none, fp16, fp16_fp32_sum, int8 or int4"
        )
    constants = load(chosen)
    memory = constants.memory_bytes if memory_gib is None else memory_gib * 2**30
    # Imported after the settings are checked: torch takes seconds.
    from hvd_transformer.planning.scaling.layout import Machine
    from hvd_transformer.planning.scaling.measure_work import measure_work
    from hvd_transformer.planning.scaling.scale_text import scale_text
    from hvd_transformer.planning.scaling.search import search

    machine = Machine(constants, constants.backend(backend), devices_per_host or constants.devices_per_host)
    if config.training.device == "auto":  # the memory of the machine that is planned for, not of this one
        training = config.training.model_copy(update={"device": machine.device})
        config = config.model_copy(update={"training": training})
    elif config.training.device == "cpu" and machine.backend == "nccl":
        raise UserError(f"training.device=cpu: the constants of {constants.device} are for GPUs; leave the key out")
    work = measure_work(config, vocab_size, machine.devices_per_host)
    return scale_text(work, machine, [search(work, config, machine, int(number), memory) for number in numbers], memory)
