"""The whole store: one service at a time, and looking at it while there is none."""

from contextlib import closing
from pathlib import Path

import pytest
from new_jobs import new_job, on

from hvd_transformer.errors import UserError
from hvd_transformer.service.jobs import Host, State
from hvd_transformer.service.storage import database_owner
from hvd_transformer.service.storage.store import Store


def test_two_services_on_one_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_owner, "_PATIENCE", 0.0)
    path = tmp_path / "service.db"
    with closing(Store(path)) as store:
        with pytest.raises(UserError, match=f"^{path}: in use by hvd-transformer serve on host .*; end it, or choose"):
            Store(path)
        assert store.add_jobs([new_job()]) == [1]
    with closing(Store(path)) as store:
        assert store.add_jobs([new_job()]) == [2]


def test_everything_can_be_listed_without_a_service(tmp_path: Path) -> None:
    path = tmp_path / "service.db"
    with closing(Store(path)) as store:
        store.put_hosts([Host("h1", 2)])
        store.add_jobs([new_job("a", tags=("x",)), new_job("b")])
        store.start(1, on("h1"), 2000.0)

        def everything(store: Store) -> list[object]:
            return [
                store.jobs(),
                store.jobs({State.STARTING}, "ann", "x"),
                store.job(2),
                store.attempts(1),
                store.open_attempts(),
                store.hosts(),
                store.waiting(),
                store.unmet_dependencies(),
                store.counts(),
                store.usage(2000.0),
                store.all_limits(),
                store.events_after(0),
            ]

        expected = everything(store)
        with closing(Store(path, read_only=True)) as reader:
            assert everything(reader) == expected
    with closing(Store(path, read_only=True)) as reader:
        assert everything(reader) == expected
        with pytest.raises(UserError, match=f"^{path}: opened for reading only$"):
            reader.update(2, priority=1)
