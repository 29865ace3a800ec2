"""What came out of a sweep: a table, results.csv, and results.png with the metric over each parameter."""

import csv
import io
from typing import Any

from hvd_transformer import atomic
from hvd_transformer.config.schema import shown
from hvd_transformer.errors import UserError
from hvd_transformer.reporting.step_lines import is_number
from hvd_transformer.sweep.definition import Range
from hvd_transformer.sweep.trials import Trial, Trials

_LOG_FROM = 20.0  # a list whose largest number is so many times the smallest has a logarithmic axis


def table(trials: Trials) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows, the best trial first."""
    sweep = trials.sweep
    steps = ["steps"] if sweep.halving is not None else []
    columns = ["trial", *sweep.parameters, *steps, sweep.metric, "state", "seconds"]
    rows = []
    for trial in trials.ranked(trials.all):
        values = [shown(trial.values[key]) for key in sweep.parameters]
        reached = [str(trial.steps or next(reversed(trial.results), ""))] if steps else []
        rows.append([trial.name, *values, *reached, trial.value, _state(trials, trial), trial.seconds])
    return columns, rows


def write_results(trials: Trials) -> None:
    """Write results.csv and results.png into the sweep's folder. Raises `UserError` if it cannot be written."""
    columns, rows = table(trials)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    files = {"results.csv": text.getvalue().encode()}
    if trials.any_result:
        files["results.png"] = _picture(trials)
    for name, content in files.items():
        try:
            atomic.write_bytes(trials.folder / name, content)
        except OSError as error:
            raise UserError(f"{trials.folder / name}: cannot be written: {error.strerror}") from None


def _state(trials: Trials, trial: Trial) -> str:
    if trial.failed:
        return "failed"
    if not trial.results:
        return "waiting"
    return "finished" if trial.rungs == len(trials.sweep.rungs) else "stopped early"


def _picture(trials: Trials) -> bytes:
    """A panel per parameter: each trial's newest result; pale: stopped early; the best one is marked."""
    from matplotlib.figure import Figure

    from hvd_transformer.reporting.charts import BLUE, INK, ORANGE

    sweep, known = trials.sweep, [trial for trial in trials.all if trial.value is not None]
    best, most = trials.ranked(known)[0], max(trial.rungs for trial in known)
    figure = Figure(figsize=(3.2 * len(sweep.parameters) + 0.8, 3.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(sweep.parameters), sharey=True, squeeze=False)[0]
    for axes, (key, values) in zip(panels, sweep.parameters.items(), strict=True):
        numbers = [_number(trial.values[key]) for trial in known]
        if all(is_number(number) for number in numbers):
            places: list[Any] = numbers
            if _is_log(values, [number for number in numbers if number is not None]):
                axes.set_xscale("log")
        else:
            places = [shown(trial.values[key]) for trial in known]
        colours = [ORANGE if trial is best else BLUE for trial in known]
        pale = [1.0 if trial.rungs == most else 0.3 for trial in known]
        axes.scatter(places, [trial.value for trial in known], c=colours, alpha=pale, s=28, linewidths=0)
        axes.set_xlabel(key, color=INK)
        axes.grid(color="#e4e6ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(sweep.metric, color=INK)
    figure.suptitle(f"best: {best.name}, {sweep.metric} {best.value:.4g}", fontsize=11, color=INK)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _number(value: Any) -> float | None:
    """YAML reads 1e-3 as text."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _is_log(values: Range | list[Any], numbers: list[float]) -> bool:
    if isinstance(values, Range):
        return values.scale == "log"
    return min(numbers) > 0 and max(numbers) / min(numbers) >= _LOG_FROM
