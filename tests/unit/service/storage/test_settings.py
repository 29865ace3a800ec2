"""Settings, which a restart keeps."""

from contextlib import closing
from pathlib import Path

import pytest

from hvd_transformer.errors import UserError
from hvd_transformer.service.storage.settings import Limits
from hvd_transformer.service.storage.store import Store


def test_limits_of_everyone_and_of_some(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "service.db")) as store:
        assert store.limits("ann") == Limits()
        assert store.all_limits() == {None: Limits()}
        store.set_limits(Limits(max_queued=10, max_slots=8))
        store.set_limits(Limits(max_running=1, disk_bytes=10**13), "ben")
    with closing(Store(tmp_path / "service.db")) as store:
        assert store.limits("ann") == Limits(max_queued=10, max_slots=8)
        assert store.limits("ben") == Limits(max_running=1, disk_bytes=10**13)
        assert set(store.all_limits()) == {None, "ben"}
        store.set_limits(None, "ben")
        assert store.limits("ben") == Limits(max_queued=10, max_slots=8)
        store.set_limits(None)
        assert store.limits("ben") == Limits()
        with pytest.raises(UserError, match="^max_slots=-1: must be 0 or more, or null for no limit$"):
            store.set_limits(Limits(max_slots=-1))
        assert store.all_limits() == {None: Limits()}


def test_retention(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "service.db")) as store:
        assert store.retention_days() is None
        store.set_retention_days(30)
        assert store.retention_days() == 30.0
        for days in (0, -1.0, float("nan")):
            with pytest.raises(UserError, match="^retention_days=.*: must be above 0, or null to keep ended jobs"):
                store.set_retention_days(days)
        assert store.retention_days() == 30.0
        store.set_retention_days(None)
        assert store.retention_days() is None
