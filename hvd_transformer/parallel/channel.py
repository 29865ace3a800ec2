"""A bounded queue between two neighbouring stages that can be broken off."""

import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Aborted(Exception):
    """Another stage failed: this one has nothing more to do."""


class Channel(Generic[Item]):
    """One thread puts, one gets; both wait, and `abort` wakes both."""

    def __init__(self, size: int) -> None:
        self._items: deque[Item] = deque()
        self._size, self._aborted = size, False
        self._changed = threading.Condition()

    def put(self, item: Item) -> None:
        """Waits for room. Raises `Aborted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or len(self._items) < self._size)
            self._check()
            self._items.append(item)
            self._changed.notify_all()

    def get(self) -> Item:
        """Waits for an item. Raises `Aborted`."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._items)
            self._check()
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def abort(self) -> None:
        """Every `put` and `get`, now and later, raises `Aborted`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def _check(self) -> None:
        if self._aborted:
            raise Aborted
