"""What a benchmark shows and writes: a table or named values for the screen, and JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvd_transformer.bench.allreduce import OURS, AllReduceResult, algorithm_bandwidth, bus_bandwidth, link_of
from hvd_transformer.bench.chart import chart
from hvd_transformer.bench.checkpoint import CheckpointResult
from hvd_transformer.bench.constants_file import with_link
from hvd_transformer.bench.data import DataResult
from hvd_transformer.bench.sizes import show_size
from hvd_transformer.bench.train import StepTimes, TrainResult
from hvd_transformer.bench.training_constants import training_constants
from hvd_transformer.comm.world import World
from hvd_transformer.config import Config
from hvd_transformer.config.mixture import source_name
from hvd_transformer.planning.constants import Constants


@dataclass(frozen=True)
class Report:
    """`values` are JSON, in SI units; `fields`, `columns` and `rows` are for the screen. `draw` makes a PNG.
    `constants` are for `plan`, on rank 0."""

    values: dict[str, Any]
    fields: dict[str, str]
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    draw: Callable[[], bytes] | None = None
    constants: Constants | None = None


def allreduce_report(world: World, result: AllReduceResult, known: Constants | None) -> Report:
    """Microseconds and MB/s by size and library; `known` are completed with the link."""
    ranks, names = result.ranks, result.libraries
    columns = ["size"]
    for name in names:
        columns += [f"{name} µs", "algbw", "busbw"]
    columns += [f"{OURS}/{name}" for name in names if name != OURS]
    rows, sizes = [], []
    for row in result.sizes:
        cells, by_library = [show_size(row.size)], {}
        for name in names:
            seconds = row.seconds[name]
            algorithm, bus = algorithm_bandwidth(row.size, seconds), bus_bandwidth(row.size, seconds, ranks)
            cells += [f"{1e6 * seconds:,.1f}", f"{algorithm / 1e6:,.1f}", f"{bus / 1e6:,.1f}"]
            by_library[name] = {
                "seconds": seconds,
                "algorithm_bandwidth": algorithm,
                "bus_bandwidth": bus,
                "repeats": row.repeats[name],
            }
        cells += [f"{row.seconds[OURS] / row.seconds[name]:.2f}" for name in names if name != OURS]
        rows.append(cells)
        sizes.append({"size": row.size, "cpu_seconds": row.cpu_seconds, "libraries": by_library})
    backend, device, link = result.backend, result.device, link_of(result)
    notes = list(result.notes)
    if link is None:
        notes.append("constants: no link, which takes --sizes of at most 4K and of 1M to 8M, the larger one slower")
    values = {"bench": "allreduce", **_world(world), "backend": backend, "device": device, "sizes": sizes}
    return Report(
        values={**values, "notes": notes},
        fields={"ranks": _ranks(world, backend, device), "units": "time: µs, median; algbw, busbw: MB/s"},
        columns=columns,
        rows=rows,
        notes=notes,
        draw=lambda: chart(result),
        constants=None if known is None else with_link(known, backend, result.scope, link),
    )


def train_report(config: Config, known: Constants | None, result: TrainResult) -> Report:
    """A step and its parts; `known` are the constants of the device, which are completed."""
    if known is None:  # not rank 0, which reports
        return Report({}, {})
    world, mesh, precision = result.world, result.mesh, config.training.precision
    side, rate = known.fastest_matmul(precision)
    used, alone = result.utilization(rate), None if result.alone is None else result.alone.together
    shown = StepTimes._fields[1:]
    parts = dict(zip(("forward and backward", "waiting for communication", "update", "data"), shown, strict=True))
    fields = {
        "model": f"{config.task}, {result.num_parameters:,} parameters, {precision}",
        "ranks": _ranks(world, world.backend_for(mesh.device), mesh.device.type),
        "layout": f"dp {mesh.dp}, tp {mesh.tp}, pp {len(mesh.devices)}",
        "step": f"{_ms(result.step)}, median of {result.num_steps}",
        **{f"  {name}": _ms(getattr(result.parts, part)) for name, part in parts.items()},
        f"{result.unit} per second": f"{result.targets_per_second:,.0f}",
        "MFU": f"{100 * used:.1f} % of {rate / 1e9:,.1f} GFLOP/s, a matrix product of side {side} on {known.device}",
    }
    if alone is not None and world.size > 1:
        fields["without communication"] = f"{_ms(alone)}: efficiency {100 * alone / result.step:.1f} %"
    values = {
        "bench": "train",
        **_world(world),
        "backend": world.backend_for(mesh.device),
        "device": mesh.device.type,
        "config": config.model_dump(mode="json"),
        "dp": mesh.dp,
        "tp": mesh.tp,
        "pp": len(mesh.devices),
        "parameters": result.num_parameters,
        "steps": result.num_steps,
        "step_seconds": result.step,
        "parts": result.parts._asdict(),
        "step_seconds_without_communication": alone,
        "unit": result.unit,
        "targets_per_second": result.targets_per_second,
        "flops_per_rank_and_step": result.flops,
        "matmul_rate": rate,
        "mfu": used,
    }
    return Report(values, fields, constants=training_constants(config, known, result))


def checkpoint_report(world: World, result: CheckpointResult) -> Report:
    """Seconds and MB/s of saving and loading."""
    size = result.num_bytes

    def speed(seconds: float) -> str:
        return f"{seconds:.3f} s, {size / seconds / 1e6:,.1f} MB/s"

    fields = {
        "ranks": _ranks(world, world.backend, ""),
        "checkpoint": f"{size / 1e6:,.1f} MB, {result.num_parameters:,} parameters, median of {result.repeats}",
        "stall of a step": _ms(result.stall),
        "save": speed(result.save),
        "load": speed(result.load),
    }
    return Report({"bench": "checkpoint", **_world(world), **asdict(result)}, fields)


def data_report(config: Config, world: World, result: DataResult) -> Report:
    """Tokens per second of preparation, and batches per second."""
    tokens, seconds = result.num_tokens, result.prepare_seconds
    processes = "1 process" if result.workers == 1 else f"{result.workers} processes"
    prepared = f"{seconds:.2f} s" if tokens is None else f"{tokens / seconds:,.0f} tokens per second ({seconds:.2f} s)"
    fields = {
        "data": f"{source_name(config.data)}, {config.task}",
        "ranks": _ranks(world, world.backend, ""),
        "preparation": f"{prepared} by {processes} per host",
        "batches per second": f"{result.batches:,.1f}",
        f"{result.unit} per second": f"{result.targets:,.0f}",
    }
    values = {
        "bench": "data",
        **_world(world),
        "source": source_name(config.data),
        "task": config.task,
        **asdict(result),
    }
    return Report(values, fields)


def _world(world: World) -> dict[str, Any]:
    return {"ranks": world.size, "hosts": list(dict.fromkeys(world.hosts))}


def _ranks(world: World, backend: str, device: str) -> str:
    hosts = len(set(world.hosts))
    over = f" over {backend} on {hosts} host{'s' if hosts > 1 else ''}" if world.size > 1 else ""
    return f"{world.size}{over}" + (f", {device}" if device else "")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
