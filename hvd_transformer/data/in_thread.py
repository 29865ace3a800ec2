"""Work of libraries that cannot be interrupted: it runs on a thread of its own, which is left behind."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from hvd_transformer.data.build_once import ShouldStop, Stopped

Result = TypeVar("Result")
_LOOK_SECONDS = 0.2
_BUSY = 0.25  # of a core: below, this process only waits


def in_thread(work: Callable[[], Result], look: Callable[[], object]) -> Result:
    """Run `work` in a thread and return its result. `look` is called meanwhile; an exception of it ends the wait."""
    ended: Future[Result] = Future()

    def run() -> None:
        try:
            ended.set_result(work())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="library", daemon=True).start()
    while not ended.done():
        wait([ended], timeout=_LOOK_SECONDS)
        look()
    return ended.result()


def computing(work: Callable[[], Result], should_stop: ShouldStop) -> Result:
    """Run native code in a thread and return its result. Raises `Stopped` on request.

    `should_stop` is a sign of progress (`training.progress_rounds`), so it is called only while this process computes.
    """
    used = time.process_time()

    def look() -> None:
        nonlocal used
        before, used = used, time.process_time()
        if used - before > _BUSY * _LOOK_SECONDS and should_stop():
            raise Stopped

    return in_thread(work, look)
