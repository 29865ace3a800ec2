"""Threads for what may block, such as the database and files: the event loop itself never waits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.exceptions import HTTPException

_THREADS = 8
_MOST_WAITING = 256

_T = TypeVar("_T")


class Pool:
    """A few threads, and a queue before them that is not endless."""

    def __init__(self, threads: int = _THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="web")
        self._waiting = 0

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run `call` in a thread and return its result. Raises `HTTPException` 503 if too much waits already."""
        if self._waiting >= _MOST_WAITING:
            raise HTTPException(503, "the service is busy: try again", {"Retry-After": "1"})
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads when they are done."""
        self._threads.shutdown(wait=False, cancel_futures=True)
