"""The charts of a run as PNG bytes: loss, other metrics of the task, learning rate, throughput."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hvd_transformer.reporting.metrics_log import Columns

Floats = NDArray[np.float64]
Curve = tuple[Floats, Floats]  # steps, values

BLUE, ORANGE, GREY, INK = "#2265ad", "#d1600a", "#8a8f98", "#2b2f36"
GREEN, PURPLE, RED, TEAL = "#2f8f4e", "#7a4fb3", "#c2334d", "#1f8f99"
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)
_DRAWN_WITH_THE_LOSS = {"valid_loss", "valid_perplexity"}
_PERCENT, _FRACTIONS = {"bleu", "bleu_words", "chrf"}, {"accuracy", "precision", "recall", "f1"}
# A chart is about 1,000 pixels wide: longer series are drawn by so many groups of points.
_MOST_POINTS = 1000


def loss_chart(columns: Columns) -> bytes:
    """Training and validation loss by step; with perplexity on the right axis if it is reported."""
    figure, (axes,) = _figure("Loss", 1)
    raw = _series(columns, "loss")
    valid = _series(columns, "valid_loss", average=False)
    smooth = _draw(axes, raw, "train")
    if valid[0].size:
        best = int(np.argmin(valid[1]))
        label = f"valid {valid[1][-1]:.3f}"
        if best != valid[1].size - 1:
            label += f" (best {valid[1][best]:.3f} at step {int(valid[0][best]):,})"
        axes.plot(*valid, color=ORANGE, linewidth=1.6, label=label, **_markers(valid, 60))
    axes.set_ylabel("loss (nats)")
    _frame_loss(axes, np.concatenate([raw[1], smooth, valid[1]]))
    if any(key.endswith("perplexity") for key in columns.keys):
        _perplexity_axis(axes)
    _legend(axes, "best")
    return _png(figure, [axes], [raw, valid])


def metric_charts(columns: Columns) -> dict[str, bytes]:
    """Charts of the other validation metrics by step: "bleu", in percent; "scores", accuracy and other fractions;
    "losses", those of the sources of a mixture; and one for each metric of a custom task, by its key, such as
    "valid_rmse". Metrics without values get no chart."""
    charts: dict[str, dict[str, Curve]] = {}
    for key in columns.keys:
        curve = _series(columns, key, average=False)
        if not key.startswith("valid_") or key in _DRAWN_WITH_THE_LOSS or not curve[0].size:
            continue
        name = key.removeprefix("valid_")
        own = re.sub(r"\W", "_", key)  # a valid file name
        charts.setdefault(_place(name) or own, {})[name] = curve
    titles = {"bleu": ("BLEU", "percent"), "scores": ("Scores", "fraction"), "losses": ("Losses", "nats")}
    return {place: _metric_chart(*titles.get(place, (_spaced(place), "")), curves) for place, curves in charts.items()}


def _place(name: str) -> str | None:
    """The chart that a metric shares with others."""
    if name in _PERCENT:
        return "bleu"
    if name.endswith("_loss"):
        return "losses"
    return "scores" if name.removesuffix("_macro") in _FRACTIONS else None


def _metric_chart(title: str, unit: str, curves: Mapping[str, Curve]) -> bytes:
    """One chart. A mean over classes ("_macro") is dashed, in the colour of the metric that it averages."""
    figure, (axes,) = _figure(f"{title} of the validation split" if unit else title, 1, entries=len(curves))
    bases = list(dict.fromkeys(name.removesuffix("_macro") for name in curves))
    for name, (steps, values) in curves.items():
        base = name.removesuffix("_macro")
        best = int((np.argmin if unit == "nats" else np.argmax)(values))
        digits = 2 if unit == "percent" else 4
        label = f"{_spaced(name)} {values[-1]:.{digits}f}"
        if unit and values[best] != values[-1]:  # for other metrics lower may be better
            label += f" (best {values[best]:.{digits}f} at step {int(steps[best]):,})"
        style: dict[str, Any] = {"linestyle": (0, (4, 2))} if base != name else {}
        colour = _COLOURS[bases.index(base) % len(_COLOURS)]
        axes.plot(steps, values, color=colour, linewidth=1.6, label=label, **style, **_markers((steps, values), 60))
    axes.set_ylabel(unit)
    _legend(axes, "upper left", (1.0, 1.0))  # beside the axes: many lines leave no room inside
    return _png(figure, [axes], list(curves.values()))


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def learning_rate_chart(columns: Columns) -> bytes:
    """The learning rate, and below it the gradient norm before clipping."""
    figure, (top, bottom) = _figure("Learning rate and gradient norm", 2)
    rate = _series(columns, "lr", average=False)
    top.plot(*rate, color=BLUE, linewidth=1.8, **_markers(rate, 10))
    top.set_ylabel("learning rate")
    top.set_ylim(bottom=0)
    top.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    norms = _series(columns, "grad_norm")
    _draw(bottom, norms, "norm")
    bottom.set_ylabel("gradient norm")
    positive = norms[1][norms[1] > 0]
    if positive.size and positive.max() > 50 * positive.min():
        bottom.set_yscale("log")
        bottom.yaxis.set_major_formatter("{x:g}")
    else:
        bottom.set_ylim(bottom=0)
    return _png(figure, [top, bottom], [rate, norms])


def throughput_chart(columns: Columns, unit: str) -> bytes:
    """Tokens, or whatever `unit` says, per second of the whole job, with the median; below it, where it is known, how
    long a rank waits in a step."""
    waits = {name: _series(columns, f"{name}_wait_milliseconds") for name in ("communication", "data")}
    waits = {name: series for name, series in waits.items() if series[0].size}
    figure, (axes, *more) = _figure("Throughput", 2 if waits else 1)
    speed = _series(columns, "tokens_per_second")
    axes.plot(*speed, color=BLUE, linewidth=1.2, **_markers(speed, 10))
    if speed[0].size:
        median = float(np.median(speed[1]))
        axes.axhline(median, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), label=f"median {median:,.0f}")
    axes.set_ylabel(f"{unit} per second, all ranks")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _legend(axes, "lower right")
    for panel in more:
        _draw_waits(panel, columns, waits)
    return _png(figure, [axes, *more], [speed, *waits.values()])


def _draw_waits(axes: Axes, columns: Columns, waits: Mapping[str, Curve]) -> None:
    """Milliseconds of a step, and of these the time that a rank waits: the mean over the ranks."""
    colours = {"communication": ORANGE, "data": GREEN}
    curves = {"step": _series(columns, "milliseconds_per_step")}
    curves |= {f"waiting for {name}": waits[name] for name in waits}
    for name, series in curves.items():
        if series[0].size:
            colour = colours.get(name.removeprefix("waiting for "), BLUE)
            label = f"{name} {float(np.median(series[1])):,.2f}"
            axes.plot(*series, color=colour, linewidth=1.2, label=label, **_markers(series, 10))
    axes.set_ylabel("ms per step")
    axes.set_ylim(bottom=0)
    _legend(axes, "upper right")


def _series(columns: Columns, key: str, average: bool = True) -> Curve:
    """Steps and finite values of `key`. Of a long series the averages of neighbouring points, or without `average` the
    least and the largest of them, and the last point of all: labels tell it and the best one."""
    steps, values = map(np.array, columns.curve(key))
    size = math.ceil(steps.size / _MOST_POINTS)
    if size <= 1:
        return steps, values
    starts = np.arange(0, steps.size, size)
    if not average:
        groups = list(zip(starts, np.split(values, starts[1:]), strict=True))
        kept = {start + pick(group) for start, group in groups for pick in (np.argmin, np.argmax)} | {steps.size - 1}
        places = sorted(kept)
        return steps[places], values[places]
    counts = np.diff(np.append(starts, steps.size))
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts


def _draw(axes: Axes, series: Curve, name: str) -> Floats:
    """Draw a line; a long noisy one is pale below its running median. Return the values of the main line."""
    steps, values = series
    if steps.size >= 60:
        axes.plot(steps, values, color=BLUE, linewidth=0.8, alpha=0.3)
        values = _running_median(values, max(2, steps.size // 80))
    label = f"{name} {values[-1]:.3f}" if steps.size else None
    axes.plot(steps, values, color=BLUE, linewidth=1.8, label=label, **_markers(series, 10))
    return values


def _markers(series: Curve, most: int) -> dict[str, Any]:
    """Markers for short series: a single point would not show as a line."""
    return {"marker": "o", "markersize": 3.5} if series[0].size <= most else {}


def _running_median(values: Floats, reach: int) -> Floats:
    """The median over `reach` points on both sides, which removes shorter spikes.

    Near the start it covers fewer points, so that the steep beginning stays in place.
    """
    nears = [min(reach, index) for index in range(values.size)]
    return np.array([np.median(values[i - near : i + near + 1]) for i, near in enumerate(nears)])


def _frame_loss(axes: Axes, values: Floats) -> None:
    """Fit the vertical range to the bulk of the values: one spike must not flatten the rest."""
    if values.size < 2:
        return
    low, high = float(values.min()), float(values.max())
    bulk = float(np.quantile(values, 0.98))
    if high - low > 5 * (bulk - low) > 0:
        high = bulk + 0.3 * (bulk - low)
    margin = 0.06 * (high - low) or 0.1 * max(1.0, abs(low))
    axes.set_ylim(low - margin, high + margin)


def _perplexity_axis(axes: Axes) -> None:
    """A right axis with round perplexities at the heights of their logarithms."""
    low, high = axes.get_ylim()
    if high > 50:  # diverged: the perplexity is meaningless
        return
    margin = 0.04 * (high - low)  # no tick next to the last number of the step axis
    right = axes.twinx()
    right.set_ylim(low, high)
    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), tuple(x / 10 for x in range(10, 100, 2))):
        ticks = [digit * 10.0**decade for decade in decades for digit in digits]
        ticks = [tick for tick in ticks if low + margin <= math.log(tick) <= high]
        if len(ticks) >= 6:
            break
    right.set_yticks([math.log(tick) for tick in ticks], [f"{tick:,.5g}" for tick in ticks])
    right.set_ylabel("perplexity (log scale)")
    _plain(right)


def _figure(title: str, panels: int, entries: int = 0) -> tuple[Figure, list[Axes]]:
    """`entries`: of a legend beside the axes, which is to have room for them."""
    height = max(3.8 if panels == 1 else 5.2, 0.8 + 0.22 * entries)
    figure = Figure(figsize=(8.0, height), dpi=150, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    axes = list(figure.subplots(panels, 1, sharex=True, squeeze=False).flat)
    for panel in axes:
        panel.grid(color="#e4e6ea", linewidth=0.8)
        panel.set_axisbelow(True)
        _plain(panel)
    return figure, axes


def _plain(axes: Axes) -> None:
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color("#b9bec6")
    axes.tick_params(which="both", colors=INK, length=0, labelsize=9)
    axes.yaxis.label.set_color(INK)


def _legend(axes: Axes, place: str, anchor: tuple[float, float] | None = None) -> None:
    """Names and last values, in the colours of their lines."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc=place, bbox_to_anchor=anchor, frameon=False, labelcolor="linecolor", handlelength=1.6, fontsize=10
        )


def _png(figure: Figure, panels: Sequence[Axes], curves: Sequence[Curve]) -> bytes:
    """Finish the step axis and render the figure."""
    bottom = panels[-1]
    bottom.set_xlabel("step", color=INK)
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10], integer=True))
    bottom.xaxis.set_major_formatter("{x:,.0f}")
    last = max((float(steps[-1]) for steps, _ in curves if steps.size), default=1.0)
    bottom.set_xlim(0, max(1.0, 1.01 * last))
    for panel in panels:
        if not any(np.size(line.get_xdata()) for line in panel.get_lines()):
            panel.set_yticks([])
            panel.text(0.5, 0.5, "no values yet", transform=panel.transAxes, ha="center", color=GREY)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
