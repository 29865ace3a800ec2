"""The bounded pool of threads."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from starlette.exceptions import HTTPException

from hvd_transformer.service.web import pool as pools
from hvd_transformer.service.web.pool import Pool


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_MOST_WAITING", 3)
    go_on = threading.Event()

    async def work() -> list[object]:
        pool = Pool()
        calls: list[Callable[[], object]] = [lambda: go_on.wait(10), lambda: 2, threading.current_thread]
        running = [asyncio.ensure_future(pool.run(call)) for call in calls]
        await asyncio.sleep(0)
        with pytest.raises(HTTPException) as refused:
            await pool.run(lambda: 4)
        assert (refused.value.status_code, dict(refused.value.headers or {})) == (503, {"Retry-After": "1"})
        go_on.set()
        found = await asyncio.gather(*running)
        assert await pool.run(lambda: 5) == 5
        pool.close()
        return found

    first, second, thread = asyncio.run(work())
    assert (first, second) == (True, 2)
    assert thread is not threading.current_thread()


def test_errors_come_back() -> None:
    async def work() -> None:
        pool = Pool()
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda: 1 / 0)
        assert pool._waiting == 0
        pool.close()

    asyncio.run(work())
