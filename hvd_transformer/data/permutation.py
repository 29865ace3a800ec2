"""A shuffled order of any length in constant memory: a bijection computed per index, never a list.

A Feistel network over the next even power of two (Luby and Rackoff 1988), walked until it lands inside the
range (Black and Rogaway 2002, "cycle walking").
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


class Permutation:
    """A bijection of range(length), given by `key` alone.

    `order[indices]` maps an array of indices, int64, in [0, length).
    """

    def __init__(self, length: int, key: tuple[int, ...]) -> None:
        self.length = length
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        self._mask = np.uint64((1 << self._half_bits) - 1)
        self._round_keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)

    def __getitem__(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        values = self._encrypt(indices.astype(np.uint64))
        outside = values >= self.length
        while outside.any():
            values[outside] = self._encrypt(values[outside])
            outside = values >= self.length
        return values.astype(np.int64)

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        shift = np.uint64(self._half_bits)
        left, right = values >> shift, values & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        joined: NDArray[np.uint64] = (left << shift) | right
        return joined


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
