"""How the commands of the service show things: tables, times and states as text."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

_UNITS = (("d", 86400), ("h", 3600), ("m", 60))
_STYLES = {
    "RUNNING": "green", "STARTING": "green", "FINISHED": "blue", "SUCCEEDED": "blue", "FAILED": "bold red",
    "STOPPING": "yellow", "CANCELLED": "dim", "HELD": "yellow",
}  # fmt: skip


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, capitals: bool = True) -> None:
    """A table on a terminal; elsewhere plain lines with the same columns, aligned, for pipes.

    There the heads are in capitals, unless these are names that a user may give again.
    """
    heads, *texts = ([plain(cell) for cell in row] for row in (columns, *rows))
    if not sys.stdout.isatty():
        widths = [max(map(len, cells)) for cells in zip(heads, *texts, strict=True)]
        for row in [[head.upper() for head in heads] if capitals else heads, *texts]:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(Text(head)) for head in heads), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for row in texts:
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    Console().print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values, one per line; what is empty is left out."""
    shown = {plain(name): text for name, value in fields.items() if (text := plain(value))}
    width = max(map(len, shown), default=0)
    for name, text in shown.items():
        click.echo(f"{name.ljust(width)}  {text}")


def plain(value: object) -> str:
    """A value as text without anything that a terminal would obey: names and reasons may be somebody else's."""
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", "\N{REPLACEMENT CHARACTER}", text)


def duration(seconds: float | None) -> str:
    """Such as 2d 3h, 4h 5m, 6m or 7s."""
    if seconds is None:
        return ""
    left = max(0, round(seconds))
    for at, (unit, size) in enumerate(_UNITS):
        if left >= size:
            rest = _UNITS[at + 1] if at + 1 < len(_UNITS) else ("s", 1)
            more = left % size // rest[1]
            return f"{left // size}{unit} {more}{rest[0]}" if more else f"{left // size}{unit}"
    return f"{left}s"


def ago(moment: float | None) -> str:
    """How long ago it was."""
    return "" if moment is None else f"{duration(time.time() - moment)} ago"


def until(moment: float | None) -> str:
    """In what time it will be."""
    return "" if moment is None else f"in {duration(moment - time.time())}"


def hosts_of(allocation: Sequence[Mapping[str, Any]]) -> str:
    """Where a job runs, such as h1:4,h2:4 or h1:2 (gpus 0,1)."""
    parts = []
    for place in allocation:
        gpus = f" (gpus {','.join(map(str, place['gpus']))})" if place["gpus"] else ""
        parts.append(f"{place['host']}:{place['ranks']}{gpus}")
    return ", ".join(parts)


def ranks_of(needs: Mapping[str, int]) -> str:
    """Such as 8, or 4-8 for an elastic job."""
    least, most = needs["min_ranks"], needs["num_ranks"]
    return str(most) if least == most else f"{least}-{most}"
