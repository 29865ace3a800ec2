"""Turns lines of metrics.jsonl into rows and columns. Half lines, NaN and values that are no numbers are no errors."""

import json
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]
MOST_KEYS = 200  # of a run; more are left out
MOST_STEP = 1 << 53  # a float counts up to here
_MOST_KEY_LENGTH = 100
_GAP = math.nan


class Column(NamedTuple):
    """The points of one key in some lines, in the order of their steps. NaN is a gap."""

    steps: "array[float]"
    values: "array[float]"


def parse(lines: bytes) -> list[Row]:
    """The rows of whole lines that have a step; others are left out."""
    try:  # at once: twice as fast as line by line
        rows = json.loads(b"[" + b",".join(lines.splitlines()) + b"]")
    except (ValueError, RecursionError):
        rows = [_row(line) for line in lines.splitlines()]
    return [row for row in rows if type(row) is dict and _has_step(row)]


def is_key(text: str) -> bool:
    """Whether it may be the name of a curve."""
    return text != "step" and len(text) <= _MOST_KEY_LENGTH and text.isprintable()


def _has_step(row: Row) -> bool:
    step = number(row.get("step"))
    return step is not None and 0 <= step <= MOST_STEP


def in_order(rows: list[Row], step: float) -> list[Row]:
    """The rows without those whose step is below `step` or below that of a row before them."""
    kept = []
    for row in rows:
        if row["step"] >= step:
            step = row["step"]
            kept.append(row)
    return kept


def _row(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def number(value: object) -> float | None:
    """The value if it can be drawn, else None: null, text, booleans and infinities cannot."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of a float
        return None


def columns(rows: Sequence[Row], known: dict[str, None]) -> dict[str, Column]:
    """The points of every key but the step. New keys are added to `known`, up to `MOST_KEYS`.

    Keys that are in the same rows share the array of their steps.
    """
    shapes = dict.fromkeys(map(tuple, rows))
    for key in dict.fromkeys(key for shape in shapes for key in shape):
        if key not in known and len(known) < MOST_KEYS and is_key(key):
            known[key] = None
    steps: dict[frozenset[tuple[str, ...]], array[float]] = {}
    found = {}
    for key in known:
        having = frozenset(shape for shape in shapes if key in shape)
        if not having:
            continue
        own = rows if len(having) == len(shapes) else [row for row in rows if key in row]
        if having not in steps:
            steps[having] = array("d", [row["step"] for row in own])
        found[key] = Column(steps[having], _values([row[key] for row in own]))
    return found


def _values(items: list[Any]) -> "array[float]":
    try:
        if set(map(type, items)) <= {int, float}:
            values = array("d", items)
            if math.isfinite(sum(values)):
                return values
    except OverflowError:  # an integer beyond the range of a float
        pass
    numbers = map(number, items)
    return array("d", [_GAP if value is None else value for value in numbers])
