"""Usage of owners, which decays from the moment it was counted."""

from contextlib import closing
from pathlib import Path

import pytest

from hvd_transformer.service.storage.store import Store

WEEK = 7 * 86_400.0


def test_usage_is_halved_every_week(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "service.db")) as store:
        assert store.usage(0.0) == {}
        store.add_usage("ann", 800.0, 0.0)
        store.add_usage("ben", 100.0, WEEK)
        assert store.usage(WEEK) == pytest.approx({"ann": 400.0, "ben": 100.0})
        store.add_usage("ann", 10.0, 2 * WEEK)
        assert store.usage(2 * WEEK) == pytest.approx({"ann": 210.0, "ben": 50.0})
        assert store.usage(4 * WEEK) == pytest.approx({"ann": 52.5, "ben": 12.5})


def test_it_does_not_matter_how_often_usage_is_counted(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "service.db")) as store:
        for second in range(1, 1001):
            store.add_usage("ann", 4.0, second * 100.0)
        expected = sum(4.0 * 0.5 ** ((1000 - second) * 100.0 / WEEK) for second in range(1, 1001))
        assert store.usage(100_000.0) == pytest.approx({"ann": expected})
