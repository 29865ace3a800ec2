"""The report of a run: `report.html` (from the template of that name) and its PNG files."""

import base64
import json
import math
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from hvd_transformer import atomic
from hvd_transformer.reporting import charts
from hvd_transformer.reporting.metrics_log import Columns, read_rows, read_summary
from hvd_transformer.reporting.progress import duration
from hvd_transformer.reporting.step_lines import is_number

# Figures at the top of the page: key of summary.json, or else of the newest line of metrics.jsonl that has it → name.
HEADLINES = {
    "test_perplexity": "test perplexity",
    "valid_perplexity": "valid perplexity",
    "test_bleu": "test BLEU",
    "valid_bleu": "valid BLEU",
    "test_accuracy": "test accuracy",
    "valid_accuracy": "valid accuracy",
    "test_f1": "test F1",
    "valid_f1": "valid F1",
    "step": "steps",
    "tokens_per_second": "{unit} per second",
    "mfu": "MFU",
    "peak_memory_bytes": "peak memory",
    "seconds": "time",
    "world": "ranks",
}


def write_report(run: Path) -> Path:
    """Draw the charts of the run directory `run`, write them and `report.html` there, and return its path.

    Also works for a run that is in progress or was interrupted, with what is there so far. Raises `UserError` for a
    folder that is not a run directory, `OSError` if it cannot be written to.
    """
    columns = Columns(read_rows(run))
    summary = read_summary(run / "summary.json")
    if columns.newest.get("step", 0) > summary.get("steps", math.inf):  # of an earlier end: the run was resumed
        summary = {}
    images = {
        "loss": charts.loss_chart(columns),
        **charts.metric_charts(columns),
        "learning_rate": charts.learning_rate_chart(columns),
        "throughput": charts.throughput_chart(columns, str(summary.get("unit", "tokens"))),
    }
    for name, png in images.items():
        atomic.write_bytes(run / f"{name}.png", png)
    report = run / "report.html"
    atomic.write_text(report, _page(run, columns.newest, summary, images))
    return report


def _page(run: Path, newest: Mapping[str, Any], summary: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
    folder = run.resolve()
    numbers = dict(newest) | {"step": summary.get("steps", newest.get("step"))} | dict(summary)
    unit = summary.get("unit", "tokens")
    headlines = "".join(
        f"<div><dt>{escape(label.format(unit=unit))}</dt><dd>{escape(_words(key, numbers[key]))}</dd></div>"
        for key, label in HEADLINES.items()
        if numbers.get(key) is not None
    )
    pictures = "\n".join(
        f'<img alt="{name.replace("_", " ")} by step" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        for name, png in images.items()
    )
    table = "\n".join(
        f"<tr><th>{escape(key)}</th><td>{escape(_words(key, value))}</td></tr>" for key, value in summary.items()
    )
    try:
        text = (run / "config.yaml").read_text(encoding="utf-8", errors="replace")
        configuration = f"<pre>{escape(text.strip())}</pre>"
    except OSError:
        configuration = "<p>No config.yaml.</p>"
    status = summary.get("status", "no summary.json yet: the run is in progress or was interrupted")
    template = resources.files("hvd_transformer.reporting") / "report.html"
    return Template(template.read_text(encoding="utf-8")).substitute(
        name=escape(folder.name),
        folder=escape(str(folder)),
        status=escape(str(status)),
        headlines=headlines,
        charts=pictures,
        summary=f"<table>{table}</table>" if table else "<p>No summary.json yet.</p>",
        configuration=configuration,
    )


def _words(key: str, value: object) -> str:
    """A value in readable form: 12,345; 0.001234; 1:23; 43.1 %."""
    if value is None:
        return "none"
    if not is_number(value):
        return value if isinstance(value, str) else json.dumps(value)
    if key == "seconds":
        return duration(value)
    if key == "mfu":
        return f"{100 * value:.1f} %"
    if key == "peak_memory_bytes":
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
