"""Runs side by side."""

from pathlib import Path
from typing import Any

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.runs.comparison import compare
from hvd_transformer.service.runs.watched_run import RunRow


def _run(config: dict[str, Any], metrics: dict[str, float]) -> RunRow:
    return RunRow("0" * 12, "a", Path("/a"), "ann", config=config, metrics=metrics)


def test_only_the_keys_that_differ() -> None:
    same = {"task": "language_model", "optimizer.betas": [0.9, 0.95]}
    runs = [
        _run(
            {**same, "output_dir": "a", "optimizer.lr": 0.1, "training.compile": False}, {"loss": 1.0, "test_loss": 2.0}
        ),
        _run({**same, "output_dir": "b", "optimizer.lr": 0.2, "training.compile": 0, "new": 1}, {"loss": 3.0}),
    ]
    compared = compare(runs)
    assert compared.runs == runs
    assert compared.differs == {"optimizer.lr": [0.1, 0.2], "training.compile": [False, 0], "new": [None, 1]}
    assert compared.final == {"loss": [1.0, 3.0], "test_loss": [2.0, None]}


@pytest.mark.parametrize("count", [0, 21])
def test_the_number_of_runs_is_bounded(count: int) -> None:
    with pytest.raises(UserError, match=f"compare: {count} runs; must be 1 to 20"):
        compare([_run({}, {})] * count)
    assert compare([_run({}, {})] * 20).differs == {}
