"""Rows and columns of lines, good and bad."""

import math

import pytest

from hvd_transformer.service.runs.metrics import metrics_rows
from hvd_transformer.service.runs.metrics.metrics_rows import columns, in_order, number, parse


def test_leaves_out_lines_that_are_not_ours() -> None:
    lines = b'{"step": 1, "loss": 2}\n{"step": 2, "lo\nnull\n[1]\n{"loss": 3}\n{"step": "4"}\n{"step": 5}\n\xff\n'
    lines += b'{"step": -1}\n{"step": 1e300}\n{"step": NaN}\n'
    assert parse(lines) == [{"step": 1, "loss": 2}, {"step": 5}]


def test_deeply_nested_lines_are_left_out() -> None:
    assert parse(b"[" * 100_000 + b'\n{"step": 1}\n') == [{"step": 1}]


def test_gaps_are_nan() -> None:
    lines = b'{"step": 1, "a": 1}\n{"step": 2, "a": null}\n{"step": 3, "a": NaN}\n{"step": 4, "a": "x"}\n'
    lines += b'{"step": 5, "a": true}\n{"step": 6, "a": -Infinity}\n{"step": 7, "a": 1e999}\n'
    lines += b'{"step": 8, "a": %d}\n{"step": 9, "a": 2.5}\n' % 10**400
    column = columns(parse(lines), {})["a"]
    assert list(column.steps) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [None if math.isnan(value) else value for value in column.values] == [1, *[None] * 7, 2.5]


def test_each_key_has_the_steps_of_its_own_lines() -> None:
    rows = [{"step": 1, "a": 1, "b": 2}, {"step": 1, "valid": 3}, {"step": 2, "a": 4, "b": 5}]
    found = columns(rows, {})
    assert {key: (list(column.steps), list(column.values)) for key, column in found.items()} == {
        "a": ([1, 2], [1, 4]),
        "b": ([1, 2], [2, 5]),
        "valid": ([1], [3]),
    }
    assert found["a"].steps is found["b"].steps


def test_the_number_of_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_rows, "MOST_KEYS", 3)
    known: dict[str, None] = {}
    for step in range(10):
        columns([{"step": step, f"key {step}": 1, "x" * 1000: 1, "\ud800": 1, "a\nb": 1}], known)
    assert list(known) == ["key 0", "key 1", "key 2"]


def test_lines_that_go_back_are_left_out() -> None:
    rows = [{"step": step} for step in (1, 3, 2, 3, 4)]
    assert [row["step"] for row in in_order(rows, 0)] == [1, 3, 3, 4]
    assert [row["step"] for row in in_order(rows, 3)] == [3, 3, 4]


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, 10**400, [1]])
def test_what_cannot_be_drawn(value: object) -> None:
    assert number(value) is None
