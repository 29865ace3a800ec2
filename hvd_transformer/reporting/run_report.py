"""A run's curves on paper: `report.html` and its PNG files, drawn from what the run directory holds."""

import base64
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from hvd_transformer import atomic
from hvd_transformer.reporting import charts
from hvd_transformer.reporting.metrics_log import _read_rows, _read_summary
from hvd_transformer.reporting.progress import duration

# Large figures at the head of the page: key of summary.json or of the newest line that has it, and its name.
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
    "seconds": "time",
    "world": "ranks",
}

STYLE = """
:root { color-scheme: light; }
body { margin: 2.5rem auto; max-width: 60rem; padding: 0 1.5rem; color: #2b2f36; background: #fff;
       font: 15px/1.5 system-ui, "Segoe UI", "Liberation Sans", Arial, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.where { color: #666c76; margin: .2rem 0 1.4rem; overflow-wrap: anywhere; }
dl { display: flex; flex-wrap: wrap; gap: .8rem 2.4rem; margin: 0 0 1.5rem; }
dl div { display: flex; flex-direction: column-reverse; }
dt { color: #666c76; font-size: .85rem; }
dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
img { display: block; width: 100%; height: auto; margin: 0 0 1.6rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem 2rem .2rem 0; font-weight: normal;
         border-bottom: 1px solid #e4e6ea; }
th { color: #666c76; }
pre { columns: 2 20rem; background: #f6f7f9; border-radius: 6px; padding: 1rem 1.2rem; margin: 0;
      font: 12.5px/1.55 ui-monospace, "DejaVu Sans Mono", monospace;
      white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { body { margin: 0; max-width: none; padding: 0; font-size: 11pt; }
               img, tr, dl { break-inside: avoid; } h2 { break-after: avoid; }
               pre { background: none; padding: 0; } }
"""


def write_report(run: Path) -> Path:
    """Draw the charts of the run directory `run`, and write `report.html` beside them.

    Works for a run that still goes, or was cut off: what is not there yet is left out. Raises UserError for a
    folder that is no run directory, OSError where it cannot be written to.
    """
    rows = _read_rows(run)
    summary = _read_summary(run / "summary.json")
    images = {
        "loss": charts.loss_chart(rows),
        **charts.metric_charts(rows),
        "learning_rate": charts.learning_rate_chart(rows),
        "throughput": charts.throughput_chart(rows, _unit(summary)),
    }
    for name, png in images.items():
        atomic.write_bytes(run / f"{name}.png", png)
    report = run / "report.html"
    atomic.write_text(report, _page(run, rows, summary, images))
    return report


def _unit(summary: Mapping[str, Any]) -> str:
    """What the run's speed counts."""
    return str(summary.get("unit", "tokens"))


def _page(run: Path, rows: list[dict[str, Any]], summary: Mapping[str, Any], images: Mapping[str, bytes]) -> str:
    folder = run.resolve()
    name = escape(folder.name)
    newest = {key: value for row in rows for key, value in row.items() if value is not None}
    numbers = newest | {"step": summary.get("steps", newest.get("step"))} | dict(summary)
    headlines = "".join(
        f"<div><dt>{escape(label.format(unit=_unit(summary)))}</dt><dd>{escape(_words(key, numbers[key]))}</dd></div>"
        for key, label in HEADLINES.items()
        if numbers.get(key) is not None
    )
    pictures = "\n".join(_picture(key, png) for key, png in images.items())
    table = "\n".join(
        f"<tr><th>{escape(key)}</th><td>{escape(_words(key, value))}</td></tr>" for key, value in summary.items()
    )
    status = summary.get("status", "no summary.json yet: the run goes on, or was cut off")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}: training report</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{name}</h1>
<p class="where">{escape(str(folder))} · {escape(str(status))}</p>
<dl>{headlines}</dl>
{pictures}
<h2>Summary</h2>
{f"<table>{table}</table>" if table else "<p>No summary.json yet.</p>"}
<h2>Configuration</h2>
{_configuration(run / "config.yaml")}
</body>
</html>
"""


def _picture(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{name.replace("_", " ")} by step" src="data:image/png;base64,{data}">'


def _configuration(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "<p>No config.yaml.</p>"
    return f"<pre>{escape(text.strip())}</pre>"


def _words(key: str, value: object) -> str:
    """A value as a reader wants it: 12,345; 0.001234; 1:23."""
    if value is None:
        return "none"
    if not charts.is_number(value):
        return value if isinstance(value, str) else json.dumps(value)
    assert isinstance(value, int | float)
    if key == "seconds":
        return duration(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"
