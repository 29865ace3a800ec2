"""Sizes of messages as users write them: 1K, 8M, 1G, in powers of 1024. No torch."""

import re

from hvd_transformer.errors import UserError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
ITEM = 4  # bytes of a float32
DEFAULT_SIZES = "1K,4K,16K,64K,256K,1M,4M,8M,16M,64M,256M"


def parse_sizes(text: str) -> list[int]:
    """The sizes of a list such as "1K,8M" in bytes, in increasing order. Raises `UserError`."""
    return sorted({_size(word.strip()) for word in text.split(",")})


def show_size(size: int) -> str:
    """Such as 1K, 8M or 1000."""
    unit = max((unit for unit, factor in _UNITS.items() if size % factor == 0), key=lambda unit: _UNITS[unit])
    return f"{size // _UNITS[unit]}{unit}"


def _size(word: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)(?:I?B)?", word.upper(), re.ASCII)
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if not ITEM <= size <= 2**31 or size % ITEM:
        raise UserError(
            f"--sizes {word!a}: must be sizes such as 1K,8M,1G: from {ITEM} bytes to 2G, in multiples of {ITEM} bytes"
        )
    return size
