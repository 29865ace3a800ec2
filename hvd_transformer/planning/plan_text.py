"""Formats a plan as text: aligned columns of plain characters, the same on a terminal, in a pipe and in a file."""

import math
import textwrap
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from hvd_transformer.config.schema import Config
from hvd_transformer.parallel.pipeline_schedule import SCHEDULES
from hvd_transformer.planning.memory_plan import RECOMPUTES, MemoryPlan, StageCost
from hvd_transformer.planning.model_costs import for_gpu
from hvd_transformer.planning.schedule_drawing import draw_text, makespan

# The number of micro-batches drawn if there is no room for all.
_DRAWN = 8
# Neighbouring layers that have all of these in common share a row.
_COSTS = attrgetter("parameters", "forward_flops", "backward_flops", "activation_bytes", "recompute")
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def plan_text(plan: MemoryPlan, width: int, memory_gib: float | None = None) -> str:
    """The whole plan. `width` is that of the drawing in characters, `memory_gib` the device memory to compare with."""
    parts = [_headline(plan), _layers(plan), _stages(plan), _memory(plan), _activations(plan)]
    if memory_gib is not None:
        parts.append(_fits(plan, memory_gib))
    if len(plan.stages) > 1:
        parts += [_bubbles(plan), _drawing(plan, width)]
    parts.append(_notes(plan))
    return "\n\n".join(parts)


def _headline(plan: MemoryPlan) -> str:
    config, size = plan.config, plan.micro_batch_size
    training, parallel = config.training, config.parallel
    samples = f"{size} sample{'s' if size > 1 else ''} each"
    if plan.num_samples % size:
        samples = f"{samples}, {plan.num_samples % size} in the last"
    lines = {
        "parameters": f"{plan.parameters:,}",
        "vocabulary": f"{plan.vocab_size:,} ({plan.vocab_origin})",
        "micro-batches": f"{plan.num_micro_batches} per accumulation step: {samples}",
        "sequence": f"{'' if config.task == 'language_model' else 'at most '}{config.data.sequence_length} tokens"
        + (f", targets {config.data.target_length}" if config.data.target_length else ""),
        "pipeline": f"{parallel.pipeline} stage{'s' if parallel.pipeline > 1 else ''}, schedule {parallel.schedule}, "
        f"recompute {parallel.recompute}",
        "computation": f"{training.precision}, optimizer {config.optimizer.name}",
        "device": _device(config),
    }
    if parallel.tensor > 1:
        lines["tensor"] = f"{parallel.tensor} ranks split the matrices; this plan is for one of them"
    if plan.dp > 1:
        shared = {
            "none": "",
            "state": ", which shard the optimizer state",
            "gradients": ", which shard the optimizer state and the gradients",
        }
        lines["replicas"] = f"{plan.dp}{shared[parallel.optimizer_shard]}"
    return "\n".join(f"{name + ':':<15}{text}" for name, text in lines.items())


def _device(config: Config) -> str:
    if for_gpu(config):
        return "GPU"
    found = config.training.device == "auto"
    return "CPU, as there is no GPU here; training.device=cuda plans for GPUs" if found else "CPU"


def _layers(plan: MemoryPlan) -> str:
    rows = [["layer", "parameters", "forward", "backward", "activations"]]
    for _, equal in groupby(plan.layers, _COSTS):
        first, *others = equal
        name = f"{first.name} to {others[-1].name}, each" if others else first.name
        flops = _number(first.forward_flops / 1e9), _number(first.backward_flops / 1e9)
        rows.append([name, f"{first.parameters:,}", *flops, bytes_text(first.activation_bytes)])
    return "Layers, per micro-batch: GFLOPs, and activations kept for backward\n" + table(rows, 1)


def _stages(plan: MemoryPlan) -> str:
    rows = [["stage", "layers", "count", "parameters", "GFLOPs", "share"]]
    total = sum(stage.forward_flops + stage.backward_flops for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        flops = stage.forward_flops + stage.backward_flops
        names = " to ".join(dict.fromkeys((stage.layers[0].name, stage.layers[-1].name)))
        cells = names, f"{len(stage.layers)}", f"{stage.parameters:,}", _number(flops / 1e9), f"{flops / total:.0%}"
        rows.append([f"{number}", *cells])
    partition = plan.config.parallel.partition
    how = "auto: here by FLOPs, in training by time" if partition == "auto" else f"{partition}"
    return f"Stages, per micro-batch (partition {how})\n{table(rows, 2)}"


def _memory(plan: MemoryPlan) -> str:
    unit, number = _unit(max(sum(plan.memory(stage)) for stage in plan.stages))
    rows = [["stage", "weights", "gradients", "optimizer", "activations", "total"]]
    for index, stage in enumerate(plan.stages):
        rows.append([f"{index}", *(f"{part:,.2f}" for part in _sum(plan, stage, number))])
    if len(plan.stages) > 1:
        columns = zip(*(_sum(plan, stage, number) for stage in plan.stages), strict=True)
        rows.append(["all", *(f"{sum(column):,.2f}" for column in columns)])
    return f"Peak memory, {unit}\n{table(rows, 1)}"


def _sum(plan: MemoryPlan, stage: StageCost, number: int) -> list[float]:
    """The memory of a stage and its total in units of `number` bytes, each rounded up so that the sum is exact."""
    parts = [math.ceil(part / number * 100) / 100 for part in plan.memory(stage)]
    return [*parts, sum(parts)]


def _activations(plan: MemoryPlan) -> str:
    unit, number = _unit(max(max(stage.activations.values()) for stage in plan.stages))
    configured = plan.config.parallel.schedule, plan.config.parallel.recompute
    rows = [["schedule", "recompute", *(f"stage {index}" for index in range(len(plan.stages)))]]
    for schedule in SCHEDULES:
        for recompute in RECOMPUTES:
            mark = " *" if (schedule, recompute) == configured else ""
            values = (stage.activations[schedule, recompute] / number for stage in plan.stages)
            rows.append([schedule, recompute + mark, *(f"{math.ceil(value * 100) / 100:,.2f}" for value in values)])
    return f"Activations by schedule and recompute, {unit} (* configured)\n{table(rows, 2)}"


def _fits(plan: MemoryPlan, memory_gib: float) -> str:
    unit, number = _unit(max(sum(plan.memory(stage)) for stage in plan.stages))
    limit = memory_gib * 2**30
    together = not for_gpu(plan.config) and len(plan.stages) > 1  # they share the rank's memory
    lines = [f"With {memory_gib:g} GiB: weights + gradients + optimizer + activations = total, {unit}"]
    for index, stage in enumerate(plan.stages):
        *parts, total = (f"{part:,.2f}" for part in _sum(plan, stage, number))
        of, ends = f" of {limit / number:,.2f}", "" if together else f": {_answer(sum(plan.memory(stage)), limit)}"
        lines.append(f"stage {index}: {' + '.join(parts)} = {total}{'' if together else of}{ends}")
    if together:
        whole = sum(sum(plan.memory(stage)) for stage in plan.stages)
        lines.append(f"all stages of a rank: {whole / number:,.2f}{of}: {_answer(whole, limit)}")
    return "\n".join(lines)


def _answer(size: float, limit: float) -> str:
    return "fits" if size <= limit else "does not fit"


def _bubbles(plan: MemoryPlan) -> str:
    rows = [["schedule", "bubble", "speed-up"]]
    for schedule in SCHEDULES:
        mark = " *" if schedule == plan.config.parallel.schedule else ""
        bubble = plan.bubble(schedule)
        rows.append([schedule + mark, f"{bubble:.1%}", f"{len(plan.stages) * (1 - bubble):.2f}"])
    title = f"Pipeline bubble, and ideal speed-up over one device, at most {len(plan.stages)} (* configured)"
    return f"{title}\n{table(rows, 1)}"


def _drawing(plan: MemoryPlan, width: int) -> str:
    schedule, count = plan.config.parallel.schedule, plan.num_micro_batches
    timeline = plan.timeline(schedule)
    shortest = min(end - start for operations in timeline for _, start, end in operations if end > start)
    room = shortest / makespan(timeline) * (width - len("stage 0  "))
    note = ""
    if count > _DRAWN and room < len(str(count - 1)) + 1:  # for a number and a space
        timeline = plan.timeline(schedule, _DRAWN)
        note = f", {_DRAWN} of its {count} micro-batches (more micro-batches, smaller bubble)"
    return f"One accumulation step of {schedule}{note}\n{draw_text(timeline, width)}"


def _notes(plan: MemoryPlan) -> str:
    text = (
        "Times are estimated from the FLOPs of matrix products. Memory does not include gradients in transit between "
        "stages, send buffers, and what the libraries use."
    )
    if plan.config.parallel.recompute != "never":
        text += " The GFLOPs of a stage include the blocks that backward recomputes."
    training = plan.config.training
    if training.compile and for_gpu(plan.config) and training.precision in ("bf16", "fp16"):
        text += " Activations include 16-bit copies of the weights, which each micro-batch makes anew."
    return textwrap.fill(text, 78)


def table(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Columns two spaces apart, the first `num_left` aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if index < num_left else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _number(value: float) -> str:
    """With at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _unit(num_bytes: int) -> tuple[str, int]:
    """The largest unit not above this size, and its bytes."""
    return next((item for item in _UNITS.items() if num_bytes >= item[1]), ("KiB", 2**10))


def bytes_text(num_bytes: int) -> str:
    """Such as 1.5 GiB."""
    unit, number = _unit(num_bytes)
    return f"{num_bytes / number:,.1f} {unit}"
