"""Formats what `plan --scale` finds as text, like `planning.plan_text`."""

import textwrap
from collections.abc import Sequence

from hvd_transformer.planning.plan_text import table
from hvd_transformer.planning.scaling.layer_work import ModelWork
from hvd_transformer.planning.scaling.layout import Machine
from hvd_transformer.planning.scaling.search import Candidate, Scale

# Layouts shown of each number of devices.
_SHOWN = 4
_NOTES = {
    "compute": "the devices' own speed",
    "bandwidth": "the links' bandwidth; communication.compression=fp16 halves the bytes of gradients",
    "latency": "the number of messages; a larger communication.bucket_mb or training.accumulation has fewer",
    "bubble": "pipeline bubbles; more parallel.micro_batches or parallel.schedule=zero_bubble make them smaller",
    "jitter": "waiting for the slowest rank",
    "memory": "memory; parallel.recompute, parallel.optimizer_shard or a smaller training.batch_size need less",
}


def scale_text(work: ModelWork, machine: Machine, scales: Sequence[Scale], memory_bytes: float) -> str:
    """The assumptions, the layouts, and the one to take for each number of devices."""
    return "\n\n".join(
        [_headline(work, machine, memory_bytes), _layouts(machine, scales), _recommended(scales), _notes()]
    )


def _headline(work: ModelWork, machine: Machine, memory_bytes: float) -> str:
    constants = machine.constants
    known = constants.links[machine.backend]
    links = ", ".join(
        f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} µs "
        f"{'within a host' if scope == 'host' else 'between hosts'}"
        for scope, link in known.items()
    )
    lines = {
        "parameters": f"{work.parameters:,.0f}",
        "device": f"{constants.device}, {memory_bytes / 2**30:.4g} GiB, {machine.devices_per_host} per host",
        "links": f"{machine.backend}: {links}",
    }
    return "\n".join(f"{name + ':':<15}{text}" for name, text in lines.items())


def _layouts(machine: Machine, scales: Sequence[Scale]) -> str:
    price = machine.constants.price_per_hour
    rows = [["devices", "dp", "tp", "pp", "samples", "ms/step", "tokens/s", "efficiency", "GiB", "bound by"]]
    if price is not None:
        rows[0].insert(-1, "price of 1e9 tokens")
    for scale in scales:
        fitting = [candidate for candidate in scale.candidates if candidate.fits]
        for candidate in fitting[:_SHOWN] or scale.candidates[:1]:
            row = _row(candidate, scale)
            if price is not None:
                hours = 1e9 / candidate.tokens_per_second / 3600
                row.insert(-1, f"{hours * candidate.layout.devices * price:,.2f}")
            rows.append(row)
    return f"Layouts, the fastest {_SHOWN} that fit (* recommended)\n{table(rows, 0)}"


def _row(candidate: Candidate, scale: Scale) -> list[str]:
    layout = candidate.layout
    bound = scale.bound if candidate is scale.best else candidate.time.bound
    return [
        f"{layout.devices}{' *' if candidate is scale.best else '  '}",
        f"{layout.dp}",
        f"{layout.tp}",
        f"{layout.pp}",
        f"{candidate.global_batch:,}",
        f"{candidate.time.total * 1e3:,.1f}",
        f"{candidate.tokens_per_second:,.0f}",
        f"{candidate.efficiency:.0%}",
        f"{candidate.memory / 2**30:,.2f}",
        bound if candidate.fits else "does not fit",
    ]


def _recommended(scales: Sequence[Scale]) -> str:
    lines = ["Recommended"]
    for scale in scales:
        best = scale.best
        if best is None:
            lines.append(f"{scale.devices} devices: no layout fits; bound by {_NOTES['memory']}")
            continue
        layout = best.layout
        keys = (
            f"parallel.tensor={layout.tp} parallel.pipeline={layout.pp} parallel.micro_batches={layout.micro_batches}"
        )
        if layout.accumulation > 1:
            keys += f", {layout.accumulation} accumulation steps"
        lines.append(f"{scale.devices} devices: -np {layout.dp * layout.tp} {keys}")
        lines.append(f"    bound by {_NOTES[scale.bound]}")
    return "\n".join(lines)


def _notes() -> str:
    return textwrap.fill(
        "Efficiency: tokens per second of a device, relative to one device alone that has the whole model. Not "
        "modelled: reading data, evaluation, checkpoints, other jobs on the links, and what stages send each other.",
        78,
    )
