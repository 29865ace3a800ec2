"""Simulates pipeline schedules and draws them as text and as PNG."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_transformer.parallel.pipeline_schedule import Operation, Schedule

Timeline = list[list[tuple[Operation, float, float]]]  # by stage: operation, start, end


def simulate(
    schedule: Schedule,
    forward_times: Sequence[float],
    backward_times: Sequence[float],
    weights_times: Sequence[float] | None = None,
) -> Timeline:
    """Start and end of every operation.

    Stage s needs `forward_times[s]` and `backward_times[s]` per micro-batch; communication takes no time. If weight
    gradients are deferred, they take `weights_times[s]` of the backward (None: half of it). Raises `ValueError` if the
    schedule deadlocks.
    """
    split = any(operation.kind == "weights" for operations in schedule for operation in operations)
    weights_times = weights_times or [time / 2 for time in backward_times]
    times: dict[str, Sequence[float]] = {
        "forward": forward_times,
        "weights": weights_times,
        "backward": [
            whole - weights if split else whole for whole, weights in zip(backward_times, weights_times, strict=True)
        ],
    }
    timeline: Timeline = [[] for _ in schedule]
    ends: dict[tuple[int, Operation], float] = {}
    waiting = [deque(operations) for operations in schedule]
    while any(waiting):
        ready = [
            stage
            for stage, queue in enumerate(waiting)
            if queue and all(need in ends for need in _needs(stage, queue[0], len(schedule)))
        ]
        if not ready:
            stuck = [
                f"stage {stage} before {' '.join(map(str, queue[0]))}" for stage, queue in enumerate(waiting) if queue
            ]
            raise ValueError(f"the schedule deadlocks: {', '.join(stuck)}")
        for stage in ready:
            operation, done = waiting[stage].popleft(), timeline[stage]
            needs = _needs(stage, operation, len(schedule))
            start = max([done[-1][2] if done else 0.0, *(ends[need] for need in needs)])
            ends[stage, operation] = start + times[operation.kind][stage]
            done.append((operation, start, ends[stage, operation]))
    return timeline


def _needs(stage: int, operation: Operation, num_stages: int) -> list[tuple[int, Operation]]:
    """The operations that must end before this one can start."""
    kind, micro_batch = operation
    if kind == "weights":
        return [(stage, Operation("backward", micro_batch))]
    if kind == "forward":
        return [(stage - 1, operation)] if stage > 0 else []
    after = [(stage + 1, operation)] if stage + 1 < num_stages else []
    return [(stage, Operation("forward", micro_batch)), *after]


def makespan(timeline: Timeline) -> float:
    """The time at which the last operation ends."""
    return max(end for operations in timeline for _, _, end in operations)


def bubble(timeline: Timeline) -> float:
    """The idle fraction of the stages' time: (N - 1) / (M + N - 1) for N equal stages and M micro-batches."""
    total = len(timeline) * makespan(timeline)
    busy = sum(end - start for operations in timeline for _, start, end in operations)
    return 1 - busy / total if total else 0.0


# Distinct for colour-blind readers and in greyscale, and light enough for black numbers.
COLOURS = {"forward": "#8ec1ee", "backward": "#e08214", "weights": "#b8e186"}
LABELS = {"forward": "forward", "backward": "backward", "weights": "deferred weight gradients"}


def draw_text(timeline: Timeline, width: int) -> str:
    """One line per stage of at most `width` characters, time to the right, and a legend below.

    Forwards are bare numbers, backwards are in brackets, deferred weight gradients in parentheses; without room for
    these, backwards are lowercase and weight gradients uppercase letters. Numbers without room are taken modulo 10.
    Operations shorter than half a character may be missing.
    """
    label, length = len(f"stage {len(timeline) - 1}  "), makespan(timeline)
    scale = (width - label) / length
    shortest = min(end - start for operations in timeline for _, start, end in operations if end > start)
    if shortest * scale >= 1:  # a whole number of columns, so that equal times look equal
        scale = int(shortest * scale) / shortest
    cells = [
        [(operation, round(start * scale), round(end * scale)) for operation, start, end in operations]
        for operations in timeline
    ]
    digits = len(str(max(operation.micro_batch for row in cells for operation, _, _ in row)))
    gap = 1 if digits > 1 else 0  # after a forward, so that 10 11 does not read as 1011
    spare = {"forward": gap, "backward": 2, "weights": 2}
    room = min(stop - start - spare[operation.kind] for row in cells for operation, start, stop in row)
    brackets = all(stop - start >= 3 for row in cells for operation, start, stop in row if operation.kind != "forward")
    shown = digits if brackets and room >= digits else 1
    lines = []
    for stage, row in enumerate(cells):
        line = ["."] * round(length * scale)
        for operation, start, stop in row:
            line[start:stop] = _cell(operation, stop - start, shown, brackets)
        lines.append(f"{f'stage {stage}':<{label}}{''.join(line)}")
    kinds = {operation.kind for row in cells for operation, _, _ in row}
    backward, weights = ("[0]", "(0)") if brackets else ("a", "A")
    halves = f", {weights} its weight gradients" if "weights" in kinds else ""
    modulo = ", numbers modulo 10" if shown < digits else ""
    lines.append(
        f"0 forward of micro-batch 0, {backward} its backward{halves}, . idle ({bubble(timeline):.0%}){modulo}"
    )
    return "\n".join(lines)


def _cell(operation: Operation, width: int, shown: int, brackets: bool) -> str:
    """The operation in exactly `width` characters, with the last `shown` digits of its number."""
    number = str(operation.micro_batch)[-shown:]
    if operation.kind == "forward":
        return f"{number:^{width}}"[:width] if brackets else number * width
    if not brackets:
        letters = "abcdefghij" if operation.kind == "backward" else "ABCDEFGHIJ"
        return letters[int(number)] * width
    left, right = "[]" if operation.kind == "backward" else "()"
    return f"{left}{number:^{width - 2}}{right}"


def draw_png(timelines: Mapping[str, Timeline], file: Path) -> None:
    """One panel per schedule, titled with its name and bubble, all on the same time axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    length = max(makespan(timeline) for timeline in timelines.values())
    cells = [cell for timeline in timelines.values() for operations in timeline for cell in operations]
    kinds = {operation.kind for operation, _, _ in cells}
    # The panels are about 640 points wide, and a digit is narrower than its height.
    font_size = min(640 * (end - start) / length / len(str(operation.micro_batch)) for operation, start, end in cells)
    rows = [len(timeline) for timeline in timelines.values()]
    figure = Figure(figsize=(10, 0.8 + sum(0.5 + 0.36 * row for row in rows)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        for stage, operations in enumerate(timeline):
            bars = [(start, end - start) for _, start, end in operations]
            colours = [COLOURS[operation.kind] for operation, _, _ in operations]
            edges = 0.8 if font_size >= 4 else 0.0  # of smaller bars they would cover all
            axes.broken_barh(bars, (stage - 0.43, 0.86), facecolors=colours, edgecolors="white", linewidths=edges)
            if font_size < 4:  # smaller numbers are illegible
                continue
            for (_, micro_batch), start, end in operations:
                place = (start + end) / 2, stage
                axes.text(*place, str(micro_batch), ha="center", va="center_baseline", fontsize=min(font_size, 9))
        axes.set_title(f"{name}: bubble {bubble(timeline):.1%}", loc="left", fontsize=11)
        axes.set_xlim(0, length)
        axes.set_ylim(len(timeline) - 0.5, -0.5)
        axes.set_yticks(range(len(timeline)))
        axes.set_ylabel("stage")
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("time")
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in LABELS if kind in kinds],
        loc="outside upper right",
        ncols=len(kinds),
        frameon=False,
    )
    figure.savefig(file, format="png")
