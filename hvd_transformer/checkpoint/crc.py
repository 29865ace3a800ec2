"""CRC-32 of a file that several ranks write: each takes that of what it writes, and they are combined.

The combination is zlib's `crc32_combine`, which Python's zlib module lacks: appending n bytes multiplies the CRC before
them, a polynomial over GF(2), by x^(8 n), modulo the CRC's polynomial.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

# Bit 31 is x^0, as in zlib.
_POLYNOMIAL, _ONE, _X8 = 0xEDB88320, 1 << 31, 1 << 23


class Range(NamedTuple):
    """The CRC-32 of the bytes [start, stop) of a file."""

    start: int
    stop: int
    crc: int


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of two strings of bytes, one after the other; `length` is that of the second."""
    return _multiply(_shift(length), first) ^ second


def merge(ranges: Iterable[Range], least: int) -> list[Range]:
    """Sort the ranges and join neighbours until each is at least `least` bytes long."""
    found: list[Range] = []
    for own in sorted(ranges):
        last = found[-1] if found else own
        if last is not own and last.stop == own.start and last.stop - last.start < least:
            found[-1] = Range(last.start, own.stop, combine(last.crc, own.crc, own.stop - own.start))
        elif own.start < own.stop:
            found.append(own)
    return found


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x^(8 length)."""
    power, square = _ONE, _X8
    while length:
        if length & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        length >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product
